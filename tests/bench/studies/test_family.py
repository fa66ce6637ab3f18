"""The comparison of mixers: the recall task, equal sizes, and a whole study of two mixers."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from bench.small_runs import small
from bench.studies import family
from bench.studies.family import RECALL, RECALL_LENGTH, TASKS, experiment, main, mixers
from bench.studies.recall import AssociativeRecall, recall_examples
from tests.train.support import write_text
from train.config.plugins import imports_of
from train.errors import UsageError
from train.experiment import Experiment
from train.scaling.design import count_without_embeddings
from transformer.mixer_registry import BUILTIN_MIXERS, MIXERS


def test_answers_are_the_values_of_their_keys() -> None:
    task = AssociativeRecall(pairs=5, keys=9)
    examples = recall_examples(task, 24, 200, seed=0)
    tokens, targets, asked = (examples[name] for name in ("tokens", "targets", "asked"))
    assert np.array_equal(asked, np.broadcast_to(np.arange(24) >= 10, (200, 24)))
    assert not targets[:, :10].any()
    for row, answers in zip(tokens, targets, strict=True):
        value_of = dict(zip(row[:10:2].tolist(), row[1:10:2].tolist(), strict=True))
        assert len(value_of) == 5
        assert all(0 <= key < 9 <= value < 18 for key, value in value_of.items())
        assert [value_of[key] for key in row[10:].tolist()] == answers[10:].tolist()
    counts = np.bincount(tokens[:, 10:].ravel(), minlength=9)
    assert np.all(np.abs(counts / (200 * 14) - 1 / 9) < 0.03)  # five standard deviations
    again = recall_examples(task, 24, 200, seed=0)
    assert all(np.array_equal(again[name], examples[name]) for name in examples)


@pytest.mark.full
@pytest.mark.parametrize("task", TASKS)
def test_all_mixers_have_equal_parameters(task: str) -> None:
    sizes = {}
    for name in mixers(RECALL_LENGTH, 64):
        model = experiment(task, name, 10, 0).model
        sizes[name] = count_without_embeddings(dataclasses.replace(model, vocab_size=4096))
    assert max(sizes.values()) < 1.02 * min(sizes.values()), sizes


def test_every_causal_mixer_is_compared() -> None:
    """Linformer has no causal form, and the rest need a memory to attend to."""
    taken = {type(mixer) for mixer in mixers(RECALL_LENGTH, 64).values()}
    names = {kind for kind in BUILTIN_MIXERS if MIXERS.config_class(kind) not in taken}
    assert names == {"linformer", "bahdanau", "luong", "seq2seq", "gnmt_encoder", "gnmt_decoder"}


def test_too_short_sequences_raise() -> None:
    made = experiment("recall", "full", 10, 0)
    data = dataclasses.replace(made.data, length=2 * RECALL.pairs)  # type: ignore[call-arg]
    with pytest.raises(
        UsageError, match=r"data\.length 32: 16 pairs take 32 tokens and leave none"
    ):
        dataclasses.replace(made, data=data)
    assert imports_of(made) == ["bench.studies.recall"]


@pytest.mark.nightly
def test_study_writes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = str(write_text(tmp_path / "text.txt", lines=2000))

    def short(steps: int) -> Experiment:
        made = small(steps)
        data = dataclasses.replace(made.text_data, path=text, sequence_length=32)
        return dataclasses.replace(made, data=data, batch_size=2)

    monkeypatch.setattr(family, "small", short)
    monkeypatch.setattr(family, "LANGUAGE_WIDTH", 32)
    monkeypatch.setattr(
        family, "RECALL", dataclasses.replace(RECALL, train_examples=64, test_examples=32)
    )
    main(
        language_steps=2,
        recall_steps=2,
        seeds=1,
        names=("full", "identity"),
        rounds=1,
        workdir=tmp_path / "runs",
        output=tmp_path / "results",
    )
    data = json.loads((tmp_path / "results" / "family.json").read_text())
    assert set(data["scores"]) == set(data["costs"]) == {"full", "identity"}
    for by_task in data["scores"].values():
        assert all(len(by_task[task]) == 1 for task in TASKS)
        assert all(0 <= accuracy <= 100 for accuracy in by_task["recall"])
    assert data["costs"]["full"]["ratio"] == 1
    assert (tmp_path / "results" / "family.png").stat().st_size > 10_000
    assert "| identity |" in (tmp_path / "results" / "family.md").read_text()
