"""What a machine has, as its system tells it: without JAX, and without a verdict."""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from train.host_memory import host_memory_bytes


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
