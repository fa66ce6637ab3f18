"""Cores, memory, disk, notebook, and settings of the environment that slow JAX down."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from train.doctor.finding import Finding

if TYPE_CHECKING:
    from train.doctor.machine import Machine

GIB = 2**30
MIN_MEMORY_BYTES = 2 * GIB
MIN_DISK_BYTES = 2 * GIB
"""A run keeps three copies of weights and moments: two checkpoints, and one being written."""

SLOW_SETTINGS = {
    "JAX_DISABLE_JIT": "runs every operation by itself, very slowly",
    "JAX_DEBUG_NANS": "runs every step again where it meets a NaN, and slows the others",
    "JAX_ENABLE_X64": "makes doubles of numbers that were meant as floats",
}
FALSE_VALUES = ("", "0", "false", "no", "off")


def check_environment(machine: "Machine") -> Iterator[Finding]:
    """Everything about the machine that is not its accelerator."""
    yield Finding("cores", "ok", f"{machine.num_cores}")
    yield check_memory(machine)
    yield check_disk(machine)
    if machine.notebook:
        yield Finding("notebook", "ok", machine.notebook)
    for name, harm in SLOW_SETTINGS.items():
        value = machine.environment.get(name, "")
        if value.lower() not in FALSE_VALUES:
            yield Finding(name, "warning", f"{value}: {harm}", f"unset {name}")


def check_memory(machine: "Machine") -> Finding:
    """Main memory, enough for the smallest runs."""
    if not machine.memory_bytes:
        return Finding("memory", "ok", "not known")
    detail = f"{machine.memory_bytes / GIB:.1f} GiB"
    if machine.memory_bytes >= MIN_MEMORY_BYTES:
        return Finding("memory", "ok", detail)
    return Finding("memory", "warning", detail, "lower batch_size and model.width to what fits")


def check_disk(machine: "Machine") -> Finding:
    """Room for checkpoints in the working folder."""
    detail = f"{machine.free_disk_bytes / GIB:.1f} GiB free in {machine.working_dir}"
    elsewhere = "give --workdir a folder elsewhere"
    if not machine.writable:
        return Finding("disk", "warning", f"{machine.working_dir} cannot be written to", elsewhere)
    if machine.free_disk_bytes >= MIN_DISK_BYTES:
        return Finding("disk", "ok", detail)
    return Finding("disk", "warning", detail, f"make room for checkpoints, or {elsewhere}")


def check_compilation_cache(folder: str | None) -> Finding:
    """Where JAX keeps compiled programs between runs."""
    name, setting = "compilation cache", "JAX_COMPILATION_CACHE_DIR"
    if not folder:
        return Finding(name, "ok", f"none, as {setting} is empty")
    if is_writable(folder):
        return Finding(name, "ok", folder)
    remedy = f"set {setting} to a folder of your own"
    return Finding(name, "warning", f"{folder} cannot be written to", remedy)


def is_writable(folder: str) -> bool:
    """Whether a local folder can be written to, or made. Remote ones are taken to be fine."""
    if "://" in folder:
        return True
    path = Path(folder).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    return there.is_dir() and os.access(there, os.W_OK)
