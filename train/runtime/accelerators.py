"""Whether JAX uses the accelerator that is here, and whether its packages belong together."""

import dataclasses
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

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


PLUGINS = {"libtpu": "tpu", "jax-cuda13-plugin": "cuda13", "jax-cuda12-plugin": "cuda12"}
"""Packages through which JAX uses TPUs and GPUs -> the extra of jax that installs them."""

PREINSTALLED_MISMATCHES = {
    ("0.7.2", "libtpu", "0.0.21.1"): "Colab",
    ("0.7.2", "libtpu", "0.0.17"): "Kaggle",
}
"""Services that ship jax with a plugin version that it does not ask for (as of August 2026)."""

NOTEBOOK_REMEDIES = {
    "Colab": "choose Runtime > Change runtime type > a GPU or TPU",
    "Kaggle": "choose Settings > Accelerator > a GPU or TPU",
}
"""Menu entry that adds an accelerator, by notebook service."""


def accelerator_warnings(platform: str) -> list[str]:
    """Return one line per problem with the accelerator that JAX uses, or does not use.

    Cheap enough to call before training: JAX is asked only why a platform did not start.
    """
    findings = [check_accelerator(platform)] if platform == "cpu" else check_plugins()
    return [f"{each.name}: {each.detail}; {each.remedy}" for each in findings if each.level != "ok"]


def check_accelerator(platform: str, root: Path = Path("/")) -> Finding:
    """Check that JAX, on this platform, does not leave a GPU or TPU unused."""
    if platform != "cpu":
        return Finding("accelerator", "ok", f"in use ({platform})")
    gpu, tpu, service = find_gpu(root), find_tpu(root), notebook_service()
    requested = os.environ.get("JAX_PLATFORMS", "")
    if (gpu or tpu) and "cpu" in requested.split(","):
        detail = f"{gpu or tpu} is present, but JAX_PLATFORMS={requested} hides it"
        return Finding("accelerator", "warning", detail, "unset JAX_PLATFORMS")
    plugins = installed_plugins()
    if gpu:
        cuda = [name for name in plugins if "cuda" in name]
        detail = f"a GPU is present ({gpu}), but JAX uses the CPU"
        remedy = "pip install -e '.[cuda13]', or '.[cuda12]' for a driver before 580"
        if cuda:
            detail = f"a GPU is present ({gpu}), but {cuda[0]} did not start{_failure('cuda')}"
            remedy = "see nvidia-smi: cuda13 needs driver 580 or later, cuda12 driver 525 or later"
        return Finding("accelerator", "problem", detail, remedy)
    if tpu:
        detail = f"a TPU may be present ({tpu}), but JAX uses the CPU"
        remedy = "pip install -e '.[tpu]'"
        if "libtpu" in plugins:
            detail = f"a TPU may be present ({tpu}), but libtpu did not start{_failure('tpu')}"
            remedy = "end other processes that use the TPU; run on all hosts of a slice at once"
        return Finding("accelerator", "problem", detail, remedy)
    if service in NOTEBOOK_REMEDIES:
        detail = f"none: this {service} session has only a CPU"
        return Finding("accelerator", "warning", detail, NOTEBOOK_REMEDIES[service])
    return Finding("accelerator", "ok", "none found; JAX uses the CPU")


def _failure(platform: str) -> str:
    """Return JAX's reason why a platform did not start."""
    import jax  # may be what is broken, and the doctor looks at it all the same

    try:
        jax.devices(platform)
    except RuntimeError as error:
        return f": {str(error).strip().partition(chr(10))[0]}"
    return ""


def find_gpu(root: Path) -> str:
    """Return evidence of an NVIDIA GPU: a device file, or what `nvidia-smi` lists first."""
    if file := _first(root, "dev/nvidia[0-9]*", "dev/nvidiactl", "dev/dxg"):
        return file
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip().partition("\n")[0] if result.returncode == 0 else ""


def find_tpu(root: Path) -> str:
    """Return evidence of a TPU, a device file; empty if there is none."""
    return _first(root, "dev/accel[0-9]*", "dev/vfio/[0-9]*")


def _first(root: Path, *patterns: str) -> str:
    """Return the first existing file that matches a pattern; empty if none does."""
    paths = (path for pattern in patterns for path in sorted(root.glob(pattern)))
    return next((f"/{path.relative_to(root)}" for path in paths), "")


def notebook_service() -> str:
    """Return the notebook service, from variables that it sets for shell commands of a cell too."""
    if "COLAB_RELEASE_TAG" in os.environ or "google.colab" in sys.modules:
        return "Colab"
    return "Kaggle" if "KAGGLE_KERNEL_RUN_TYPE" in os.environ else ""


def check_plugins() -> list[Finding]:
    """Check each installed accelerator plugin against the requirement of the installed jax."""
    version = installed_version("jax") or ""
    required = {each.name: each for each in requirements("jax", extras=True)} if version else {}
    return [
        check_plugin(plugin, installed_version(plugin) or "", required.get(plugin), version)
        for plugin in installed_plugins()
    ]


def check_plugin(name: str, version: str, requirement: Requirement | None, jax: str) -> Finding:
    """Check a plugin: JAX ignores plugins of another version, or fails when they start."""
    if requirement is None or requirement.specifier.contains(version, prereleases=True):
        return Finding(name, "ok", f"{version}, for jax {jax}")
    detail = f"{version} is not {requirement.specifier}, which jax {jax} requires"
    if service := PREINSTALLED_MISMATCHES.get((jax, name, version)):
        remedy = (
            "leave it: training runs; attention kernels that do not compile are replaced, "
            "and plan needs --compile-best 0"
        )
        return Finding(name, "warning", f"{detail}, but {service} ships them together", remedy)
    return Finding(name, "warning", detail, f'pip install --upgrade "jax[{PLUGINS[name]}]=={jax}"')


def installed_plugins() -> list[str]:
    """Return the installed accelerator plugins."""
    return [name for name in PLUGINS if installed_version(name)]


def installed_version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(package: str, *, extras: bool = False) -> list[Requirement]:
    """Return the requirements of an installed package; with `extras`, those of its extras too."""
    required = [Requirement(text) for text in importlib.metadata.requires(package) or ()]
    return [each for each in required if extras or not each.marker or each.marker.evaluate()]
