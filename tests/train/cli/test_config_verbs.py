"""`configs`, `init` and `data`: shipped configs, a new config, and what a model reads."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.support import tiny
from tests.train.tasks.support import (
    tiny_classifier,
    tiny_masked,
    tiny_tagger,
    tiny_translator,
)
from train.cli.main import main
from train.config.experiment_files import find_experiment
from train.config.shipped import shipped_configs
from train.data.data_config import TokenizerConfig
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import train_tokenizer
from train.visualization.data_summary import (
    describe_example,
    describe_lengths,
    print_summary,
    summarize_data,
)

Capture = pytest.CaptureFixture[str]


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_configs_lists_every_shipped_experiment(capsys: Capture) -> None:
    assert status("configs") == 0
    shown = capsys.readouterr().out
    words = shown.replace(",", " ").split()
    for each in shipped_configs():
        assert f"{each.summary}\n" in shown
        names = [f"{each.name}:{name}" for name in each.experiments]
        assert set(names if len(names) > 1 else [each.name]) <= set(words)
    assert status("configs", "--json") == 0
    [found] = [each for each in json.loads(capsys.readouterr().out) if each["name"] == "gpt2"]
    assert found["experiments"] == ["small", "medium", "large", "xl"]
    assert status("configs", "gpt2") == 2


def test_init_writes_a_config_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = 'my "books"\\*.txt'
    assert status("init", "my-text.py", "--data", hostile) == 0
    experiment = find_experiment("my-text.py")
    assert (experiment.name, experiment.text_data.path) == ("my_text", hostile)
    assert "python -m train fit my-text.py" in (tmp_path / "my-text.py").read_text()
    before = (tmp_path / "my-text.py").read_text()
    refusals = {
        "my-text.py": "exists already",
        "train.py": "in place of the package train",
        "notes.txt": "does not end with .py",
    }
    for name, reason in refusals.items():
        assert status("init", name) == 2
        assert reason in capsys.readouterr().err
    assert (tmp_path / "my-text.py").read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["my-text.py"]


@pytest.mark.full
def test_new_config_trains_on_own_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("The cat sat on the mat, and the dog saw it.\n" * 400)
    assert status("init", "own.py", "--data", "text.txt") == 0
    small = ["--model.num-layers", "1", "--batch-size", "2", "--data.tokenizer.vocab-size", "300"]
    more = ["--data.cache-dir", "cache", "--evaluation.num-batches", "1", "--steps", "1"]
    capsys.readouterr()
    assert status("fit", "own.py", *small, *more, "--sample.every", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1


def test_data_verb_summarizes_text_by_split(tmp_path: Path, capsys: Capture) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat\n" * 400)
    experiment = tiny(tmp_path)
    data = dataclasses.replace(
        experiment.text_data,
        validation_path=str(tmp_path / "held.txt"),
        tokenizer=TokenizerConfig("byte"),
    )
    (tmp_path / "held.txt").write_text("the mat\n" * 20)
    summary = summarize_data(dataclasses.replace(experiment, data=data), 2)
    validation = summary["splits"]["validation"]
    assert (validation["documents"], validation["bytes"]) == (1, 160)
    assert validation["tokens"] == 160 + 2  # one separator on each side
    assert validation["lengths"]["median"] == 160
    assert summary["splits"]["train"]["tokens"] == 3202
    assert summary["batch"]["tokens"] == [8, 16]
    first = summary["examples"][0]
    assert (first["in_loss"], first["tokens"]) == (16, 16)
    assert "the cat" in first["text"] or "cat\nthe" in first["text"]
    print_summary(summary)
    assert "3,202" in capsys.readouterr().out


def test_length_summary() -> None:
    actual = describe_lengths(np.array([1, 2, 3, 4, 100]))
    assert actual == {"mean": 22.0, "shortest": 1, "median": 3, "95%": 80.8, "longest": 100}
    assert describe_lengths(np.array([])) == {}


TASKS: Any = [tiny_masked, tiny_classifier, tiny_tagger, tiny_translator]


@pytest.mark.parametrize("make", TASKS, ids=lambda make: make.__name__)
def test_examples_of_every_task_show_their_loss(make: Any, tmp_path: Path) -> None:
    summary = summarize_data(make(tmp_path), 1)
    [example] = summary["examples"]
    match make.__name__:
        case "tiny_masked":
            assert 0 < example["in_loss"] < example["tokens"] / 2
            assert example["text"].count("{") >= example["in_loss"]
        case "tiny_classifier":
            assert example["label"] in ("animal", "tool")
            assert "tool" in summary["labels"]
        case "tiny_tagger":
            assert "{B-ANIMAL}" in example["text"] or "{O}" in example["text"]
        case _:
            assert len(example["source"].split()) == len(example["text"].split())
    assert summary["splits"]["train"]


def test_text_without_loss_is_in_brackets(tmp_path: Path) -> None:
    from train.data.mixed_corpora import prepare_tokenizer

    experiment = tiny(tmp_path)
    data = dataclasses.replace(experiment.text_data, tokenizer=TokenizerConfig("byte"))
    tokenizer: Tokenizer = prepare_tokenizer(data)
    targets = tokenizer.encode("question answer")
    weights = np.r_[np.zeros(6), np.ones(len(targets) - 6)].astype(np.float32)
    row = {"tokens": np.roll(targets, 1), "targets": targets, "weights": weights}
    assert describe_example(row, tokenizer, ())["text"] == "[[questi]]on answer"
    sparse = row | {"tokens": targets, "weights": 1 - weights}
    assert describe_example(sparse, tokenizer, ())["text"].startswith("q{q} u{u} e{e}")


def test_documents_of_a_packed_row_are_shown_apart() -> None:
    tokenizer = train_tokenizer(TokenizerConfig("byte"), [])
    text = np.frombuffer(b"q? yesq? no", np.uint8).astype(np.int32)
    row = {
        "tokens": np.append(ord("\n"), text[:-1]),
        "targets": text,
        "segments": np.array([1] * 6 + [2] * 5, np.int32),
        "weights": np.array([0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1], np.float32),
    }
    found = describe_example(row, tokenizer, ())
    assert found["text"] == "[[q? ]]yes\n--\n[[q? ]]no"
    assert found["documents"] == 2
