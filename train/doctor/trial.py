"""Two small computations: whether bfloat16 works here, and how fast products of matrices are."""

import time
from typing import Any

from train.doctor.environment import Finding

TIMED_SIZES = {"cpu": (1024, 512, 2048)}
"""Rows, D and F of the timed feed-forward, by platform."""


ACCELERATOR_SIZES = (8192, 4096, 16384)


MAX_BFLOAT16_ERROR = 2.0**-6
"""Of a product in bfloat16, relative to the largest entry: it has 8 bits."""


def check_bfloat16() -> Finding:
    """A product and its gradients in bfloat16, against float32."""
    import jax

    try:
        error = bfloat16_error()
    except jax.errors.JaxRuntimeError as failure:
        detail = f"a product fails: {str(failure).splitlines()[0]}"
        return Finding("bfloat16", "warning", detail, "train with --model.precision float32")
    if error <= MAX_BFLOAT16_ERROR:
        return Finding("bfloat16", "ok", f"products are right to {error:.1e}")
    detail = f"products are off by {error:.1e} of their size"
    return Finding("bfloat16", "problem", detail, "train with --model.precision float32")


def bfloat16_error() -> float:
    """The largest error of x w and of its gradients, relative to the largest entry of each."""
    import jax
    import jax.numpy as jnp

    def products(x: Any, w: Any) -> Any:  # [48, 64], [64, 32]
        y, pull = jax.vjp(jnp.matmul, x, w)
        return y, *pull(y)

    x = jax.random.normal(jax.random.key(0), (48, 64))
    w = jax.random.normal(jax.random.key(1), (64, 32))
    x, w = (each.astype(jnp.bfloat16) for each in (x, w))
    with jax.default_matmul_precision("highest"):
        right = jax.jit(products)(x.astype(jnp.float32), w.astype(jnp.float32))
    found = jax.jit(products)(x, w)
    pairs = zip(found, right, strict=True)
    return float(max(jnp.max(jnp.abs(f - r)) / jnp.max(jnp.abs(r)) for f, r in pairs))


def check_speed(platform: str) -> Finding:
    """A feed-forward layer, forward and backward, in the dtype that suits the platform."""
    dtype = "float32" if platform == "cpu" else "bfloat16"
    sizes = TIMED_SIZES.get(platform, ACCELERATOR_SIZES)
    speed = feed_forward_flops(*sizes) / time_feed_forward(*sizes, dtype)
    shown = f"{speed / 1e12:.1f} TFLOP/s" if speed >= 1e12 else f"{speed / 1e9:.0f} GFLOP/s"
    return Finding("speed", "ok", f"{shown} in {dtype}, a feed-forward layer's gradient")


def feed_forward_flops(rows: int, width: int, hidden: int) -> int:
    """Of `seconds`: two products forward, three backward (the input needs no gradient)."""
    return 5 * 2 * rows * width * hidden


def time_feed_forward(rows: int, width: int, hidden: int, dtype: str, repeats: int = 3) -> float:
    """The best time of a feed-forward layer's gradient, compiled beforehand."""
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
        begun = time.perf_counter()
        jax.block_until_ready(step(weights, x))
        times.append(time.perf_counter() - begun)
    return min(times)
