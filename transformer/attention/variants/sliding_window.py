"""Sliding-window attention, optionally dilated (Beltagy et al. 2020, section 3.1)."""

import dataclasses
from typing import ClassVar

import jax
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool

from transformer.attention.attend import attend
from transformer.attention.backends.choose import Backend
from transformer.attention.cache import RollingCache, mark_padding, prepend_cached_keys
from transformer.attention.masks import Mask, MaskPattern, dense_mask
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
)
from transformer.attention.projections import QKV, MultiHeadConfig, combine_heads, project_qkv
from transformer.attention.reference import ScoreSpec
from transformer.attention.scores import DotScore, ScaledDotScore, declare_sink_logits
from transformer.attention.sparse_ops.visible_key_counts import (
    MeanVisibleKeys,
    symmetric_visible_keys,
)
from transformer.layers.basic import fold_in
from transformer.taps import ATTENTION_VALUES, reject_requests
from transformer.validation import (
    Fraction,
    NonNegativeFloat,
    PositiveInt,
)


@dataclasses.dataclass(frozen=True)
class SlidingWindowConfig(MultiHeadConfig):
    """Keys less than `window` steps away from the query (Beltagy et al. 2020, section 3.1)."""

    kind: ClassVar[str] = "sliding_window"

    window: PositiveInt = 512
    """W, in steps. Causal: the query's own key and the W - 1 before it. Otherwise also the W - 1
    keys after it."""
    dilation: PositiveInt = 1
    """Positions per step. More than 1 widens the window and leaves gaps in it."""
    score: ScaledDotScore | DotScore = ScaledDotScore()
    """Score of a query and a key."""
    soft_cap: NonNegativeFloat = 0.0
    """Soft cap c: c tanh(score / c) limits scores to (-c, c) (Gemma Team 2024, section 2). 0: no
    cap."""
    sinks: bool = False
    """Add one learned logit per head to the softmax, without a value (Agarwal et al. 2025)."""
    dropout: Fraction = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""
    backend: Backend = "auto"
    """Implementation; `blockwise` skips tiles outside the window."""

    @property
    def receptive_field(self) -> int:
        """Number of consecutive positions from the query to its most distant key, inclusive.

        A cache must hold this many tokens.
        """
        return (self.window - 1) * self.dilation + 1


@register_mixer
class SlidingWindowAttention(Mixer):
    """Softmax attention restricted to a window of positions."""

    config: SlidingWindowConfig

    values = ATTENTION_VALUES

    @staticmethod
    def abilities(config: SlidingWindowConfig) -> Abilities:
        return Abilities(cross=False)

    @staticmethod
    def score_flops(config: SlidingWindowConfig, width: int, length: int) -> ScoreFlops:
        return sliding_window_visible_keys(config, length).flops(config, width)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> RollingCache:
        """Return a cache for the receptive field; its size does not grow with `length`."""
        config, size = self.config, min(self.config.receptive_field, length)
        width = config.resolved_head_dim(self.context.d_model)
        return RollingCache.empty(
            batch, size, config.resolved_num_kv_heads, width, self.context.precision.cache_dtype
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        mask, cache = inputs.mask, inputs.cache
        config, context = self.config, self.context
        mask = mask.replace(pattern=self.add_window(mask.pattern))
        q, k, v = qkv = self.project(x, inputs)
        num_padding = 0  # queries of cached tokens, which are of no interest
        if cache is not None:
            if not mask.pattern.causal:
                raise ValueError(
                    "mixer sliding_window: decoding with a cache needs a causal mask; give one"
                )
            if mask.pattern.prefix or mask.global_positions is not None:
                raise ValueError(
                    "mixer sliding_window: its cache holds one window of tokens, and a prefix or "
                    "global tokens are seen from farther; decode without a cache"
                )
            positions = mark_padding(inputs.positions, x.shape[0])
            q, k, v, mask, _, num_padding = prepend_cached_keys(cache, *qkv, mask, positions)
            cache = cache.append(qkv.k, qkv.v, positions)
            k, v = k.astype(q.dtype), v.astype(q.dtype)  # from the storage dtype of the cache
        score_spec = ScoreSpec(
            scale=config.score.scale(q.shape[-1]),
            soft_cap=config.soft_cap,
            softmax_dtype=context.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=fold_in(inputs.dropout_rngs, 0),
        )
        sinks = declare_sink_logits(self, config.num_heads, context) if config.sinks else None
        if num_padding and inputs.taps is not None:
            # The rows of padding queries would be among the values.
            reject_requests(config.kind, inputs.taps, "with a cache")
        y, aux = attend(
            q,
            k,
            v,
            mask,
            score_spec,
            backend=config.backend,
            hardware=context.hardware,
            constrain=context.constrain,
            sink_logits=sinks,
            outputs=inputs.outputs,
            taps=None if num_padding else inputs.taps,
        )
        y, aux = y[:, num_padding:], dict(aux)
        if "weights" in aux:
            aux["weights"] = aux["weights"][:, :, num_padding:]
        if not num_padding:
            inputs = inputs.replace(taps=None)  # `attend` has shown the heads
        return combine_heads(self, y, inputs, cache, aux)

    def project(self, x: jax.Array, inputs: MixerInputs) -> QKV:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project_qkv(self, x, inputs.positions)

    @nn.nowrap
    def add_window(self, pattern: MaskPattern) -> MaskPattern:
        """Return the mask's pattern with the window added."""
        if pattern.window:
            raise ValueError(
                "mixer sliding_window: has a window of its own; give a mask without a window"
            )
        config = self.config
        return dataclasses.replace(pattern, window=config.window, dilation=config.dilation)

    @nn.nowrap
    def select(
        self,
        heads: QKV,
        inputs: MixerInputs,
    ) -> Bool[Array, "#B 1 T T"]:
        """Return the window as booleans."""
        window = Mask(self.add_window(MaskPattern()), positions=inputs.positions)
        length = heads.q.shape[1]
        return dense_mask(window, length, length)[:, None]


def sliding_window_visible_keys(config: SlidingWindowConfig, length: int) -> MeanVisibleKeys:
    """Average over keys less than W steps away."""
    reach = config.receptive_field - 1
    return symmetric_visible_keys(np.minimum(np.arange(length), reach) // config.dilation)
