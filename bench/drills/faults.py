"""What the drills share: a tiny experiment, a run in a process of its own, and planted faults."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from train.data.batches import TrainingBatches
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.data.token_file import HostBatch
from train.engines.engine import Engine
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.run_setup import RunSetup
from train.state import TrainState
from train.step import Batch, Metrics, TrainStep
from train.telemetry.metrics_log import read_metrics
from transformer import TransformerConfig

SMALL_RUN = (
    "--log-every=1",
    "--data.max-bytes=400000",
    "--data.tokenizer.vocab-size=512",
    "--model.layer-pattern.0.mixer.num-heads=2",
    "--model.layer-pattern.0.mixer.num-kv-heads=1",
    "--evaluation.num-batches=2",
    "--evaluation.no-compression-baselines",
    "--sample.every=0",
    "--quiet",
)
"""Settings of `quickstart` that make a process of it small."""


def tiny(folder: Path, **changes: Any) -> Experiment:
    """Return an experiment on the bytes of Python's library that trains in a second."""
    experiment = Experiment(
        name="tiny",
        model=TransformerConfig(d_model=16, num_layers=1, embedding_dropout=0.1),
        data=TextDataConfig(
            path="python:library",
            max_bytes=100_000,
            sequence_length=16,
            tokenizer=TokenizerConfig("byte"),
            cache_dir=str(folder / "cache"),
        ),
        steps=2,
        batch_size=8,
        evaluation=EvaluationConfig(every=0, num_batches=1),
        checkpoint=CheckpointConfig(every=2),
    )
    return dataclasses.replace(experiment, **changes)


class Fit(subprocess.Popen[str]):
    """Process of `fit quickstart`, on CPU devices unless the environment says otherwise."""

    def __init__(
        self,
        workdir: Path,
        settings: Sequence[str],
        *,
        program: Sequence[str] = ("-m", "train"),
        devices: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with this object
        super().__init__(
            [sys.executable, *program, "fit", "quickstart", "--workdir", str(workdir), *settings],
            env={
                "JAX_PLATFORMS": "cpu",
                **os.environ,
                "JAX_NUM_CPU_DEVICES": str(devices),
                **(environment or {}),
            },
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            text=True,
        )

    def error_text(self) -> str:
        """Return the standard error of the ended process."""
        self._errors.seek(0)
        return self._errors.read()


def train_losses(workdir: Path) -> dict[int, float]:
    """Return the training losses of a run so far, by step."""
    lines = read_metrics(workdir / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


# Faults in the data, the gradients or the weights of a run.

_FACTOR = "gradient_factor"


@dataclasses.dataclass(frozen=True)
class Fault:
    """Fault in `count` batches from batch `first` on."""

    first: int
    count: int = 1
    words: int = 0
    """Draw targets at random below this number; 0: leave them."""
    weight: float = 1.0
    """Factor on the weight of a batch's first targets, for example NaN."""
    factor: float = 1.0
    """Factor on the gradients."""
    bit: int = 0
    """Bit of a weight that flips once before the first of these batches; 0: none."""


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Plant the fault in every run inside the context."""
    begin, gradients, step = RunSetup.__init__, TrainStep.compute_gradients, Engine.step
    flipped = [not fault.bit]

    def with_bad_batches(self: RunSetup, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        self.batches = _Batches(self.batches, fault)

    def with_factor(self: TrainStep, state: TrainState, batch: Batch, loss_scale: jax.Array) -> Any:
        rest = {name: array for name, array in batch.items() if name != _FACTOR}
        grads, sums = gradients(self, state, rest, loss_scale)
        factor = batch[_FACTOR][0]
        return jax.tree.map(lambda g: g * factor, grads), sums

    def with_bad_weight(
        self: Engine, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        if not flipped[0] and int(state.cursor) >= fault.first:
            flipped[0] = True
            state = state.replace(params=_flipped(state.params, fault.bit))
        return step(self, state, batch)

    with (
        mock.patch.object(RunSetup, "__init__", with_bad_batches),
        mock.patch.object(TrainStep, "compute_gradients", with_factor),
        mock.patch.object(Engine, "step", with_bad_weight),
    ):
        yield


@dataclasses.dataclass(frozen=True)
class _Batches(TrainingBatches):
    """Batches of a run, some of them faulty."""

    sound: TrainingBatches
    fault: Fault

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        rows, fault = self.sound.host_batch(cursor, host, num_hosts), self.fault
        bad = fault.first <= cursor < fault.first + fault.count
        factor = fault.factor if bad else 1.0
        rows = {**rows, _FACTOR: np.full(len(rows["examples"]), factor, np.float32)}
        if bad and fault.words:
            drawn = np.random.RandomState(cursor)
            targets = drawn.randint(0, fault.words, rows["targets"].shape)
            rows["targets"] = targets.astype(rows["targets"].dtype)
        if bad and fault.weight != 1:
            rows["weights"] = rows["weights"].copy()
            rows["weights"][:, 0] *= fault.weight
        return rows


def _flipped(params: Any, bit: int) -> Any:
    """Flip one bit of one number in the middle of the largest matrix."""
    leaves, structure = jax.tree.flatten(params)
    largest_index = max(range(len(leaves)), key=lambda i: (leaves[i].ndim > 1, leaves[i].size))
    array = np.array(leaves[largest_index])
    bits = array.reshape(-1).view(np.uint32 if array.dtype == np.float32 else np.uint16)
    bits[bits.size // 2] ^= bits.dtype.type(1 << bit)
    leaves[largest_index] = jax.device_put(array, leaves[largest_index].sharding)
    return jax.tree.unflatten(structure, leaves)
