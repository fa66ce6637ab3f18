"""Shared parts of the trainer tests: a text, a tiny experiment, and fast compilation."""

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from train.assembly import make_engine_on, make_task, training_options, with_task
from train.cli.main import main
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.detector import RecoveryConfig
from train.engines.engine import Engine
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.schedules import ScheduleConfig
from train.state import LossScale, TrainState
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LearnedPositions,
    TransformerConfig,
)

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "red", "fish", "swim", "by")

LENGTH = 16
"""T of the tiny experiment."""

NO_DETECTOR = RecoveryConfig(window=0)
"""Without the anomaly detector, whose medians take long to compile."""


@pytest.fixture(scope="module", autouse=True)
def light_compiler() -> Iterator[None]:
    """Return compiler options that take a third of the time, for programs that run a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


_ENGINES: dict[Any, Engine] = {}
"""Built by any test module of this process, by what is compiled in."""


@pytest.fixture(scope="module", autouse=True)
def shared_programs() -> Iterator[None]:
    """Trace and compile the programs of equal experiments on equal devices once in a process.

    Most of the time of a short run is its engine's. A run resumed in a process of its own has an
    equal program from the compilation cache; here it has the same one.
    """

    def build_once(build: Callable[..., Engine]) -> Callable[..., Engine]:
        def build_or_copy(mesh: Mesh, experiment: Experiment, *arguments: Any) -> Engine:
            key = mesh, what_is_compiled(experiment), *arguments
            if key not in _ENGINES:
                _ENGINES[key] = build(mesh, experiment, *arguments)
            # Copied, because base weights (LoRA) are set in the engine of a run.
            return copy.copy(_ENGINES[key])

        return build_or_copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.assembly.make_engine_on", build_once(make_engine_on))
        yield


def what_is_compiled(experiment: Experiment) -> Experiment:
    """Return the experiment without what no program of its engine depends on."""
    data = experiment.data
    if isinstance(data, TextDataConfig):  # of other data, the tokenizer may be another then
        data = dataclasses.replace(data, path="", cache_dir="")
    schedule = experiment.schedule
    constant = isinstance(schedule, ScheduleConfig) and schedule.kind == "constant"
    return dataclasses.replace(
        experiment,
        name="",
        data=data,
        steps=1000 if constant else experiment.steps,
        log_every=1,
        checkpoint=CheckpointConfig(),
        evaluation=EvaluationConfig(),
        sample=SampleConfig(),
    )


def resolved(experiment: Experiment) -> Experiment:
    """Return the experiment with the sizes of its data."""
    task = make_task(experiment)
    return with_task(experiment, task.resolve(task.prepare_corpus()))


def first_batch(experiment: Experiment) -> Any:
    """Return the first training batch of an experiment."""
    task = make_task(experiment)
    batches = task.training_batches(task.prepare_corpus(), training_options(experiment))
    return batches.host_batch(0, 0, 1)


def write_text(path: Path, *, lines: int = 200, seed: int = 0) -> Path:
    """Write sentences of nine words, about 35 characters per line."""
    drawn = random.Random(seed)
    sentences = (" ".join(drawn.choice(WORDS) for _ in range(9)) for _ in range(lines))
    path.write_text("".join(f"{sentence}.\n" for sentence in sentences))
    return path


def tiny(folder: Path, *, num_layers: int = 2, dropout: float = 0.1, **changes: Any) -> Experiment:
    """Return an experiment of two layers, 16 wide, with dropout, on the characters of a text in
    `folder`.

    Every axis divides by 4 and the width by 8, so all meshes of eight devices can shard it. One
    layer without dropout compiles in half the time, for tests of facts that need neither.
    """
    text = folder / "text.txt"
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=4, dropout=dropout),
        feed_forward=FeedForwardConfig(d_ff=24),
        residual_dropout=dropout,
    )
    experiment = Experiment(
        name="tiny",
        model=TransformerConfig(
            d_model=16,
            num_layers=num_layers,
            layer_pattern=(block,),
            position_embedding=LearnedPositions(LENGTH),
            embedding_dropout=dropout,
            pad_vocab_to_multiple=32,
        ),
        data=TextDataConfig(
            path=str(text if text.exists() else write_text(text)),
            sequence_length=LENGTH,
            tokenizer=TokenizerConfig("character"),
            cache_dir=str(folder / "cache"),
        ),
        schedule=ScheduleConfig("constant", learning_rate=1e-2, warmup_steps=4),
        steps=12,
        batch_size=8,
        log_every=1,
        evaluation=EvaluationConfig(every=0),
        checkpoint=CheckpointConfig(every=4),
    )
    return dataclasses.replace(experiment, **changes)


def random_rows(
    batch_size: int,
    vocab_size: int,
    *,
    length: int = LENGTH,
    cursor: int = 0,
) -> dict[str, np.ndarray]:
    """Return a batch of windows of random tokens with uneven weights."""
    drawn = np.random.RandomState(cursor)
    shape = (batch_size, length)
    return {
        "tokens": drawn.randint(0, vocab_size, shape).astype(np.int32),
        "targets": drawn.randint(0, vocab_size, shape).astype(np.int32),
        "weights": (drawn.rand(*shape) * (drawn.rand(batch_size, 1) < 0.7)).astype(np.float32),
        "segments": np.ones(shape, np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (batch_size, 1)),
        "examples": np.arange(cursor * batch_size, (cursor + 1) * batch_size).astype(np.uint32),
    }


def state_of(params: Any, optimizer: Any, *, scale: LossScale | None = None) -> TrainState:
    """Return the state before the first step."""
    return TrainState(
        step=jax.numpy.int32(0),
        cursor=jax.numpy.int32(0),
        params=params,
        optimizer=optimizer.init(params),
        key=jax.random.key(7),
        loss_scale=scale,
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(workdir: Path) -> dict[int, float]:
    """Return the training losses of a run, by step."""
    lines = lines_of(workdir / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


def assert_same_bits(one: Any, other: Any) -> None:
    """Assert that the arrays of two trees are bit-equal."""
    chex.assert_trees_all_equal_dtypes(one, other)
    chex.assert_trees_all_equal(one, other, strict=True)


def assert_close(one: Any, other: Any, tolerance: float) -> None:
    """Assert that differences are within tolerance * max(1, largest value)."""

    def differ(a: Any, b: Any) -> str:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        largest, limit = np.abs(a - b).max(), tolerance * max(1.0, np.abs(b).max())
        return "" if largest <= limit else f"differ by {largest:.3g}, more than {limit:.3g}"

    chex.assert_trees_all_equal_shapes(one, other)
    chex.assert_trees_all_equal_comparator(lambda *each: not differ(*each), differ, one, other)


class Outcome(NamedTuple):
    """Result of a command."""

    status: int
    output: str
    error: str


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """Run `python -m train` with these arguments, in this process."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    shown = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return Outcome(stop.value.code, shown.out, shown.err)


def write_config(folder: Path, **changes: str) -> str:
    """Write a config file with the tiny experiment; each change is the source text of its value."""
    source = "".join(f", {name}={value}" for name, value in changes.items())
    file = folder / "own.py"
    file.write_text(
        "from pathlib import Path\n"
        "from tests.train.support import tiny\n"
        "from train.experiment import *\n"
        f"EXPERIMENTS = {{'tiny': tiny(Path({str(folder)!r}){source})}}\n"
    )
    return str(file)
