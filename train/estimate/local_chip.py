"""The local device as a `Chip`: looked up by name, else measured in a second."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from train.estimate.chips import ATTAINABLE_FRACTION, CHIPS, Chip
from train.runtime.host_memory import host_memory_bytes
from transformer.precision import DType

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
    share = ATTAINABLE_FRACTION * jax.local_device_count()  # CPU devices share the cores
    array = jax.device_put(jnp.ones(COPY_BYTES // 4, jnp.float32), device)
    copy = 2 * COPY_BYTES / _fastest(jax.jit(lambda x: x + 1), array, clock)
    return Chip(
        name="here",
        device_kind=device.device_kind,
        platform="cpu" if device.platform == "cpu" else "gpu",
        bf16_flops_per_second=_products(device, "bfloat16", clock) / share,
        fp32_flops_per_second=_products(device, "float32", clock) / share,
        fp16_flops_per_second=_products(device, "float16", clock) / share,
        memory_bytes=memory_bytes,
        memory_bandwidth=copy / share,
        link_bandwidth=copy / share,
        chips_per_host=jax.local_device_count(),
        network_bandwidth=copy / share,
    )


def _products(device: Any, dtype: DType, clock: Clock) -> float:
    """Return the FLOPs per second of a matrix product."""
    matrix = jax.device_put(jnp.ones((MATMUL_SIZE, MATMUL_SIZE), dtype), device)
    return 2 * MATMUL_SIZE**3 / _fastest(jax.jit(lambda x: x @ x), matrix, clock)


def _fastest(run: Callable[[Any], Any], argument: Any, clock: Clock, times: int = 5) -> float:
    """Return the seconds of the fastest of several runs."""
    jax.block_until_ready(run(argument))
    seconds = []
    for _ in range(times):
        start = clock()
        jax.block_until_ready(run(argument))
        seconds.append(clock() - start)
    return min(seconds)
