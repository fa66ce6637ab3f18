"""Properties of every task: it trains, resumes exactly, evaluates, and answers prompts."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import train
from tests.train.resumed_runs import preempted_after
from tests.train.support import (
    NO_DETECTOR,
    assert_close,
    assert_same_bits,
    command,
    lines_of,
    losses,
)
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from tests.train.tasks.support import TINY
from train.assembly import make_task
from train.config.io import experiment_from_dict, experiment_to_dict, experiment_to_text
from train.errors import UsageError
from train.experiment import CheckpointConfig, Experiment
from train.parallel.mesh import MeshConfig
from train.state import EmaConfig
from train.visualization.attention_view import view_attention

Capture = pytest.CaptureFixture[str]

RENDERS_PLOTS = True

STEPS = {
    "language": 12,
    "masked": 12,
    "classification": 24,
    "tagging": 24,
    "answers": 24,
    "translation": 12,
}

METRICS = {
    "language": {"loss", "perplexity", "bits_per_byte"},
    "masked": {"loss", "accuracy"},
    "classification": {"loss", "accuracy"},
    "tagging": {"loss", "accuracy", "f1"},
    "answers": {"loss", "accuracy", "exact_match", "f1"},
    "translation": {"loss", "perplexity", "bleu", "tokenised_bleu"},
}

PROMPTS = {
    "language": "the cat",
    "masked": "the [MASK]at sat",
    "classification": "the red fish",
    "tagging": "the red fish",
    "answers": "which animal\nthe red fish",
    "translation": "the red fish",
}


class Trained(NamedTuple):
    name: str
    experiment: Experiment
    workdir: Path
    run: train.Run


def an_experiment(name: str, folder: Path, **changes: Any) -> Experiment:
    """Return an experiment that keeps every checkpoint."""
    settings = {
        "steps": STEPS[name],
        "ema": EmaConfig(0.5),
        "recovery": NO_DETECTOR,
        "checkpoint": CheckpointConfig(every=4, keep_last=9),
    }
    return TINY[name](folder, **{**settings, **changes})


def in_tiers(name: str) -> Any:
    """Return a task as a parameter: all but one are full, as each has tests of its own too."""
    return pytest.param(name, marks=() if name == "classification" else pytest.mark.full)


@pytest.fixture(scope="module", params=[in_tiers(name) for name in TINY])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    experiment = an_experiment(name, folder)
    run = train.fit(experiment, str(folder / "run"), quiet=True)
    return Trained(name, experiment, folder / "run", run)


@pytest.mark.full
def test_metric_names(trained: Trained) -> None:
    assert set(trained.run.final_metrics) == METRICS[trained.name]
    last = lines_of(trained.workdir / "metrics.jsonl")[-1]
    assert last == {"step": trained.run.step, "split": "validation", **trained.run.final_metrics}
    assert all(math.isfinite(value) for value in trained.run.final_metrics.values())
    assert (trained.workdir / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_loss_decreases(trained: Trained) -> None:
    curve = losses(trained.workdir)
    assert curve[STEPS[trained.name]] < curve[1] - 0.2


def test_tokens_are_counted(trained: Trained) -> None:
    lines = [x for x in lines_of(trained.workdir / "metrics.jsonl") if x["split"] == "train"]
    # A step that compiles a program, for the first time or for another shape, is not counted.
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    assert speeds
    assert min(speeds) > 0


@pytest.mark.full
def test_load_restores_the_weights(trained: Trained) -> None:
    run = train.load(str(trained.workdir))
    assert_same_bits(run.params, trained.run.params)
    assert run.experiment.task == trained.run.experiment.task
    assert run.labels == trained.run.labels
    assert (trained.workdir / "labels.json").exists() == bool(run.labels)
    actual = run.evaluate("validation")
    assert actual == pytest.approx(trained.run.final_metrics, rel=1e-5)


@pytest.mark.full
def test_evaluate(capsys: Capture, trained: Trained) -> None:
    result = command(capsys, "evaluate", str(trained.workdir), "--split", "test", "--json")
    assert (result.status, result.error) == (0, "")
    metrics = json.loads(result.output)
    assert (metrics["step"], metrics["split"]) == (trained.run.step, "test")
    assert METRICS[trained.name] <= set(metrics)
    assert metrics["loss"] != trained.run.final_metrics["loss"]


@pytest.mark.full
def test_sample(capsys: Capture, trained: Trained) -> None:
    prompt = PROMPTS[trained.name]
    continues = trained.name == "language"
    options = ("--max-new-tokens", "5") if continues else ()
    line = ("sample", str(trained.workdir), "--prompt", prompt, *options)
    result = command(capsys, *line, "--json")
    assert (result.status, result.error) == (0, "")
    [text] = json.loads(result.output)["text"]
    assert command(capsys, *line).output == f"{prompt if continues else ''}{text}\n"
    texts = trained.run.generate([prompt, prompt], max_new_tokens=5)
    assert (len(texts), texts[0]) == (2, text)
    assert trained.run.generate([]) == []


SAMPLING = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "beams", "seed"),
    *("source_language", "target_language"),
)
SUPPORTED = {
    "language": {"max_new_tokens", "temperature", "top_k", "top_p", "seed"},
    "translation": {"beams", "source_language", "target_language"},
}


def test_attention_view_covers_the_inputs_of_the_task(trained: Trained) -> None:
    name, prompt = trained.name, PROMPTS[trained.name]
    target = "das rotes"
    view = view_attention(trained.run, prompt, target if name == "translation" else None)
    tokens = [token.strip("·") for token in view.tokens]
    if name == "translation":
        assert tokens[1:] == target.split()
        assert [token.strip("·") for token in view.sources][:-1] == prompt.split()
        assert view.stages == ["encoder", "decoder", "cross"]
        own = view_attention(trained.run, prompt)  # the model's own translation
        assert own.tokens[0] == view.tokens[0]
    elif name in ("language", "masked"):
        # The space before a mask is part of the masked token.
        read = prompt.replace(" [MASK]", "[MASK]").replace(" ", "·")
        assert "".join(view.tokens[1:]) == read
    elif name == "answers":
        assert [*tokens[1:3], *tokens[4:-1]] == prompt.split()
    else:
        assert tokens[-3:] == prompt.split()
    causal = trained.experiment.model.causal
    for each in view.maps_of("decoder" if causal else "encoder"):
        rows, columns = view.labels_of(each.stage)
        assert each.weights.shape[2:] == (len(rows), len(columns))
    assert view.causal == causal


def test_sample_rejects_options_without_effect(capsys: Capture, trained: Trained) -> None:
    supported = SUPPORTED.get(trained.name, set())
    assert set(make_task(trained.experiment).supported_options) == supported
    line = ("sample", str(trained.workdir), "--prompt", PROMPTS[trained.name])
    for name in set(SAMPLING) - supported:
        flag = f"--{name.replace('_', '-')}"
        result = command(capsys, *line, flag, "1")
        assert (result.status, result.output) == (2, "")
        assert f"sample {flag}: has no effect on this run's task" in result.error
    with pytest.raises(UsageError, match="beams -1: give 1 or more, or 0"):
        trained.run.generate(PROMPTS[trained.name], num_beams=-1)


def test_settings_are_read_back(trained: Trained) -> None:
    for experiment in (trained.experiment, trained.run.experiment):
        assert experiment_from_dict(experiment_to_dict(experiment), "here") == experiment
    assert f'task.kind = "{type(trained.experiment.task).__name__}"' in experiment_to_text(
        trained.experiment
    )


@pytest.mark.full
def test_resumed_run_equals_uninterrupted_run(trained: Trained, tmp_path: Path) -> None:
    with preempted_after(5):
        train.fit(trained.experiment, str(tmp_path / "run"), quiet=True)
    run = train.fit(trained.experiment, str(tmp_path / "run"), quiet=True)
    assert losses(tmp_path / "run") == losses(trained.workdir)
    assert run.final_metrics == trained.run.final_metrics
    assert_same_bits(run.params, trained.run.params)


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (4, {"mesh": MeshConfig(data=1, fsdp=2, tensor=2), "grad_accum_steps": 2}),
        pytest.param(2, {"compile": "pmap"}, marks=pytest.mark.nightly),
    ],
    ids=["a mesh and microbatches", "pmap"],
)
def test_losses_are_independent_of_devices_and_microbatches(
    trained: Trained,
    tmp_path: Path,
    count_devices: Callable[[int], None],
    devices: int,
    changes: dict[str, Any],
) -> None:
    count_devices(devices)
    experiment = dataclasses.replace(trained.experiment, steps=4, **changes)
    run = train.fit(experiment, str(tmp_path / "run"), quiet=True)
    first = {step: loss for step, loss in losses(trained.workdir).items() if step <= 4}
    assert losses(tmp_path / "run") == pytest.approx(first, abs=1e-5)
    expected = train.load(str(trained.workdir), step=4)
    actual, expected_params = (jax.tree.map(np.asarray, each.params) for each in (run, expected))
    if trained.name == "answers":
        # A shift of all logits of a row changes nothing, and Adam scales up rounding errors.
        for params in (actual, expected_params):
            del params["head_bias"], params["final_norm"]["bias"]
    assert_close(actual, expected_params, 1e-4)
