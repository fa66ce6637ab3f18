"""The devices of this process as a chip: known by their name, or measured in a second.

The real step on the devices that are here, to hold the estimate of its time against.
"""

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
"""Of the matrices that are multiplied."""


COPY_BYTES = 2**26
"""Bytes that are copied."""


Clock = Callable[[], float]
"""Seconds: those of the wall, or of this process's cores where others take their share of them."""


def local_chip(device: Any, clock: Clock = time.perf_counter) -> Chip:
    """A known chip by its kind, with the memory that is really there; else one that is measured."""
    stats = device.memory_stats() or {}
    memory = stats.get("bytes_limit", 0) or host_memory_bytes() // jax.local_device_count()
    for chip in CHIPS.values():
        if chip.device_kind == device.device_kind:
            return dataclasses.replace(chip, memory_bytes=memory)
    return measure_chip(device, memory, clock)


def measure_chip(device: Any, memory_bytes: int, clock: Clock) -> Chip:
    """A chip of one host, from products of matrices in each dtype and a copy.

    Divided by `ATTAINED`, which the estimates multiply with: this is what was attained.
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
    """Operations a second of a product of matrices."""
    matrix = jax.device_put(jnp.ones((MATMUL_SIZE, MATMUL_SIZE), dtype), device)
    return 2 * MATMUL_SIZE**3 / _fastest(jax.jit(lambda x: x @ x), matrix, clock)


def _fastest(run: Callable[[Any], Any], argument: Any, clock: Clock, times: int = 5) -> float:
    """Seconds of the fastest of some runs."""
    jax.block_until_ready(run(argument))
    seconds = []
    for _ in range(times):
        begun = clock()
        jax.block_until_ready(run(argument))
        seconds.append(clock() - begun)
    return min(seconds)
