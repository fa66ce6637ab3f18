"""Check the devices: which JAX uses, whether it misses an accelerator, their accuracy and speed."""

import time
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
    requested = machine.environment.get("JAX_PLATFORMS", "")
    if (machine.gpu or machine.tpu) and "cpu" in requested.split(","):
        detail = f"{machine.gpu or machine.tpu} is present, but JAX_PLATFORMS={requested} hides it"
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


TIMED_SIZES = {"cpu": (1024, 512, 2048)}
"""Rows, D and F of the timed feed-forward layer, by platform."""


ACCELERATOR_SIZES = (8192, 4096, 16384)
"""The same for accelerators."""


MAX_BFLOAT16_ERROR = 2.0**-6
"""Largest error of a bfloat16 matmul (8 significant bits), relative to the largest entry."""


def check_bfloat16() -> Finding:
    """Compare a bfloat16 matmul and its gradients with float32."""
    import jax

    try:
        error = bfloat16_error()
    except jax.errors.JaxRuntimeError as failure:
        detail = f"a matmul fails: {str(failure).splitlines()[0]}"
        return Finding("bfloat16", "warning", detail, "train with --model.precision float32")
    if error <= MAX_BFLOAT16_ERROR:
        return Finding("bfloat16", "ok", f"matmuls are accurate to {error:.1e}")
    detail = f"matmuls are off by {error:.1e} of their largest entry"
    return Finding("bfloat16", "problem", detail, "train with --model.precision float32")


def bfloat16_error() -> float:
    """Return the largest error of x w and its gradients, relative to the largest entry of each."""
    import jax
    import jax.numpy as jnp

    def products(x: Any, w: Any) -> Any:  # [48, 64], [64, 32]
        y, vjp = jax.vjp(jnp.matmul, x, w)
        return y, *vjp(y)

    x = jax.random.normal(jax.random.key(0), (48, 64))
    w = jax.random.normal(jax.random.key(1), (64, 32))
    x, w = (each.astype(jnp.bfloat16) for each in (x, w))
    # By default a TPU, or a GPU with TF32, rounds the operands of float32 products too.
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(products)(x.astype(jnp.float32), w.astype(jnp.float32))
    actual = jax.jit(products)(x, w)
    pairs = zip(actual, expected, strict=True)
    return float(max(jnp.max(jnp.abs(a - e)) / jnp.max(jnp.abs(e)) for a, e in pairs))


def check_speed(platform: str) -> Finding:
    """Time a feed-forward layer's gradient in the dtype that suits the platform."""
    dtype = "float32" if platform == "cpu" else "bfloat16"
    sizes = TIMED_SIZES.get(platform, ACCELERATOR_SIZES)
    speed = feed_forward_flops(*sizes) / time_feed_forward(*sizes, dtype)
    speed_text = f"{speed / 1e12:.1f} TFLOP/s" if speed >= 1e12 else f"{speed / 1e9:.0f} GFLOP/s"
    return Finding("speed", "ok", f"{speed_text} in {dtype}, a feed-forward layer's gradient")


def feed_forward_flops(rows: int, width: int, hidden: int) -> int:
    """Return FLOPs of `time_feed_forward`: 2 matmuls forward, 3 backward (no input gradient)."""
    return 5 * 2 * rows * width * hidden


def time_feed_forward(rows: int, width: int, hidden: int, dtype: str, repeats: int = 3) -> float:
    """Return the fastest seconds of a feed-forward layer's gradient, compilation excluded."""
    import jax
    import jax.numpy as jnp

    def loss(weights: Any, x: Any) -> Any:
        up, down = weights
        return jnp.mean(jnp.square(jax.nn.relu(x @ up) @ down).astype(jnp.float32))

    step = jax.jit(jax.grad(loss))
    x = jnp.ones((rows, width), dtype)
    weights = jnp.ones((width, hidden), dtype), jnp.ones((hidden, width), dtype)
    jax.block_until_ready(step(weights, x))
    times = []  # the least of them counts: other processes can only slow a run down
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step(weights, x))
        times.append(time.perf_counter() - start)
    return min(times)
