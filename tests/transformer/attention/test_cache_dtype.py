"""`Precision.cache` narrower than the compute dtype, for every mixer that decodes, through whole
models.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import Array, random_params_like
from transformer import (
    MIXERS,
    AttentionConfig,
    BigBirdConfig,
    BlockConfig,
    EncoderConfig,
    EncoderDecoder,
    FeedForwardConfig,
    LanguageModel,
    LinearAttentionConfig,
    LongformerConfig,
    MixerConfig,
    PerformerConfig,
    Precision,
    PrimerConfig,
    RoPE,
    RoutingAttentionConfig,
    SlidingWindowConfig,
    SparseTransformerConfig,
    TopKConfig,
    TransformerConfig,
)
from transformer.baselines.baseline_configs import (
    BahdanauConfig,
    ChengConfig,
    ConvolutionConfig,
    ElmanConfig,
    GNMTDecoderConfig,
    IdentityConfig,
    LSTMConfig,
    LuongConfig,
    Seq2SeqConfig,
)
from transformer.mixer_registry import BUILTIN_MIXERS

B, T, S, V, D = 2, 11, 7, 13, 12
PREFILL = 8
HEADS: Any = dict(num_heads=3, position=RoPE())

TOLERANCE = 0.02
"""Largest error of the logits, relative to max(1, largest logit): five times the unit roundoff of
bfloat16, 2^-8. Each stored number is rounded once; a larger error would mean that errors add up
from token to token."""

TOKENS: dict[str, MixerConfig] = {
    "full": AttentionConfig(**HEADS),
    "bigbird": BigBirdConfig(**HEADS, block_size=2, num_random_blocks=1, random_block_span=16),
    "longformer": LongformerConfig(**HEADS, one_sided_window=3, num_global_tokens=2),
    "primer": PrimerConfig(**HEADS),
    "routing": RoutingAttentionConfig(**HEADS, num_clusters=2, window=4),
    "sliding_window": SlidingWindowConfig(**HEADS, window=4),
    "sparse": SparseTransformerConfig(**HEADS, stride=3),
    "top_k": TopKConfig(**HEADS, keys_per_query=4),
    "convolution": ConvolutionConfig(),
    "cheng": ChengConfig(),
    "bahdanau": BahdanauConfig(),
    "luong": LuongConfig(),
    "gnmt_decoder": GNMTDecoderConfig(num_layers=2),
}
"""Mixers whose caches hold tokens or an encoder memory."""

STATES: dict[str, MixerConfig] = {
    "linear": LinearAttentionConfig(**HEADS),
    "performer": PerformerConfig(**HEADS, num_features=16),
    "identity": IdentityConfig(),
    "elman": ElmanConfig(),
    "lstm": LSTMConfig(),
    "seq2seq": Seq2SeqConfig(),
}
"""Mixers whose caches are recurrent states only."""

STATE_FIELDS = {"state", "cells", "summary", "upper_layers"}
"""Fields of token caches that hold recurrent states."""


def test_every_mixer_with_a_cache_is_listed() -> None:
    cached = {kind for kind in BUILTIN_MIXERS if MIXERS[kind].abilities(_config(kind)).cached}
    assert cached == {*TOKENS, *STATES}


def _config(kind: str) -> MixerConfig:
    return MIXERS.config_class(kind)()


BLOCKS = {name: BlockConfig(mixer=mixer) for name, mixer in (TOKENS | STATES).items()} | {
    "cross_full": BlockConfig(IdentityConfig(), cross_attention=AttentionConfig(3)),
    "cross_top_k": BlockConfig(IdentityConfig(), cross_attention=TopKConfig(3, keys_per_query=4)),
    "cross_linear": BlockConfig(IdentityConfig(), cross_attention=LinearAttentionConfig(3)),
    "feed_forward": BlockConfig(AttentionConfig(3), feed_forward=FeedForwardConfig(17)),
}
ONLY_STATES = {*STATES, "cross_linear"}


random = np.random.default_rng(0)
SOURCE, TARGET = random.integers(0, V, (B, S)), random.integers(0, V, (B, T))


@functools.cache
def weights(name: str) -> Any:
    model, source = make_model(name, "compute")
    return random_params_like(jax.eval_shape(model.init, jax.random.key(0), *source, TARGET))


def make_model(name: str, cache_dtype: Any) -> tuple[Any, tuple[Array, ...]]:
    """Return a one-layer model, and its source tokens if it has an encoder."""
    block, encoder = BLOCKS[name], None
    if block.needs_memory:
        encoder = EncoderConfig(num_layers=1, layer_pattern=(BlockConfig(AttentionConfig(3)),))
    config = TransformerConfig(
        vocab_size=V,
        d_model=D,
        num_layers=1,
        layer_pattern=(block,),
        encoder=encoder,
        precision=Precision(cache=cache_dtype),
    )
    return (LanguageModel(config), ()) if encoder is None else (EncoderDecoder(config), (SOURCE,))


class Decoder:
    """Full pass and cached decoding of one model, with one storage dtype of caches."""

    def __init__(self, name: str, cache_dtype: Any) -> None:
        self.model, self.source = make_model(name, cache_dtype)
        self.run = jax.jit(self.model.apply)
        self.params = weights(name)

    def empty_cache(self) -> Any:
        return self.model.init_cache(B, T, *([S] if self.source else []))

    def full_pass_arguments(self) -> tuple[Any, ...]:
        """Return the arguments of a full pass."""
        return self.params, *self.source, TARGET

    def cached_arguments(self, start: int, end: int) -> tuple[Any, ...]:
        """Return the arguments of a call with a cache; only the first call has the source."""
        source = (None,) * len(self.source) if start else self.source
        return self.params, *source, TARGET[:, start:end]

    def decode(self) -> tuple[Array, Any]:
        """Return the logits of a prefill and of single tokens after it, and the cache."""
        cache, logits = self.empty_cache(), []
        for start, end in ((0, PREFILL), *((t, t + 1) for t in range(PREFILL, T))):
            arguments = self.cached_arguments(start, end)
            out = self.run(*arguments, cache=cache, positions=positions(start, end))
            cache = out.cache
            logits.append(np.asarray(out.logits)[..., :V])
        return np.concatenate(logits, axis=1), cache


def positions(start: int, end: int) -> Array:
    return np.arange(start, end)[None].repeat(B, 0)


WITH_TOKENS = [name for name in BLOCKS if name not in ONLY_STATES]


@pytest.mark.parametrize("name", BLOCKS)
def test_tokens_are_stored_narrow_and_states_are_not(name: str) -> None:
    """States rounded at each token would accumulate errors."""
    narrow, default = (Decoder(name, each).empty_cache() for each in ("bfloat16", "compute"))
    for path, leaf in jax.tree_util.tree_leaves_with_path(narrow):
        is_state = any(getattr(key, "name", "") in STATE_FIELDS for key in path)
        wide = is_state or name in ONLY_STATES
        assert leaf.dtype in ("int32", "float32" if wide else "bfloat16"), path
    assert {leaf.dtype for leaf in jax.tree.leaves(default)} <= {
        np.dtype("int32"),
        np.dtype("float32"),
    }


@pytest.mark.sampled("convolution", "primer")
@pytest.mark.parametrize("name", WITH_TOKENS)
def test_narrow_cache_has_small_error(name: str) -> None:
    narrow = Decoder(name, "bfloat16")
    layout = jax.tree_util.tree_leaves_with_path(narrow.empty_cache())
    full = np.asarray(narrow.run(*narrow.full_pass_arguments()).logits)[..., :V]
    decoded, cache = narrow.decode()
    error = np.abs(decoded - full).max() / max(1, np.abs(full).max())
    assert 1e-5 < error < TOLERANCE
    for (path, before), after in zip(layout, jax.tree.leaves(cache), strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype), path
