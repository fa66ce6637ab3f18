"""Runs from the first step to the last: what `fit` returns, logs, shows and leaves."""

import contextlib
import dataclasses
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import train
from tests.train.resumed_runs import contents
from tests.train.support import NO_DETECTOR, assert_same_bits, lines_of, losses, tiny
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from tests.train.tasks.support import tiny_classifier
from train.checkpoint.manager import CheckpointManager
from train.config.io import experiment_to_text
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.evaluation.evaluator import is_due
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.reporter import Reporter
from train.run_folder import lock
from train.run_folder.folder import RunFolder
from train.run_folder.run_config import read_experiment
from train.runtime import stages
from train.tasks.language_modeling import LanguageModelTask
from train.telemetry.goodput import compute_goodput, read_time_records
from transformer.attention.variants.reformer import ReformerConfig
from transformer.models.block import BlockConfig

STEPS = 12

RENDERS_PLOTS = True


class Finished(NamedTuple):
    """A run from its first step to its last."""

    experiment: Experiment
    workdir: Path
    run: train.Run
    shown: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("loop")
    experiment = tiny(
        folder,
        num_layers=1,
        steps=STEPS,
        evaluation=EvaluationConfig(every=6, num_batches=2, compression_baselines=True),
        sample=SampleConfig(every=6, prompt="the ", max_new_tokens=9),
        checkpoint=CheckpointConfig(every=4, keep_last=1, keep_every=8),
    )
    workdir = folder / "runs" / "first"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as shown:
        patch.setattr(stages, "FIRST_LINE_SECONDS", 0.0)
        patch.setattr(stages, "BAR_DELAY_SECONDS", 0.0)
        run = train.fit(experiment, str(workdir))
    return Finished(experiment, workdir, run, shown.getvalue())


def test_a_config_is_named_as_on_the_command_line(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a folder, the run is the one in `runs/` that has the config's name."""
    (tmp_path / "own.py").write_text(
        "from train.run import read_experiment\n"
        "from train.run_folder.folder import RunFolder\n"
        f"folder = RunFolder.open_existing({str(finished.workdir)!r})\n"
        "EXPERIMENTS = {'own': read_experiment(folder)}\n"
    )
    shutil.copytree(finished.workdir, tmp_path / "runs" / "tiny")
    monkeypatch.chdir(tmp_path)
    again = train.fit("own.py:own", quiet=True)
    assert str(again.folder.path) == "runs/tiny"
    assert again.final_metrics == finished.run.final_metrics
    with pytest.raises(UserError, match=r"config quickstrat: is not known .did you mean q"):
        train.fit("quickstrat")


def test_run_folder_contents(finished: Finished) -> None:
    assert sorted(entry.name for entry in finished.workdir.iterdir()) == [
        "checkpoints",
        "config.json",
        "config.txt",
        "generation_config.json",
        "logbook.jsonl",
        "loss.png",
        "metrics.jsonl",
        "owner.lock",
        "samples.txt",
        "tensorboard",
        "time.jsonl",
        "tokenizer.json",
    ]
    assert (finished.workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
    boards = {each.name for each in (finished.workdir / "tensorboard").iterdir()}
    assert boards == {"train", "validation"}


def test_resolved_experiment_is_saved(finished: Finished) -> None:
    """With the vocabulary size, and the choices of `auto`."""
    resolved = finished.run.experiment
    tokenizer = Tokenizer.load(finished.workdir / "tokenizer.json")
    assert finished.run.tokenizer is not None
    assert tokenizer.digest == finished.run.tokenizer.digest
    assert resolved.model.vocab_size == tokenizer.vocab_size
    model = dataclasses.replace(finished.experiment.model, vocab_size=tokenizer.vocab_size)
    assert resolved == dataclasses.replace(finished.experiment, model=model)
    assert read_experiment(RunFolder.open_existing(finished.workdir)) == resolved
    text = (finished.workdir / "config.txt").read_text()
    assert text.startswith(experiment_to_text(resolved))
    assert "# auto: model.layer_pattern.0.mixer.backend = " in text
    plain = json.loads((finished.workdir / "config.json").read_text())
    assert plain["chosen"]["model.layer_loop"] == "unroll"


def test_metrics_log(finished: Finished) -> None:
    lines = lines_of(finished.workdir / "metrics.jsonl")
    training = [line for line in lines if line["split"] == "train"]
    assert [line["step"] for line in training] == list(range(1, STEPS + 1))
    names = {"step", "split", "loss", "grad_norm", "param_norm", "learning_rate", "skipped"}
    assert set(training[0]) == names  # its time includes compilation
    for line in training[1:]:
        assert set(line) == {*names, "tokens_per_second"}
        assert line["tokens_per_second"] > 0
        assert line["grad_norm"] > 0
    rates = [line["learning_rate"] for line in training[:5]]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    held_out = [line for line in lines if line["split"] == "validation"]
    assert [line["step"] for line in held_out] == [6, STEPS]
    compressors = {"bits_per_byte_gzip", "bits_per_byte_xz"}
    for line, more in zip(held_out, (set(), compressors), strict=True):
        assert set(line) == {"step", "split", "loss", "perplexity", "bits_per_byte", *more}
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))


def test_loss_decreases(finished: Finished) -> None:
    curve = losses(finished.workdir)
    vocabulary = finished.run.experiment.model.vocab_size
    assert curve[1] == pytest.approx(math.log(vocabulary), abs=0.1)
    assert curve[STEPS] < curve[1] - 0.3


def test_event_log(finished: Finished) -> None:
    started, saved, ended = lines_of(finished.workdir / "logbook.jsonl")
    assert (saved["event"], saved["step"]) in [("saved", 4), ("saved", 8)]
    assert (started["event"], started["step"]) == ("started", 0)
    assert started["mesh"] == {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    assert started["hardware"]["count"] == 1
    assert started["changed"] == {}
    assert (ended["event"], ended["step"]) == ("finished", STEPS)
    assert {name: ended[name] for name in finished.run.final_metrics} == finished.run.final_metrics


def test_goodput_accounts_for_all_time(finished: Finished) -> None:
    result = compute_goodput(read_time_records(finished.workdir / "time.jsonl"))
    assert result.starts == 1
    spent = {what for what, seconds in result.seconds.items() if seconds}
    assert spent == {"start", "restore", "compile", "step", "evaluate", "save"}


def test_checkpoints_kept(finished: Finished) -> None:
    """The newest checkpoint, and the permanent ones."""
    with CheckpointManager(finished.workdir / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [8, 12]


def test_the_last_step_is_saved_though_no_checkpoint_is_due(tmp_path: Path) -> None:
    checkpoint = CheckpointConfig(every=4, keep_last=2)
    run = train.fit(
        tiny(tmp_path, num_layers=1, steps=5, checkpoint=checkpoint), tmp_path / "run", quiet=True
    )
    names = {path.name for path in Path(str(run.folder.checkpoints)).iterdir()}
    assert names == {"4", "5"}


@pytest.mark.full
def test_first_step_of_each_batch_shape_counts_as_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[int] = []
    counted: list[int] = []

    def compilation(reporter: Reporter, step: int) -> Any:
        compiled.append(step)
        return contextlib.nullcontext()

    monkeypatch.setattr(Reporter, "compilation", compilation)
    monkeypatch.setattr(Reporter, "count_step", lambda _, step, tokens: counted.append(tokens))
    texts = tmp_path / "texts.tsv"
    lines = (f"{n % 2}\t{'cat ' * (3 if n % 2 else 14)}" for n in range(60))
    texts.write_text("\n".join(["label\ttext", *lines]))
    experiment = tiny_classifier(tmp_path, steps=30, recovery=NO_DETECTOR)
    data: Any = experiment.data
    data = dataclasses.replace(data, path=str(texts), test_path="", max_buckets=2)
    train.fit(dataclasses.replace(experiment, data=data), str(tmp_path / "run"), quiet=True)
    assert compiled[0] == 1
    assert len(compiled) == 2
    assert [step for step, tokens in enumerate(counted, 1) if tokens == 0] == compiled


def one_plain_layer(folder: Path, **changes: Any) -> Experiment:
    return tiny(folder, num_layers=1, dropout=0.0, recovery=NO_DETECTOR, **changes)


def test_a_run_that_was_taken_over_saves_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder without locks, whose owner reads its record before it saves."""
    workdir = tmp_path / "run"
    log = Reporter.log_training

    def log_and_take_over(reporter: Reporter, step: int, metrics: dict[str, float]) -> None:
        log(reporter, step, metrics)
        if step == 3:
            (workdir / "owner.json").write_text('{"process": 2}')

    monkeypatch.setattr(lock, "_has_locks", lambda folder: False)
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(Reporter, "log_training", log_and_take_over)
    experiment = one_plain_layer(tmp_path, steps=4, checkpoint=CheckpointConfig(every=2))
    with pytest.raises(UserError, match="was taken over by another process"):
        train.fit(experiment, workdir, quiet=True)
    assert [path.name for path in (workdir / "checkpoints").iterdir()] == ["2"]


def test_failing_sample_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> list[str]:
        raise RuntimeError("no room\nfor a sample")

    monkeypatch.setattr(LanguageModelTask, "sample", fail)
    sampling = SampleConfig(every=1, max_new_tokens=2)
    experiment = one_plain_layer(tmp_path, steps=2, sample=sampling)
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        run = train.fit(experiment, str(tmp_path / "run"))
    assert run.step == 2
    assert "step 1: no sample (no room); training continues" in shown.getvalue()
    events = lines_of(tmp_path / "run/logbook.jsonl")
    failed = [(each["step"], each["reason"]) for each in events if each["event"] == "sample failed"]
    assert failed == [(1, "no room"), (2, "no room")]


@pytest.mark.full
def test_model_without_cache_is_trained_and_sampled(tmp_path: Path) -> None:
    block = BlockConfig(mixer=ReformerConfig(num_heads=2, num_hashes=1))
    sampling = SampleConfig(every=2, max_new_tokens=3)
    base = one_plain_layer(tmp_path, steps=2, sample=sampling)
    model = dataclasses.replace(base.model, layer_pattern=(block,))
    train.fit(dataclasses.replace(base, model=model), str(tmp_path / "run"), quiet=True)
    assert (tmp_path / "run" / "samples.txt").read_text().startswith("--- step 2\n")


def test_what_is_shown_and_sampled(finished: Finished) -> None:
    count = sum(leaf.size for leaf in jax.tree.leaves(finished.run.params))
    loss = finished.run.final_metrics["loss"]
    for line in (
        "initializing the weights",
        "compiling the training step",
        f"tiny starts: {count:,} parameters",
        f"step 12: validation loss {loss:.4g}, perplexity",
        "bits per byte gzip 2.",
        "step 12: sample: ",
        "went into training steps; start",
    ):
        assert line in finished.shown
    text = (finished.workdir / "samples.txt").read_text()
    assert text.startswith("--- step 6\nthe ")  # the prompt
    assert "\n--- step 12\n" in text


def test_returned_run(finished: Finished) -> None:
    run = finished.run
    assert run.step == STEPS
    assert str(run.folder.path) == str(finished.workdir)
    last = lines_of(finished.workdir / "metrics.jsonl")[-1]
    assert last == {"step": STEPS, "split": "validation", **run.final_metrics}
    assert {type(value) for value in run.final_metrics.values()} == {float}
    assert run.tokenizer is not None
    tokens = np.array([run.tokenizer.encode("the cat")])
    logits = jax.jit(lambda params: run.model.apply({"params": params}, tokens).logits)(run.params)
    assert logits.shape == (1, 7, run.tokenizer.vocab_size)


def test_load_equals_returned_run(finished: Finished) -> None:
    run = train.load(str(finished.workdir))
    assert run.step == STEPS
    assert run.tokenizer is not None
    assert finished.run.tokenizer is not None
    assert run.tokenizer.digest == finished.run.tokenizer.digest
    assert run.model.config == finished.run.model.config
    assert_same_bits(run.params, finished.run.params)
    assert run.evaluate("validation") == pytest.approx(finished.run.final_metrics, rel=1e-6)


def test_load_older_step(finished: Finished) -> None:
    older = train.load(str(finished.workdir), step=8)
    assert older.step == 8
    assert not np.array_equal(older.params["embedding"], finished.run.params["embedding"])
    with pytest.raises(UserError, match=r"9: does not exist; the folder has steps 8, 12"):
        train.load(str(finished.workdir), step=9)


def test_finished_run_is_not_changed(finished: Finished) -> None:
    before = contents(finished.workdir)
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        run = train.fit(finished.experiment, str(finished.workdir))
    assert "tiny is finished: 12 steps are done" in shown.getvalue()
    assert len(shown.getvalue().splitlines()) == 1
    assert (run.step, run.final_metrics) == (STEPS, finished.run.final_metrics)
    assert_same_bits(run.params, finished.run.params)
    assert contents(finished.workdir) == before


def test_finished_run_is_evaluated_anew_with_other_settings(
    finished: Finished, tmp_path: Path
) -> None:
    workdir = tmp_path / "copy"
    shutil.copytree(finished.workdir, workdir)
    evaluation = dataclasses.replace(finished.experiment.evaluation, average_checkpoints=2)
    run = train.fit(
        dataclasses.replace(finished.experiment, evaluation=evaluation), str(workdir), quiet=True
    )
    assert run.final_metrics != finished.run.final_metrics
    assert run.final_metrics["loss"] == run.evaluate("validation")["loss"]
    loaded = train.load(str(workdir))
    assert loaded.experiment.evaluation == evaluation
    assert_same_bits(loaded.params, run.params)


def test_fewer_steps_than_done_is_an_error(finished: Finished) -> None:
    before = contents(finished.workdir)
    fewer = dataclasses.replace(finished.experiment, steps=5)
    with pytest.raises(UserError, match="is at step 12 already; give --steps 12 or more"):
        train.fit(fewer, str(finished.workdir), quiet=True)
    assert contents(finished.workdir) == before


def test_is_due() -> None:
    assert [step for step in range(1, 13) if is_due(step, 5)] == [5, 10]
    assert not any(is_due(step, 0) for step in range(1, 13))


def test_unknown_names_of_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = train.nothing
