"""The devices of this process as a chip: known by their name, or measured in a second.

The real step on the devices that are here, to hold the estimate of its time against.
"""

import time
from typing import Any

import jax
import numpy as np

from train.estimate.batch_shapes import max_batch_shape, unsharded_batch_shapes
from train.estimate.compile import CompiledStep
from train.estimate.local_chip import Clock
from train.experiment import Experiment

TIMED_STEPS = 3
"""Steps that are timed, after one that is not."""


def time_step(
    experiment: Experiment,
    compiled: CompiledStep,
    steps: int = TIMED_STEPS,
    clock: Clock = time.perf_counter,
) -> float:
    """The fastest of some steps, from a state and a batch made for it.

    The fastest, as of what the speed of a processor is taken from: others may be at work.
    """
    engine = compiled.engine
    state: Any = engine.init()
    batch = engine.put_batch(random_batch(experiment))
    seconds = []
    for _ in range(1 + steps):
        jax.block_until_ready((state, batch))
        begun = clock()
        state, _ = jax.block_until_ready(compiled.program(state, batch))
        seconds.append(clock() - begun)
    return min(seconds[1:])


def random_batch(experiment: Experiment) -> dict[str, np.ndarray]:
    """This host's rows of a batch: tokens by chance, nothing padded."""
    rows = max_batch_shape(experiment)[0] // jax.process_count()
    drawn = np.random.default_rng(0)
    most = experiment.task.num_labels or experiment.model.vocab_size
    return {
        name: _filled(name, leaf, most, drawn)
        for name, leaf in unsharded_batch_shapes(experiment, rows).items()
    }


def _filled(name: str, leaf: Any, most: int, drawn: np.random.Generator) -> np.ndarray:
    if name in ("positions", "examples"):
        return np.broadcast_to(np.arange(leaf.shape[-1], dtype=leaf.dtype), leaf.shape)
    if name in ("segments", "source_segments", "weights"):
        return np.ones(leaf.shape, leaf.dtype)
    return drawn.integers(most, size=leaf.shape).astype(leaf.dtype)
