"""Hardware targets by name, present or not: `v5p:8x8x16`, `h200:8`, `here`."""

import dataclasses
import importlib.resources
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from train.errors import UsageError, UserError
from train.estimate.chips import ATTAINABLE_FRACTION, CHIPS, Chip
from train.runtime.host import host_memory_bytes
from train.runtime.local_hardware import local_hardware
from train.runtime.xla_flags import guess_platform
from transformer.hardware import Hardware
from transformer.precision import DType

FLAT_SLICES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
DEEP_SLICES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
SMALL_SLICES = {
    "v4": DEEP_SLICES,
    "v5p": DEEP_SLICES,
    "v5e": FLAT_SLICES,
    "tpu7x": ((1, 1, 1), *DEEP_SLICES),
    "v6e": FLAT_SLICES,
}
"""TPU slices smaller than a 4 x 4 x 4 cube; for two-dimensional kinds, all slices."""


USABLE_GPU_MEMORY = 0.92
"""Fraction of a GPU's memory that a program can use; driver and libraries take the rest."""


ABSENT_HARDWARE_ENVIRONMENT = {
    "tpu": {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    },
    "gpu": {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
}
"""Variables that keep compilers from probing for hardware that is absent, and from warning about
it. libtpu queries the cloud for its machine type and the CUDA plugin looks for a driver. The values
have no effect on the result: the target is described to the compiler explicitly."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A number of chips of one kind."""

    name: str
    chip: Chip
    shape: tuple[int, ...]
    """Chips in each dimension of a TPU slice; for other platforms their number."""
    is_local: bool = False
    """True for the devices of this process."""

    @property
    def num_chips(self) -> int:
        """Return the number of chips."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """Return the number of JAX devices, which a mesh is made of."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def memory_bytes(self) -> int:
        """Return the bytes that a program can use on one device."""
        fraction = USABLE_GPU_MEMORY if self.chip.platform == "gpu" and not self.is_local else 1.0
        return int(self.chip.memory_bytes * fraction)

    @property
    def hardware(self) -> Hardware:
        """Return the target as a model sees it."""
        return Hardware(
            self.chip.platform,
            self.chip.device_kind,
            self.num_devices,
            self.chip.compute_capability,
        )


def parse_target(text: str) -> Target:
    """Return the target of a name.

    Raises UsageError, with the known names, for an unknown target.
    """
    kind, _, shape = text.lower().partition(":")
    if text == "here":
        return local_target()
    if re.search(r"[*,+]|slice", text.lower()):  # as in v5e:16x16*2
        raise UsageError(
            f"target {text}: several slices, joined by a data-centre network, are not supported; "
            "give one slice such as v5e:16x16"
        )
    if kind not in CHIPS:
        raise UsageError(
            f"target {text}: is not known; give one of {', '.join(CHIPS)} with a size "
            "(v5e:4x4, v5p:8x8x16, h200:8), or here"
        )
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise UsageError(
            f"target {text}: has no size; give one as in v5e:4x4, v5p:8x8x16 or h200:8"
        )
    chip, sizes = CHIPS[kind], tuple(int(size) for size in shape.split("x"))
    if chip.platform == "gpu":
        sizes = (math.prod(sizes),)
    if problem := _shape_problem(chip, sizes):
        raise UsageError(f"target {text}: {problem}")
    if guess_platform() != chip.platform:
        for name, value in ABSENT_HARDWARE_ENVIRONMENT[chip.platform].items():
            os.environ.setdefault(name, value)  # JAX reads it once
    return Target(text, chip, sizes)


def _shape_problem(chip: Chip, sizes: tuple[int, ...]) -> str:
    """Return why chips do not come in this shape, with the remedy; empty if they do."""
    if chip.platform == "gpu":  # part of one host, or whole hosts
        most, (count,) = chip.chips_per_host, sizes
        fits = 1 <= count <= most or (count and count % most == 0)
        return "" if fits else f"give up to {most} GPUs, or a multiple of {most}"
    small = SMALL_SLICES[chip.name]
    shapes = ", ".join("x".join(map(str, each)) for each in small)
    remedy = f"is not a slice of {chip.device_kind}; give one of {shapes}"
    if chip.torus_dimensions == 2:  # all slices are listed
        return "" if sizes in small else remedy
    largest = chip.largest_slice
    is_cubes = (
        len(sizes) == 3
        and list(sizes) == sorted(sizes)
        and all(0 < n <= most and n % 4 == 0 for n, most in zip(sizes, largest, strict=True))
    )
    most_text = "x".join(map(str, largest))
    remedy += f", or three non-decreasing multiples of 4 (4x4x8), up to {most_text}"
    return "" if sizes in small or is_cubes else remedy


def target_devices(target: Target) -> Sequence[Any]:
    """Return devices to compile for, present or not.

    Raises UserError if their compiler is not installed.
    """
    if target.is_local:
        return jax.devices()
    require_compiler(target)
    if target.chip.platform == "tpu":
        shape = "x".join(map(str, target.shape))
        name = f"{target.chip.name}:{shape}"
        settings: dict[str, Any] = {}
        if target.chip.libtpu_chip_config:
            settings["chip_config_name"] = target.chip.libtpu_chip_config
        if target.num_chips == 1:  # else libtpu takes a host to have four chips
            settings["chips_per_host_bounds"] = (1, 1, 1)
    else:
        hosts = -(-target.num_chips // target.chip.chips_per_host)
        name = f"{target.chip.name}x{target.num_chips}"
        settings = {
            "topology": f"1x{hosts}x{target.num_chips // hosts}",
            # XLA's description of a GPU, a text protocol buffer
            "target_config": (
                importlib.resources.files("train.estimate")
                / "targets"
                / f"{target.chip.name}.txtpb"
            ).read_text(),
        }
    try:
        jax.devices()  # loads the plugins
        platform = "tpu" if target.chip.platform == "tpu" else "cuda"
        description = topologies.get_topology_desc(name, platform, **settings)
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"target {target.name}: its compiler cannot describe it ({why}); "
            "upgrade the compiler, or give another size"
        ) from error
    devices: Sequence[Any] = description.devices
    return devices


COMPILER_PACKAGES = {"tpu": ("libtpu", "tpu"), "gpu": ("jax-cuda13-plugin", "cuda13")}
"""Package that has the compiler of a platform, and the extra of JAX that installs it."""


COMPILER_MODULES = {"tpu": ("libtpu",), "gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin")}
"""Modules that a platform's compiler comes in; Colab has that of CUDA 12."""


def require_compiler(target: Target) -> None:
    """Raise UserError if the compiler for a target is not installed."""
    if target.is_local:
        return
    package, extra = COMPILER_PACKAGES[target.chip.platform]
    if not any(map(importlib.util.find_spec, COMPILER_MODULES[target.chip.platform])):
        raise UserError(
            f"target {target.name}: needs the compiler for {target.chip.device_kind} "
            f"({package}), which is not installed; pip install 'jax[{extra}]', or "
            "--compile-best 0 for estimates only"
        )


MATMUL_SIZE = 1024
"""Rows and columns of the matrices that are multiplied."""


COPY_BYTES = 2**26
"""Bytes of the array that is copied."""


Clock = Callable[[], float]
"""A clock in seconds: wall time, or CPU time of this process where other processes compete."""


def local_target(clock: Clock = time.perf_counter) -> Target:
    """Return the devices of this process as a target."""
    chip = local_chip(jax.devices()[0], clock)
    return Target("here", chip, (local_hardware().count // chip.devices_per_chip,), is_local=True)


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
