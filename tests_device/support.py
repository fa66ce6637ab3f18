"""Helpers of the device tests: tolerances, a recorder of errors, a tiny experiment."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.train.support import random_rows, tiny
from train.assembly import make_engine_on
from train.engines.engine import Engine
from train.experiment import Experiment
from train.parallel.mesh import MeshConfig, make_mesh
from train.runtime.backend_probes import mark_broken_kernels
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Hardware,
    LearnedPositions,
    Precision,
)

VOCAB = 30
BATCH = 8
LENGTH = 128


def float32_tolerance(hardware: Hardware) -> float:
    """Return the tolerance of float32 results computed at the highest matmul precision.

    float32 has 24 bits (6e-8); sums over a thousand terms lose two digits of that. A TPU has no
    float32 multiplier: its highest precision adds six bfloat16 products, and its exponential is an
    approximation, so one more digit is lost.
    """
    return 1e-4 if hardware.platform == "tpu" else 1e-5


class Meter:
    """Recorder of the errors of one test, with their tolerances.

    Errors are collected rather than asserted one by one, so that the table shows the largest one
    and a failure names every case that is off.
    """

    def __init__(self) -> None:
        self.measured: list[tuple[float, float]] = []
        self.failures: list[str] = []
        self.note = ""

    def check(self, what: str, error: float, tolerance: float) -> None:
        """Record an error; `finish` fails if it is above the tolerance or NaN."""
        self.measured.append((error, tolerance))
        if not error <= tolerance:
            self.failures.append(f"{what}: error {error:.3g}, tolerance {tolerance:.3g}")

    def finish(self) -> None:
        """Fail with all errors that were above their tolerances."""
        assert not self.failures, "; ".join(self.failures)


def largest_difference(got: Any, expected: Any) -> float:
    """Return max |got - expected| / max(1, max |expected|) in float64."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, f"{got.shape} is not {expected.shape}"
    return float(np.abs(got - expected).max() / max(1.0, np.abs(expected).max()))


def rows_for(count: int) -> int:
    """Return a batch size that divides among `count` devices."""
    return math.lcm(BATCH, count)


def kernel_experiment(folder: Path, *, precision: str = "float32", **changes: Any) -> Experiment:
    """Return the tiny experiment with attention that cuDNN and splash support.

    Their kernels support neither dropout of attention weights nor (cuDNN) segments, need head
    widths that are multiples of 8, and pay off from 128 tokens on. Dropout elsewhere stays: a
    recomputed layer must draw the same numbers again.
    """
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=4),
        feed_forward=FeedForwardConfig(d_ff=96),
        residual_dropout=0.1,
    )
    experiment = tiny(folder, **changes)
    model = dataclasses.replace(
        experiment.model,
        vocab_size=VOCAB,
        d_model=64,
        layer_pattern=(block,),
        position_embedding=LearnedPositions(LENGTH),
        precision=Precision.parse(precision),
    )
    data = dataclasses.replace(experiment.text_data, sequence_length=LENGTH, document_masking=False)
    return dataclasses.replace(experiment, model=model, data=data, batch_size=BATCH)


def engine_on(experiment: Experiment, hardware: Hardware, count: int = 1) -> Engine:
    """Return the engine of an experiment over the first `count` devices, as a run makes it."""
    hardware = mark_broken_kernels(
        experiment.model,
        LENGTH,
        dataclasses.replace(hardware, count=count),
        segments=experiment.has_segments,
        on_mesh=count > 1,
    )
    mesh = make_mesh(experiment.mesh if count > 1 else MeshConfig(), jax.devices()[:count])
    return make_engine_on(mesh, experiment, hardware)


def batch(cursor: int = 0) -> dict[str, np.ndarray]:
    """Return a batch of random tokens for `kernel_experiment`."""
    return random_rows(BATCH, VOCAB, length=LENGTH, cursor=cursor)
