"""Measurements on the local devices: the rates of a chip, and the time of a compiled step."""

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from train.estimate.batch_shapes import max_batch_shape, unsharded_batch_shapes
from train.estimate.chips import ATTAINABLE_FRACTION, CHIPS, Chip
from train.experiment import Experiment
from train.runtime.local_hardware import host_memory_bytes
from transformer.precision import DType

if TYPE_CHECKING:
    from train.estimate.compile import CompiledStep

MATMUL_SIZE = 1024
"""Rows and columns of the matrices that are multiplied."""


COPY_BYTES = 2**26
"""Bytes of the array that is copied."""


Clock = Callable[[], float]
"""A clock in seconds: wall time, or CPU time of this process where other processes compete."""


def local_chip(device: Any, clock: Clock = time.perf_counter) -> Chip:
    """Return the known chip of this device kind with its real memory, else a measured one."""
    stats = device.memory_stats() or {}
    memory = stats.get("bytes_limit", 0) or host_memory_bytes() // jax.local_device_count()
    for chip in CHIPS.values():
        if chip.device_kind == device.device_kind:
            return dataclasses.replace(chip, memory_bytes=memory)
    return measure_chip(device, memory, clock)


def measure_chip(device: Any, memory_bytes: int, clock: Clock) -> Chip:
    """Measure matmuls in each dtype and a copy, and return a chip of one host.

    The measured rates are divided by `ATTAINABLE_FRACTION`, since the estimates multiply by it.
    """
    attainable = ATTAINABLE_FRACTION * jax.local_device_count()  # CPU devices share the cores
    array = jax.device_put(jnp.ones(COPY_BYTES // 4, jnp.float32), device)
    copy = 2 * COPY_BYTES / _fastest_run(jax.jit(lambda x: x + 1), array, clock)
    return Chip(
        name="here",
        device_kind=device.device_kind,
        platform="cpu" if device.platform == "cpu" else "gpu",
        bf16_flops_per_second=_matmul_rate(device, "bfloat16", clock) / attainable,
        fp32_flops_per_second=_matmul_rate(device, "float32", clock) / attainable,
        fp16_flops_per_second=_matmul_rate(device, "float16", clock) / attainable,
        memory_bytes=memory_bytes,
        memory_bandwidth=copy / attainable,
        link_bandwidth=copy / attainable,
        chips_per_host=jax.local_device_count(),
        network_bandwidth=copy / attainable,
    )


def _matmul_rate(device: Any, dtype: DType, clock: Clock) -> float:
    """Return the FLOPs per second of a matrix product."""
    matrix = jax.device_put(jnp.ones((MATMUL_SIZE, MATMUL_SIZE), dtype), device)
    return 2 * MATMUL_SIZE**3 / _fastest_run(jax.jit(lambda x: x @ x), matrix, clock)


def _fastest_run(run: Callable[[Any], Any], argument: Any, clock: Clock, times: int = 5) -> float:
    """Return the seconds of the fastest of several runs."""
    jax.block_until_ready(run(argument))
    seconds = []
    for _ in range(times):
        start = clock()
        jax.block_until_ready(run(argument))
        seconds.append(clock() - start)
    return min(seconds)


TIMED_STEPS = 3
"""Steps that are timed, after one warm-up step."""


def time_step(
    experiment: Experiment,
    compiled: "CompiledStep",
    steps: int = TIMED_STEPS,
    clock: Clock = time.perf_counter,
) -> float:
    """Return the seconds of the fastest of several steps on a random batch.

    The minimum, not the mean: other processes may use the machine.
    """
    engine = compiled.engine
    state: Any = engine.init()
    batch = engine.put_batch(random_batch(experiment))
    zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)  # noqa: E731
    frozen = jax.tree.map(zeros, engine.abstract_frozen())  # of a LoRA run
    seconds = []
    for _ in range(1 + steps):
        jax.block_until_ready((state, batch))
        start = clock()
        state, _ = jax.block_until_ready(compiled.program(state, batch, frozen))
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
