"""The devices of this process as a chip: known by their name, or measured in a second."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from train.host_memory import host_memory
from train.plan.chips import ATTAINED, CHIPS, Chip
from transformer.precision import DType

SIZE = 1024
"""Of the matrices that are multiplied."""
COPIED = 2**26
"""Bytes that are copied."""


Clock = Callable[[], float]
"""Seconds: those of the wall, or of this process's cores where others take their share of them."""


def local_chip(device: Any, clock: Clock = time.perf_counter) -> Chip:
    """A known chip by its kind, with the memory that is really there; else one that is measured."""
    stats = device.memory_stats() or {}
    memory = stats.get("bytes_limit", 0) or host_memory() // jax.local_device_count()
    for chip in CHIPS.values():
        if chip.kind == device.device_kind:
            return dataclasses.replace(chip, memory=memory)
    return measured(device, memory, clock)


def measured(device: Any, memory: int, clock: Clock) -> Chip:
    """A chip of one host, from products of matrices in each dtype and a copy.

    Divided by `ATTAINED`, which the estimates multiply with: this is what was attained.
    """
    share = ATTAINED * jax.local_device_count()  # CPU devices share the cores
    array = jax.device_put(jnp.ones(COPIED // 4, jnp.float32), device)
    copy = 2 * COPIED / _fastest(jax.jit(lambda x: x + 1), array, clock)
    return Chip(
        name="here",
        kind=device.device_kind,
        platform="cpu" if device.platform == "cpu" else "gpu",
        flops=_products(device, "bfloat16", clock) / share,
        flops32=_products(device, "float32", clock) / share,
        flops16=_products(device, "float16", clock) / share,
        memory=memory,
        bandwidth=copy / share,
        links=copy / share,
        per_host=jax.local_device_count(),
        network=copy / share,
    )


def _products(device: Any, dtype: DType, clock: Clock) -> float:
    """Operations a second of a product of matrices."""
    matrix = jax.device_put(jnp.ones((SIZE, SIZE), dtype), device)
    return 2 * SIZE**3 / _fastest(jax.jit(lambda x: x @ x), matrix, clock)


def _fastest(run: Callable[[Any], Any], argument: Any, clock: Clock, times: int = 5) -> float:
    """Seconds of the fastest of some runs."""
    jax.block_until_ready(run(argument))
    seconds = []
    for _ in range(times):
        begun = clock()
        jax.block_until_ready(run(argument))
        seconds.append(clock() - begun)
    return min(seconds)
