"""Kernel attention by dense matrices: every pair of tokens has its weight."""

from typing import Any

import numpy as np

from tests.transformer.formulas import Array


def positive(x: Any, directions: Array, xp: Any = np) -> Any:  # [..., H] -> [..., M]
    """Return exp(w . x - |x|^2 / 2) / sqrt(M), without an extracted factor."""
    x = x / x.shape[-1] ** 0.25
    return xp.exp(x @ directions.T - (x * x).sum(-1)[..., None] / 2) / len(directions) ** 0.5


def trigonometric(x: Any, directions: Array, xp: Any = np) -> Any:
    """exp(|x|^2 / 2) (sin w . x, cos w . x) / sqrt(M / 2)."""
    x = x / x.shape[-1] ** 0.25
    raised = xp.exp((x * x).sum(-1) / 2)[..., None] / len(directions) ** 0.5
    return raised * xp.concatenate([xp.sin(x @ directions.T), xp.cos(x @ directions.T)], -1)


def relu(x: Any, directions: Array, xp: Any = np) -> Any:
    x = x / x.shape[-1] ** 0.25
    return xp.maximum(x @ directions.T, 0) / len(directions) ** 0.5 + 1e-3


def elu(x: Any, directions: Any = None, xp: Any = np) -> Any:
    return xp.where(x > 0, x + 1, xp.exp(xp.minimum(x, 0)))


FORMULAS = {"positive": positive, "trigonometric": trigonometric, "relu": relu, "elu": elu}


def dense_attention(
    q: Any,  # [B, T, N, M] features
    k: Any,  # [B, S, K, M]
    v: Any,  # [B, S, K, H]
    seen: Array,  # [B, T, S]
    xp: Any = np,
) -> Any:  # [B, T, N, H]
    """All weights phi(q) . phi(k) of what is seen, over their sum; zeros where nothing is."""
    k, v = (xp.repeat(each, q.shape[2] // k.shape[2], axis=2) for each in (k, v))
    weights = xp.where(seen[:, None], xp.einsum("BTNM,BSNM->BNTS", q, k), 0)
    total = weights.sum(-1)[..., None]
    return xp.einsum("BNTS,BSNH->BTNH", weights / xp.where(total == 0, 1, total), v)
