"""Measure the compiled step on the local devices, to compare with the estimate."""

import time
from typing import Any

import jax
import numpy as np

from train.estimate.batch_shapes import max_batch_shape, unsharded_batch_shapes
from train.estimate.compile import CompiledStep
from train.estimate.local_chip import Clock
from train.experiment import Experiment

TIMED_STEPS = 3
"""Steps that are timed, after one warm-up step."""


def time_step(
    experiment: Experiment,
    compiled: CompiledStep,
    steps: int = TIMED_STEPS,
    clock: Clock = time.perf_counter,
) -> float:
    """Return the seconds of the fastest of several steps on a random batch.

    The minimum, not the mean: other processes may use the machine.
    """
    engine = compiled.engine
    state: Any = engine.init()
    batch = engine.put_batch(random_batch(experiment))
    seconds = []
    for _ in range(1 + steps):
        jax.block_until_ready((state, batch))
        start = clock()
        state, _ = jax.block_until_ready(compiled.program(state, batch))
        seconds.append(clock() - start)
    return min(seconds[1:])


def random_batch(experiment: Experiment) -> dict[str, np.ndarray]:
    """Return this host's rows of a batch: random tokens without padding."""
    rows = max_batch_shape(experiment)[0] // jax.process_count()
    generator = np.random.default_rng(0)
    num_tokens = experiment.task.num_labels or experiment.model.vocab_size
    return {
        name: _random_field(name, leaf, num_tokens, generator)
        for name, leaf in unsharded_batch_shapes(experiment, rows).items()
    }


def _random_field(
    name: str, leaf: Any, num_tokens: int, generator: np.random.Generator
) -> np.ndarray:
    if name in ("positions", "examples"):
        return np.broadcast_to(np.arange(leaf.shape[-1], dtype=leaf.dtype), leaf.shape)
    if name in ("segments", "source_segments", "weights"):
        return np.ones(leaf.shape, leaf.dtype)
    return generator.integers(num_tokens, size=leaf.shape).astype(leaf.dtype)
