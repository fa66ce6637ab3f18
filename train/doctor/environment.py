"""What the doctor says of one thing.

What a machine has, as its system tells it: without JAX, and without a verdict.

Cores, memory, disk, notebook, and settings of the environment that slow JAX down.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from train.runtime.host_memory import host_memory_bytes

Level = Literal["ok", "warning", "problem"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at. A warning costs speed or comfort; a problem must be solved."""

    name: str
    level: Level
    detail: str
    remedy: str = ""
    """What to do about it; empty if nothing."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Facts to be judged."""

    gpu: str = ""
    """What shows that an NVIDIA GPU is here, such as a device file; empty: nothing does."""
    tpu: str = ""
    """What shows that a TPU is here."""
    num_cores: int = 1
    """That this process may use."""
    memory_bytes: int = 0
    """Bytes that this process may use; 0: not known."""
    working_dir: str = "."
    """The working folder, where runs are kept."""
    free_disk_bytes: int = 0
    """Bytes free there."""
    writable: bool = True
    """Whether the working folder can be written to."""
    notebook: str = ""
    """Colab, Kaggle or Jupyter."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def inspect_machine(root: Path = Path("/")) -> Machine:
    """This machine; `root` is where its system files are."""
    folder = Path.cwd()
    return Machine(
        gpu=_first(root, "dev/nvidia[0-9]*", "dev/nvidiactl", "dev/dxg") or _nvidia_smi(),
        tpu=_first(root, "dev/accel[0-9]*", "dev/vfio/[0-9]*"),
        num_cores=_cores(root),
        memory_bytes=host_memory_bytes(root),
        working_dir=str(folder),
        free_disk_bytes=shutil.disk_usage(folder).free,
        writable=os.access(folder, os.W_OK),
        notebook=_notebook(os.environ),
        environment=dict(os.environ),
    )


def _first(root: Path, *patterns: str) -> str:
    """The first file that is there, or nothing."""
    found = (path for pattern in patterns for path in sorted(root.glob(pattern)))
    return next((f"/{path.relative_to(root)}" for path in found), "")


def _nvidia_smi() -> str:
    """The first GPU that NVIDIA's own tool lists."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (result.stdout.strip() or " ").splitlines()[0] if result.returncode == 0 else ""


def _cores(root: Path) -> int:
    """Cores of the process's affinity, or a container's quota of them if that is less."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _read(path: Path) -> str:
    """The text of a small file; nothing if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _notebook(environment: Mapping[str, str]) -> str:
    """Where this runs, told by what these places set for the commands of a cell too."""
    if "COLAB_RELEASE_TAG" in environment or "google.colab" in sys.modules:
        return "Colab"
    if "KAGGLE_KERNEL_RUN_TYPE" in environment:
        return "Kaggle"
    return "Jupyter" if "JPY_PARENT_PID" in environment or "ipykernel" in sys.modules else ""


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
