"""Feature-map attention with a dense matrix of weights, one for every pair of tokens."""

from typing import Any

import numpy as np

from tests.transformer.formulas import Array


def positive(x: Any, random_vectors: Array, xp: Any = np) -> Any:  # [..., H] -> [..., M]
    """Return exp(w . x - |x|^2 / 2) / sqrt(M), without an extracted factor."""
    x = x / x.shape[-1] ** 0.25
    return (
        xp.exp(x @ random_vectors.T - (x * x).sum(-1)[..., None] / 2) / len(random_vectors) ** 0.5
    )


def trigonometric(x: Any, random_vectors: Array, xp: Any = np) -> Any:
    """Return exp(|x|^2 / 2) (sin w . x, cos w . x) / sqrt(M / 2)."""
    x = x / x.shape[-1] ** 0.25
    exp_norm = xp.exp((x * x).sum(-1) / 2)[..., None] / len(random_vectors) ** 0.5
    return exp_norm * xp.concatenate(
        [xp.sin(x @ random_vectors.T), xp.cos(x @ random_vectors.T)], -1
    )


def relu(x: Any, random_vectors: Array, xp: Any = np) -> Any:
    x = x / x.shape[-1] ** 0.25
    return xp.maximum(x @ random_vectors.T, 0) / len(random_vectors) ** 0.5 + 1e-3


def elu(x: Any, random_vectors: Any = None, xp: Any = np) -> Any:
    return xp.where(x > 0, x + 1, xp.exp(xp.minimum(x, 0)))


FORMULAS = {"positive": positive, "trigonometric": trigonometric, "relu": relu, "elu": elu}


def dense_attention(
    q: Any,  # [B, T, N, M] features
    k: Any,  # [B, S, K, M]
    v: Any,  # [B, S, K, H]
    visible: Array,  # [B, T, S]
    xp: Any = np,
) -> Any:  # [B, T, N, H]
    """Weight visible values by phi(q) . phi(k) divided by its sum; zeros if nothing is visible."""
    k, v = (xp.repeat(each, q.shape[2] // k.shape[2], axis=2) for each in (k, v))
    weights = xp.where(visible[:, None], xp.einsum("BTNM,BSNM->BNTS", q, k), 0)
    total = weights.sum(-1)[..., None]
    return xp.einsum("BNTS,BSNH->BTNH", weights / xp.where(total == 0, 1, total), v)
