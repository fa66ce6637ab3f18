"""Hardware by name, whether it is here or not: `v5p:8x8x16`, `h200:8`, `here`."""

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
from train.estimate.local_chip import Clock, local_chip
from train.runtime.hardware import local_hardware
from train.runtime.xla_flags import guess_platform
from transformer.hardware import Hardware

SMALL_SLICES = {
    "v4": ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
    "v5p": ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
    "v5e": ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    "v6e": ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
}
"""Slices that are no whole cubes of 4 x 4 x 4; of the flat kinds, all there are."""


USABLE_GPU_MEMORY = 0.92
"""Share of a GPU's memory that a program can have: the rest is the driver's and the libraries'."""


ABSENT_HARDWARE_ENVIRONMENT = {
    "tpu": {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    },
    "gpu": {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
}
"""What compilers look for on a machine that has none of their hardware, and complain of on standard
error: libtpu asks its cloud what machine this is, the plugin for CUDA looks for a driver. What they
are told makes no difference, for what they compile for is described to them.
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """Some chips of one kind."""

    name: str
    chip: Chip
    shape: tuple[int, ...]
    """Of a TPU slice, its chips in each dimension; of others, their number."""
    is_local: bool = False
    """Whether it is the devices of this process."""

    @property
    def num_chips(self) -> int:
        """Chips."""
        return math.prod(self.shape)

    @property
    def memory_bytes(self) -> int:
        """Bytes that a program can have on one chip."""
        share = USABLE_GPU_MEMORY if self.chip.platform == "gpu" and not self.is_local else 1.0
        return int(self.chip.memory_bytes * share)

    @property
    def hardware(self) -> Hardware:
        """As a model sees it."""
        return Hardware(
            self.chip.platform, self.chip.device_kind, self.num_chips, self.chip.compute_capability
        )


def parse_target(text: str) -> Target:
    """The target of a name. Raises UsageError, with those there are, if there is no such."""
    kind, _, shape = text.lower().partition(":")
    if text == "here":
        return local_target()
    if kind not in CHIPS:
        raise UsageError(
            f"target {text}: is not known; give one of {', '.join(CHIPS)} with a size "
            "(v5e:4x4, v5p:8x8x16, h200:8), or here"
        )
    chip = CHIPS[kind]
    sizes = _sizes(text, shape)
    _answer_beforehand(chip.platform)
    if chip.platform == "gpu":
        return Target(text, chip, _gpus(text, chip, sizes))
    if not _is_slice(chip, sizes):
        raise UsageError(f"target {text}: is no slice of {chip.device_kind}; {_known_slices(chip)}")
    return Target(text, chip, sizes)


def local_target(clock: Clock = time.perf_counter) -> Target:
    """The devices of this process."""
    hardware = local_hardware()
    return Target("here", local_chip(jax.devices()[0], clock), (hardware.count,), is_local=True)


def _sizes(text: str, shape: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise UsageError(
            f"target {text}: has no size; give one as in v5e:4x4, v5p:8x8x16 or h200:8"
        )
    return tuple(int(size) for size in shape.split("x"))


def _answer_beforehand(platform: str) -> None:
    """Sets the variables of `ELSEWHERE`, unless such hardware is here; JAX reads them once."""
    if guess_platform() != platform:
        for name, value in ABSENT_HARDWARE_ENVIRONMENT[platform].items():
            os.environ.setdefault(name, value)


def _gpus(text: str, chip: Chip, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """One host with some of its GPUs, or whole hosts."""
    count = math.prod(sizes)
    if count < 1 or (count > chip.chips_per_host and count % chip.chips_per_host):
        raise UsageError(
            f"target {text}: give up to {chip.chips_per_host} GPUs, or a multiple of {chip.chips_per_host}"
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
    if chip.torus_dimensions == 2:
        return f"give one of {small}"
    most = "x".join(map(str, chip.largest_slice))
    return f"give one of {small}, or three multiples of 4 that do not fall (4x4x8), up to {most}"


def target_devices(target: Target) -> Sequence[Any]:
    """Devices to compile for, which need not be there.

    Raises UserError if the compiler for them is not installed.
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
            "target_config": _description(target.chip),
        }
    try:
        jax.devices()  # finds the plugins
        platform = "tpu" if target.chip.platform == "tpu" else "cuda"
        found = topologies.get_topology_desc(name, platform, **settings)
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"target {target.name}: its compiler cannot make it ({why}); "
            "upgrade the compiler, or give another size"
        ) from error
    devices: Sequence[Any] = found.devices
    return devices


COMPILER_PACKAGES = {"tpu": ("libtpu", "tpu"), "gpu": ("jax_cuda13_plugin", "cuda13")}
"""The package that has the compiler of a platform, and what JAX calls it as an extra."""


ALTERNATIVE_PACKAGES = {"jax_cuda13_plugin": "jax_cuda12_plugin"}
"""Packages that do as well, such as the one that Colab has."""


def require_compiler(target: Target) -> None:
    """Raises UserError if the compiler for a target is not installed."""
    if target.is_local:
        return
    package, extra = COMPILER_PACKAGES[target.chip.platform]
    known = (package, ALTERNATIVE_PACKAGES.get(package, package))
    if not any(map(importlib.util.find_spec, known)):
        raise UserError(
            f"target {target.name}: needs the compiler for {target.chip.device_kind} ({package}), which "
            f"is not installed; pip install 'jax[{extra}]', or --compile-best 0 for the estimate "
            "alone"
        )


def _description(chip: Chip) -> str:
    """What XLA wants to know of a GPU."""
    folder = importlib.resources.files("train.estimate") / "targets"
    return (folder / f"{chip.name}.txtpb").read_text()


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
