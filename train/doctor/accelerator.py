"""Check which devices JAX uses, and whether the machine has an accelerator that it does not use."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from train.doctor.environment import Finding

if TYPE_CHECKING:
    from train.doctor.environment import Machine


GIB = 2**30


NOTEBOOK_REMEDIES = {
    "Colab": "choose Runtime > Change runtime type > a GPU or TPU",
    "Kaggle": "choose Settings > Accelerator > a GPU or TPU",
}
"""Menu entry that adds an accelerator, by notebook service."""


def start_backend(environment: Mapping[str, str]) -> Sequence[Any] | Finding:
    """Return JAX's local devices, or the finding that explains why there are none."""
    try:
        import jax
    except (ImportError, RuntimeError) as error:
        detail = f"jax cannot be imported: {_first_line(error)}"
        return Finding("devices", "problem", detail, "pip install --upgrade jax jaxlib")
    try:
        return jax.local_devices()
    except (AssertionError, RuntimeError) as error:
        return _no_device(environment.get("JAX_PLATFORMS", ""), _first_line(error))


def _no_device(platforms: str, why: str) -> Finding:
    """Return the finding for a backend that did not start; JAX may give no reason."""
    if platforms:
        detail = f"none with JAX_PLATFORMS={platforms}{why and ': '}{why}"
        remedy = "unset JAX_PLATFORMS, or set it to an available platform"
    else:
        detail = f"jax cannot start: {why}"
        remedy = "end other processes that use the device, or set JAX_PLATFORMS=cpu"
    return Finding("devices", "problem", detail, remedy)


def report_devices(devices: Sequence[Any]) -> Finding:
    """Report platform, number, kind and memory of the devices."""
    first = devices[0]
    statistics = first.memory_stats() or {}
    size = statistics.get("bytes_limit", 0)
    memory = f", {size / GIB:.1f} GiB each for JAX" if size else ""
    kind = "CPU" if first.platform == "cpu" else f"{first.device_kind} ({first.platform})"
    detail = f"{len(devices)} × {kind}{memory}"
    return Finding("devices", "ok", detail)


def check_accelerator(platform: str, machine: "Machine", plugins: Sequence[str]) -> Finding:
    """Check that JAX, which runs on `platform`, does not leave a GPU or TPU unused."""
    if platform != "cpu":
        return Finding("accelerator", "ok", f"in use ({platform})")
    asked = machine.environment.get("JAX_PLATFORMS", "")
    if (machine.gpu or machine.tpu) and "cpu" in asked.split(","):
        detail = f"{machine.gpu or machine.tpu} is present, but JAX_PLATFORMS={asked} hides it"
        return Finding("accelerator", "warning", detail, "unset JAX_PLATFORMS")
    if machine.gpu:
        return _unused_gpu(machine.gpu, plugins)
    if machine.tpu:
        return _unused_tpu(machine.tpu, plugins)
    if machine.notebook in NOTEBOOK_REMEDIES:
        detail = f"none: this {machine.notebook} session has only a CPU"
        return Finding("accelerator", "warning", detail, NOTEBOOK_REMEDIES[machine.notebook])
    return Finding("accelerator", "ok", "none found; JAX uses the CPU")


def _unused_gpu(gpu: str, plugins: Sequence[str]) -> Finding:
    cuda = [name for name in plugins if "cuda" in name]
    if cuda:
        detail = f"a GPU is present ({gpu}), but {cuda[0]} did not start{_failure('cuda')}"
        remedy = "see nvidia-smi: cuda13 needs driver 580 or later, cuda12 driver 525 or later"
    else:
        detail = f"a GPU is present ({gpu}), but JAX uses the CPU"
        remedy = "pip install -e '.[cuda13]', or '.[cuda12]' for a driver before 580"
    return Finding("accelerator", "problem", detail, remedy)


def _unused_tpu(tpu: str, plugins: Sequence[str]) -> Finding:
    if "libtpu" in plugins:
        detail = f"a TPU may be present ({tpu}), but libtpu did not start{_failure('tpu')}"
        remedy = "end other processes that use the TPU; run on all hosts of a slice at once"
    else:
        detail = f"a TPU may be present ({tpu}), but JAX uses the CPU"
        remedy = "pip install -e '.[tpu]'"
    return Finding("accelerator", "problem", detail, remedy)


def _failure(platform: str) -> str:
    """Return JAX's reason why a platform did not start."""
    import jax

    try:
        jax.devices(platform)
    except RuntimeError as error:
        return f": {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    """Return the first line of an error."""
    return next(iter(str(error).strip().splitlines()), "")
