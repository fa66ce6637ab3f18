"""Hardware targets by name, present or not: `v5p:8x8x16`, `h200:8`, `here`."""

import dataclasses
import importlib.resources
import importlib.util
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from train.errors import UsageError, UserError
from train.estimate.chips import CHIPS, Chip
from train.estimate.local_measurements import Clock, local_chip
from train.runtime.local_hardware import local_hardware
from train.runtime.xla_flags import guess_platform
from transformer.hardware import Hardware

SMALL_SLICES = {
    "v4": ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
    "v5p": ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
    "v5e": ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    "tpu7x": ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
    "v6e": ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
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
    chip = CHIPS[kind]
    sizes = _sizes(text, shape)
    _silence_absent_hardware(chip.platform)
    if chip.platform == "gpu":
        return Target(text, chip, _gpus(text, chip, sizes))
    if not _is_slice(chip, sizes):
        raise UsageError(
            f"target {text}: is not a slice of {chip.device_kind}; {_known_slices(chip)}"
        )
    return Target(text, chip, sizes)


def local_target(clock: Clock = time.perf_counter) -> Target:
    """Return the devices of this process as a target."""
    chip = local_chip(jax.devices()[0], clock)
    return Target("here", chip, (local_hardware().count // chip.devices_per_chip,), is_local=True)


def _sizes(text: str, shape: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise UsageError(
            f"target {text}: has no size; give one as in v5e:4x4, v5p:8x8x16 or h200:8"
        )
    return tuple(int(size) for size in shape.split("x"))


def _silence_absent_hardware(platform: str) -> None:
    """Set `ABSENT_HARDWARE_ENVIRONMENT` unless the platform is present. JAX reads it once."""
    if guess_platform() != platform:
        for name, value in ABSENT_HARDWARE_ENVIRONMENT[platform].items():
            os.environ.setdefault(name, value)


def _gpus(text: str, chip: Chip, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of part of one host, or of whole hosts."""
    count = math.prod(sizes)
    if count < 1 or (count > chip.chips_per_host and count % chip.chips_per_host):
        raise UsageError(
            f"target {text}: give up to {chip.chips_per_host} GPUs, or a multiple of "
            f"{chip.chips_per_host}"
        )
    return (count,)


def _is_slice(chip: Chip, sizes: tuple[int, ...]) -> bool:
    if sizes in SMALL_SLICES[chip.name]:
        return True
    cubes = all(size % 4 == 0 for size in sizes) and sizes == tuple(sorted(sizes))
    within = all(size <= most for size, most in zip(sizes, chip.largest_slice, strict=False))
    return chip.torus_dimensions == 3 and len(sizes) == 3 and min(sizes) > 0 and cubes and within


def _known_slices(chip: Chip) -> str:
    small = ", ".join("x".join(map(str, sizes)) for sizes in SMALL_SLICES[chip.name])
    # A slice of a two-dimensional torus is one of the listed shapes.
    if chip.torus_dimensions == 2:
        return f"give one of {small}"
    most = "x".join(map(str, chip.largest_slice))
    return f"give one of {small}, or three non-decreasing multiples of 4 (4x4x8), up to {most}"


def target_devices(target: Target) -> Sequence[Any]:
    """Return devices to compile for, present or not.

    Raises UserError if their compiler is not installed.
    """
    if target.is_local:
        return jax.devices()
    require_compiler(target)
    if target.chip.platform == "tpu":
        name = f"{target.chip.name}:{_text(target.shape)}"
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
            "target_config": _gpu_description(target.chip),
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


COMPILER_PACKAGES = {"tpu": ("libtpu", "tpu"), "gpu": ("jax_cuda13_plugin", "cuda13")}
"""Package that has the compiler of a platform, and the extra of JAX that installs it."""


ALTERNATIVE_PACKAGES = {"jax_cuda13_plugin": "jax_cuda12_plugin"}
"""Packages that serve as well, such as the one on Colab."""


def require_compiler(target: Target) -> None:
    """Raise UserError if the compiler for a target is not installed."""
    if target.is_local:
        return
    package, extra = COMPILER_PACKAGES[target.chip.platform]
    known = (package, ALTERNATIVE_PACKAGES.get(package, package))
    if not any(map(importlib.util.find_spec, known)):
        raise UserError(
            f"target {target.name}: needs the compiler for {target.chip.device_kind} "
            f"({package}), which is not installed; pip install 'jax[{extra}]', or "
            "--compile-best 0 for estimates only"
        )


def _gpu_description(chip: Chip) -> str:
    """Return XLA's description of a GPU, a text protocol buffer."""
    folder = importlib.resources.files("train.estimate") / "targets"
    return (folder / f"{chip.name}.txtpb").read_text()


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
