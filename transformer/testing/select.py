"""Mixers that choose by themselves which keys a query sees, held to softmax attention."""

import functools
import math
from typing import Any, Protocol

import jax
import numpy as np

from transformer.masks import Mask, dense
from transformer.testing.trial import Array, Trial


class Selective(Protocol):
    """The two methods that a mixer adds if it has a pattern of its own.

    It has to equal softmax attention under `select` and the mask. Its output matrix is the
    parameter `output` [N, H of values, D], with `output_bias` [D] or without. Linen lets one method
    alone declare weights, so what these two need of them they ask of `__call__`, through `want`.
    """

    def select(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        positions: jax.Array,  # [B, T]
        mask: Mask,
        constants: Any = None,
    ) -> jax.Array:  # [B, N, T, S] booleans, True where the pattern lets the query see the key
        ...

    def scored(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        positions: jax.Array,  # [B, T]
        mask: Mask,
        constants: Any = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, T, N, H], [B, S, K, H], [B, S, K, H]
        """Queries, keys and values as the scores take them: projected, turned, normalized."""
        ...


def check_select(trial: Trial) -> None:
    """The result is that of softmax attention under `select` and the mask, built densely."""
    x = trial.inputs(11)
    arguments = trial.arguments(trial.length)
    mask = arguments["mask"]
    ask = functools.partial(trial.mixer.apply, {"params": trial.params}, x, **arguments)
    chosen = np.asarray(ask(method="select"))
    q, k, v = (np.asarray(each) for each in ask(method="scored"))
    seen = chosen & np.asarray(dense(mask, trial.length, trial.length))[:, None]
    y = softmax_attention(q, k, v, seen)
    expected = np.einsum("BTNH,NHD->BTD", y, trial.params["output"])
    expected = expected + np.asarray(trial.params.get("output_bias", 0.0))
    otherwise = "the result is not softmax attention under `select` and the mask"
    trial.require_close(trial(x).y, expected, "select", otherwise)


def softmax_attention(
    q: Array,  # [B, T, N, H]
    k: Array,  # [B, S, K, H]
    v: Array,  # [B, S, K, H of values]
    seen: Array,  # [B or 1, N or 1, T, S] booleans
) -> Array:  # [B, T, N, H of values]
    """softmax(q k^T / sqrt(H) where seen) v in NumPy; zeros where nothing is seen."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(each, group, axis=2) for each in (k, v))
    scores = np.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(q.shape[-1])
    scores = np.where(seen, scores, -np.inf)
    largest = np.max(scores, axis=-1, keepdims=True)
    raised = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    total = raised.sum(-1, keepdims=True)
    y = np.einsum("BNTS,BSNH->BTNH", raised / np.where(total > 0, total, 1), v)
    return np.asarray(y)
