"""Attention backends against softmax attention in float64, forward and backward."""

import contextlib
import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests_device.support import Meter, float32_tolerance, largest_difference
from transformer import Hardware, Mask, MaskPattern
from transformer.attention.attend import attend
from transformer.attention.backends.choose import (
    AttentionSpec,
    Backend,
    BackendChoice,
    choose_backend,
)
from transformer.attention.masks import dense_mask
from transformer.attention.reference import ScoreSpec

B, N, K, H = 2, 4, 2, 64
WINDOW = 100
SCALE = H**-0.5

# `ring` needs a sequence that is sharded over devices.
BACKENDS = [form for form in get_args(Backend) if form not in ("auto", "ring")]
MASKS = ("causal", "full", "window", "segments")

Array = np.ndarray[Any, Any]


def tolerance_of(dtype: str, hardware: Hardware) -> float:
    """Return the tolerance of results in a dtype, relative to max(1, largest result).

    bfloat16 has 8 significant bits, so one rounding is off by up to 2**-8. Weights, or gradients of
    scores, are rounded and then the result, mostly not both in one direction: 2**-7 is two such
    roundings. float16 has 11 bits, a rounding is 2**-11, and four of them are allowed.
    """
    if dtype == "bfloat16":
        return 2**-7
    return 2**-9 if dtype == "float16" else float32_tolerance(hardware)


def tokens(hardware: Hardware) -> int:
    """Return T: three tiles, or two of a GPU's large ones, the last one incomplete.

    The formula in float64 takes the host seconds for a thousand tokens, and four times as long for
    twice as many.
    """
    return hardware.tile_size * (2 if hardware.tile_size <= 512 else 1) + 64


def make_mask(name: str, length: int) -> Mask:
    """Return a mask by name; the one with segments is causal and ends in padding."""
    pattern = MaskPattern(causal=name != "full", window=WINDOW if name == "window" else 0)
    if name != "segments":
        return Mask(pattern)
    starts = np.array([[0.2, 0.3, 0.9], [0.5, 0.7, 1.0]]) * length
    segments = 1 + (np.arange(length)[None, :, None] >= starts[:, None]).sum(-1)
    return Mask(pattern, segments=jnp.asarray(np.where(segments == 4, 0, segments), jnp.int32))


def resolved_backend(
    form: Any, mask: Mask, dtype: str, length: int, hardware: Hardware
) -> BackendChoice:
    """Return the backend that the library uses for a requested one."""
    case = AttentionSpec(
        hardware=hardware,
        pattern=mask.pattern,
        dtype=dtype,
        num_queries=length,
        num_keys=length,
        head_dim=H,
        value_head_dim=H,
        has_segments=mask.segments is not None,
    )
    return choose_backend(form, case)


@functools.cache
def inputs(dtype: str, length: int) -> tuple[Array, ...]:
    """Return q, k, v and the gradient of y, rounded to a dtype: all backends get the same bits."""
    random = np.random.default_rng(0)
    shapes = [(B, length, heads, H) for heads in (N, K, K, N)]
    return tuple(random.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes)


@functools.cache
def expected(name: str, dtype: str, length: int) -> tuple[Array, ...]:
    """Return y and the gradients of q, k, v by the formulas, in float64 by NumPy.

    With weights P = softmax(scale q k^T), y = P v: dv = P^T dy, dP = dy v^T, and
    dscores = P (dP - sum over keys of P dP).
    """
    arrays = (each.astype(np.float64).swapaxes(1, 2) for each in inputs(dtype, length))
    q, k, v, dy = arrays  # [B, heads, T, H]
    k, v = (np.repeat(each, N // K, axis=1) for each in (k, v))
    visible = np.asarray(dense_mask(make_mask(name, length), length, length))[:, None]
    scores = np.where(visible, SCALE * q @ k.swapaxes(2, 3), -np.inf)
    # A query without visible keys (padding) has no largest score, and weights of zero.
    top = np.where(visible.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0)
    exp_scores = np.exp(scores - top)
    weights = exp_scores / np.maximum(exp_scores.sum(-1, keepdims=True), 1e-300)
    dweights = dy @ v.swapaxes(2, 3)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
    dq, dk = SCALE * dscores @ k, SCALE * dscores.swapaxes(2, 3) @ q
    dv = weights.swapaxes(2, 3) @ dy
    # The gradients of a key-value head sum over the query heads that read it.
    dk, dv = (each.reshape(B, K, N // K, length, H).sum(2) for each in (dk, dv))
    return tuple(each.swapaxes(1, 2) for each in (weights @ v, dq, dk, dv))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", BACKENDS)
def test_attention(form: Any, dtype: str, one_device: Hardware, meter: Meter) -> None:
    """A backend that this hardware supports computes y and its gradients within the tolerance."""
    if dtype == "float16" and one_device.platform != "gpu":
        pytest.skip("float16 is checked on GPUs")
    length, tolerance = tokens(one_device), tolerance_of(dtype, one_device)
    # By default float32 products are rounded to TF32 on GPUs and to bfloat16 on TPUs. Not for 16
    # bits: Mosaic refuses a precision above that of the operands.
    exact: Any = contextlib.nullcontext()
    if dtype == "float32":
        exact = jax.default_matmul_precision("highest")
    checked, why = [], ""
    for name in MASKS:
        mask = make_mask(name, length)
        choice = resolved_backend(form, mask, dtype, length, one_device)
        if choice.is_fallback:
            why = why or choice.reason.partition(": ")[2]
            continue

        @jax.jit
        def values_and_gradients(q: Any, k: Any, v: Any, dy: Any, mask: Mask) -> Any:
            def run(q: Any, k: Any, v: Any) -> Any:
                return attend(q, k, v, mask, ScoreSpec(SCALE), backend=form, hardware=one_device).y

            y, vjp_fn = jax.vjp(run, q, k, v)
            return y, *vjp_fn(dy)

        with exact:
            actual = jax.device_get(values_and_gradients(*inputs(dtype, length), mask))
        checked.append(name)
        for what, one, other in zip(
            ("y", "dq", "dk", "dv"), actual, expected(name, dtype, length), strict=True
        ):
            assert str(one.dtype) == dtype
            meter.check(f"{name} {what}", largest_difference(one, other), tolerance)
    if not checked:
        pytest.skip(why)
    meter.note = ", ".join(checked)
    meter.finish()
