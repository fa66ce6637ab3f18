"""Mixers that choose by themselves which keys a query sees, held to softmax attention."""

import math
from typing import Any, Protocol, cast

import jax
import numpy as np

from transformer.attention.base import Mixer, MixerInputs
from transformer.attention.masks import dense_mask
from transformer.testing.trial import Array, Trial


class SelectiveMixer(Protocol):
    """The two methods of a mixer that has a pattern of its own.

    It has to equal softmax attention under `select` and the mask. Its output matrix is the
    parameter `output` [N, H of values, D], with `output_bias` [D] or without.
    """

    def project(self, x: jax.Array, inputs: MixerInputs) -> Any:
        """Queries [B, T, N, H], keys and values [B, S, K, H] as the scores take them.

        Projected, rotated and normalized; more fields may follow these three. The forward pass
        calls it once: Linen lets `__call__` alone declare weights, so `projections` captures its
        result there.
        """
        ...

    def select(
        self,
        heads: Any,  # result of `project`
        inputs: MixerInputs,
    ) -> jax.Array:  # [B, N, T, S] booleans, True where the pattern lets the query see the key
        ...


def projections(mixer: Mixer, params: Any, x: Any, inputs: MixerInputs) -> Any:
    """Return what the mixer's `project` returned during a forward pass."""
    _, state = mixer.apply(
        {"params": params},
        x,
        inputs,
        capture_intermediates=lambda _, method: method == "project",
        mutable=["intermediates"],
    )
    (heads,) = state["intermediates"]["project"]
    return heads


def check_select(trial: Trial) -> None:
    """The result is that of softmax attention under `select` and the mask, built densely."""
    x, mixer = trial.inputs(11), cast(Any, trial.mixer)
    inputs = trial.mixer_inputs(trial.length)
    heads, mask = projections(mixer, trial.params, x, inputs), inputs.mask
    chosen = np.asarray(mixer.select(heads, inputs))
    q, k, v = (np.asarray(each) for each in heads[:3])
    seen = chosen & np.asarray(dense_mask(mask, trial.length, trial.length))[:, None]
    y = reference_softmax_attention(q, k, v, seen)
    expected = np.einsum("BTNH,NHD->BTD", y, trial.params["output"])
    expected = expected + np.asarray(trial.params.get("output_bias", 0.0))
    otherwise = "the result is not softmax attention under `select` and the mask"
    trial.require_close(trial(x).y, expected, "select", otherwise)


def reference_softmax_attention(
    q: Array,  # [B, T, N, H]
    k: Array,  # [B, S, K, H]
    v: Array,  # [B, S, K, H of values]
    visible: Array,  # [B or 1, N or 1, T, S] booleans
) -> Array:  # [B, T, N, H of values]
    """softmax(q k^T / sqrt(H) where seen) v in NumPy; zeros where nothing is seen."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(each, group, axis=2) for each in (k, v))
    scores = np.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(q.shape[-1])
    scores = np.where(visible, scores, -np.inf)
    largest = np.max(scores, axis=-1, keepdims=True)
    raised = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    total = raised.sum(-1, keepdims=True)
    y = np.einsum("BNTS,BSNH->BTNH", raised / np.where(total > 0, total, 1), v)
    return np.asarray(y)
