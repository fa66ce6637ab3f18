"""Environment and memory of a process, as a run's logs record them."""

import importlib.metadata
import platform
import sys

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "linen-transformer")
"""Packages whose versions matter for a run's numbers."""


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, the operating system and the packages that are installed."""
    versions = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def peak_memory_bytes() -> dict[str, int]:
    """Return the largest memory so far of this process, and of its first device if it says."""
    peaks = {}
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        peaks["device"] = int(statistics["peak_bytes_in_use"])
    try:
        import resource
    except ImportError:  # Windows has none
        return peaks
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return peaks | {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
