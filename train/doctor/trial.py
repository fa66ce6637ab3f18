"""Two small computations: accuracy of bfloat16 matmuls, and speed of a feed-forward layer."""

import time
from typing import Any

from train.doctor.environment import Finding

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
    shown = f"{speed / 1e12:.1f} TFLOP/s" if speed >= 1e12 else f"{speed / 1e9:.0f} GFLOP/s"
    return Finding("speed", "ok", f"{shown} in {dtype}, a feed-forward layer's gradient")


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
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step(weights, x))
        times.append(time.perf_counter() - start)
    return min(times)
