"""Facts about a machine (cores, memory, disk, notebook, variables) and checks of them.

`inspect_machine` collects the facts without JAX; the `check_*` functions turn them into findings.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from train.runtime.local_hardware import host_memory_bytes

Level = Literal["ok", "warning", "problem"]
"""Severity of a finding. A warning costs speed or comfort; a problem prevents training."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    level: Level
    detail: str
    remedy: str = ""
    """Command or setting that mends it; empty if nothing is wrong."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Facts about a machine."""

    gpu: str = ""
    """Evidence of an NVIDIA GPU, such as a device file; empty: none."""
    tpu: str = ""
    """Evidence of a TPU, such as a device file; empty: none."""
    num_cores: int = 1
    """Cores available to this process."""
    memory_bytes: int = 0
    """Bytes of memory available to this process; 0: unknown."""
    working_dir: str = "."
    """Working directory, in which runs are stored."""
    free_disk_bytes: int = 0
    """Free bytes in the working directory."""
    writable: bool = True
    """True if the working directory is writable."""
    notebook: str = ""
    """Notebook service: Colab, Kaggle or Jupyter; empty: none."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def inspect_machine(root: Path = Path("/")) -> Machine:
    """Return the facts about this machine; `root` holds its system files."""
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
    """Return the first existing file that matches a pattern; empty if none does."""
    paths = (path for pattern in patterns for path in sorted(root.glob(pattern)))
    return next((f"/{path.relative_to(root)}" for path in paths), "")


def _nvidia_smi() -> str:
    """Return the first GPU that `nvidia-smi` lists; empty if it fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (result.stdout.strip() or " ").splitlines()[0] if result.returncode == 0 else ""


def _cores(root: Path) -> int:
    """Return the cores of the process's affinity, or of the container's quota if that is lower."""
    # macOS has no affinity. A container's CPU quota is in /sys, not in the affinity.
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _read(path: Path) -> str:
    """Return the text of a small file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _notebook(environment: Mapping[str, str]) -> str:
    """Return the notebook service, from variables that it sets for shell commands of a cell too."""
    if "COLAB_RELEASE_TAG" in environment or "google.colab" in sys.modules:
        return "Colab"
    if "KAGGLE_KERNEL_RUN_TYPE" in environment:
        return "Kaggle"
    return "Jupyter" if "JPY_PARENT_PID" in environment or "ipykernel" in sys.modules else ""


GIB = 2**30


MIN_MEMORY_BYTES = 2 * GIB
"""Memory that the smallest runs need."""


MIN_DISK_BYTES = 2 * GIB
"""Disk space of a small run: three copies of weights and moments (two checkpoints, one in writing).
"""


SLOW_SETTINGS = {
    "JAX_DISABLE_JIT": "runs every operation separately, very slowly",
    "JAX_DEBUG_NANS": "reruns every step with a NaN and slows the others",
    "JAX_ENABLE_X64": "computes in float64 where float32 is meant",
}
"""Variables that slow JAX down, with their effect."""


FALSE_VALUES = ("", "0", "false", "no", "off")
"""Values of a variable that turn a setting off."""


def check_environment(machine: "Machine") -> Iterator[Finding]:
    """Check everything about the machine except its accelerator."""
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
    """Check that memory suffices for the smallest runs."""
    if not machine.memory_bytes:
        return Finding("memory", "ok", "unknown")
    detail = f"{machine.memory_bytes / GIB:.1f} GiB"
    if machine.memory_bytes >= MIN_MEMORY_BYTES:
        return Finding("memory", "ok", detail)
    return Finding("memory", "warning", detail, "lower batch_size and model.d_model")


def check_disk(machine: "Machine") -> Finding:
    """Check that checkpoints can be written to the working directory."""
    detail = f"{machine.free_disk_bytes / GIB:.1f} GiB free in {machine.working_dir}"
    elsewhere = "give --workdir a folder elsewhere"
    if not machine.writable:
        return Finding("disk", "warning", f"{machine.working_dir} is not writable", elsewhere)
    if machine.free_disk_bytes >= MIN_DISK_BYTES:
        return Finding("disk", "ok", detail)
    return Finding("disk", "warning", detail, f"free space for checkpoints, or {elsewhere}")


def check_compilation_cache(folder: str | None) -> Finding:
    """Check that JAX's persistent compilation cache can be written."""
    name, setting = "compilation cache", "JAX_COMPILATION_CACHE_DIR"
    if not folder:
        return Finding(name, "ok", f"none, as {setting} is empty")
    if is_writable(folder):
        return Finding(name, "ok", folder)
    remedy = f"set {setting} to a writable folder"
    return Finding(name, "warning", f"{folder} is not writable", remedy)


def is_writable(folder: str) -> bool:
    """Return True if a local folder can be written or created. Remote folders count as writable."""
    if "://" in folder:
        return True
    path = Path(folder).absolute()
    existing = next(each for each in (path, *path.parents) if each.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)
