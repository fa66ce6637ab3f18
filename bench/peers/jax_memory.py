"""Memory counters of a contender in JAX, on a CPU or an accelerator."""

import jax

from bench.protocol import peak_resident_bytes, resident_bytes


def peak_bytes() -> int:
    """Return the peak of the device's allocator, or of this process where there is none."""
    return _statistic("peak_bytes_in_use", peak_resident_bytes())


def bytes_in_use() -> int:
    """Return the memory in use now, by the same counter."""
    return _statistic("bytes_in_use", resident_bytes())


def _statistic(name: str, of_process: int) -> int:
    statistics = jax.local_devices()[0].memory_stats() or {}
    return int(statistics.get(name, of_process))
