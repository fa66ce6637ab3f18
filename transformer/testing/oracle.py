"""Oracle for sparse mixers: dense softmax attention under the mixer's own pattern."""

import math
from typing import Any, Protocol, cast

import jax
import numpy as np

from transformer.attention.base import Mixer, MixerInputs
from transformer.attention.masks import dense_mask
from transformer.testing.trial import Array, Trial


class SelectiveMixer(Protocol):
    """Two methods that a mixer with its own sparsity pattern adds, to be tested.

    Its result has to equal softmax attention under `select` and the mask. Its output matrix is the
    parameter `output` [N, H of values, D], with `output_bias` [D] or without.
    """

    def project(self, x: jax.Array, inputs: MixerInputs) -> Any:
        """Return queries [B, T, N, H], keys and values [B, S, K, H], ready for the scores.

        Projected, rotated and normalized; more fields may follow these three. The forward pass
        calls it once. Linen lets only `__call__` declare weights, so `projections` captures the
        result of that call.
        """
        ...

    def select(
        self,
        heads: Any,  # result of `project`
        inputs: MixerInputs,
    ) -> jax.Array:  # [B, N, T, S] booleans
        """Return True where the pattern, without the mask, shows the key to the query."""
        ...


def projections(mixer: Mixer, params: Any, x: Any, inputs: MixerInputs) -> Any:
    """Return the result of the mixer's `project` in a forward pass."""
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
    """Check that the result equals dense softmax attention under `select` and the mask."""
    x, mixer = trial.inputs(11), cast(Any, trial.mixer)
    inputs = trial.mixer_inputs(trial.length)
    heads, mask = projections(mixer, trial.params, x, inputs), inputs.mask
    selected = np.asarray(mixer.select(heads, inputs))
    q, k, v = (np.asarray(each) for each in heads[:3])
    visible = selected & np.asarray(dense_mask(mask, trial.length, trial.length))[:, None]
    y = reference_softmax_attention(q, k, v, visible)
    expected = np.einsum("BTNH,NHD->BTD", y, trial.params["output"])
    expected = expected + np.asarray(trial.params.get("output_bias", 0.0))
    message = "the result is not softmax attention under `select` and the mask"
    trial.require_close(trial(x).y, expected, "select", message)


def reference_softmax_attention(
    q: Array,  # [B, T, N, H]
    k: Array,  # [B, S, K, H]
    v: Array,  # [B, S, K, H of values]
    visible: Array,  # [B or 1, N or 1, T, S] booleans
) -> Array:  # [B, T, N, H of values]
    """Return softmax(q k^T / sqrt(H) where visible) v in NumPy; zeros if nothing is visible."""
    group_size = q.shape[2] // k.shape[2]
    k, v = (np.repeat(each, group_size, axis=2) for each in (k, v))
    scores = np.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(q.shape[-1])
    scores = np.where(visible, scores, -np.inf)
    maximum = np.max(scores, axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(maximum), maximum, 0))
    total = weights.sum(-1, keepdims=True)
    y = np.einsum("BNTS,BSNH->BTNH", weights / np.where(total > 0, total, 1), v)
    return np.asarray(y)
