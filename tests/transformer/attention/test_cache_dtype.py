"""`Precision.cache` narrower than the compute dtype, for every mixer that decodes."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import random_params_like
from tests.transformer.mixers import BUILTIN_MIXERS
from transformer import (
    MIXERS,
    AttentionConfig,
    BigBirdConfig,
    BlockConfig,
    EncoderConfig,
    EncoderDecoder,
    FeedForwardConfig,
    GatedDeltaConfig,
    LanguageModel,
    LatentAttentionConfig,
    LinearAttentionConfig,
    LongformerConfig,
    Mamba2Config,
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
from transformer.baselines.bahdanau import BahdanauConfig
from transformer.baselines.cheng import ChengConfig
from transformer.baselines.convolution import ConvolutionConfig
from transformer.baselines.gnmt import GNMTDecoderConfig
from transformer.baselines.identity import IdentityConfig
from transformer.baselines.lstm_seq2seq import Seq2SeqConfig
from transformer.baselines.luong import LuongConfig
from transformer.baselines.recurrent import ElmanConfig, LSTMConfig
from transformer.testing.mixer_under_test import default_config

B, T, S, V, D = 2, 11, 7, 13, 12
PREFILL = 8
HEADS: Any = dict(num_heads=3, position=RoPE())

TOLERANCE = 0.02
"""Largest error of the logits, relative to max(1, largest logit): five times the unit roundoff of
bfloat16, 2^-8. Each stored number is rounded once; a larger error would mean that errors add up
from token to token."""

TOKENS: dict[str, MixerConfig] = {
    "full": AttentionConfig(**HEADS),
    "latent": LatentAttentionConfig(**HEADS),
    "bigbird": BigBirdConfig(**HEADS, block_size=2, num_random_blocks=1, random_block_span=16),
    "longformer": LongformerConfig(**HEADS, one_sided_window=3, num_global_tokens=2),
    "primer": PrimerConfig(**HEADS),
    "routing": RoutingAttentionConfig(**HEADS, num_clusters=2, window=4),
    "sliding_window": SlidingWindowConfig(**HEADS, window=4),
    "sparse": SparseTransformerConfig(**HEADS, stride=3),
    "top_k": TopKConfig(**HEADS, keys_per_query=4),
    "convolution": ConvolutionConfig(),
    "gated_delta": GatedDeltaConfig(num_heads=3),
    "mamba2": Mamba2Config(num_heads=3, state_dim=5),
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

STATE_FIELDS = {"state", "cells", "summary"}
"""Fields of token caches that hold recurrent states."""


def test_every_mixer_with_a_cache_is_listed() -> None:
    defaults = {kind: default_config(kind) for kind in BUILTIN_MIXERS}
    cached = {kind for kind, config in defaults.items() if MIXERS[kind].abilities(config).cached}
    assert cached == {*TOKENS, *STATES}


BLOCKS = {name: BlockConfig(mixer=mixer) for name, mixer in (TOKENS | STATES).items()} | {
    "cross_full": BlockConfig(IdentityConfig(), cross_attention=AttentionConfig(3)),
    "cross_top_k": BlockConfig(IdentityConfig(), cross_attention=TopKConfig(3, keys_per_query=4)),
    "cross_linear": BlockConfig(IdentityConfig(), cross_attention=LinearAttentionConfig(3)),
    "feed_forward": BlockConfig(AttentionConfig(3), feed_forward=FeedForwardConfig(17)),
}
ONLY_STATES = {*STATES, "cross_linear"}


random = np.random.default_rng(0)
SOURCE, TARGET = random.integers(0, V, (B, S)), random.integers(0, V, (B, T))


def make_model(name: str, cache_dtype: Any) -> tuple[Any, list[Any], Any]:
    """Return a one-layer model, its source tokens if it has an encoder, and an empty cache."""
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
    if encoder is None:
        return LanguageModel(config), [], LanguageModel(config).init_cache(B, T)
    return EncoderDecoder(config), [SOURCE], EncoderDecoder(config).init_cache(B, T, S)


@pytest.mark.parametrize("name", BLOCKS)
def test_tokens_are_stored_narrow_and_states_are_not(name: str) -> None:
    """States rounded at each token would accumulate errors."""
    narrow, default = (make_model(name, each)[2] for each in ("bfloat16", "compute"))
    for path, leaf in jax.tree_util.tree_leaves_with_path(narrow):
        is_state = any(getattr(key, "name", "") in STATE_FIELDS for key in path)
        wide = is_state or name in ONLY_STATES
        assert leaf.dtype in ("int32", "float32" if wide else "bfloat16"), path
    assert all(leaf.dtype in ("int32", "float32") for leaf in jax.tree.leaves(default))


@pytest.mark.sampled("convolution", "primer")
@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in ONLY_STATES])
def test_narrow_cache_has_small_error(name: str) -> None:
    model, source, cache = make_model(name, "bfloat16")
    layout = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(cache)]
    params = random_params_like(jax.eval_shape(model.init, jax.random.key(0), *source, TARGET))
    run = jax.jit(model.apply)
    full, decoded = np.asarray(run(params, *source, TARGET).logits)[..., :V], []
    for start, end in ((0, PREFILL), *((t, t + 1) for t in range(PREFILL, T))):
        positions = np.arange(start, end)[None].repeat(B, 0)
        out = run(params, *source, TARGET[:, start:end], cache=cache, positions=positions)
        cache, source = out.cache, [None] * len(source)  # only the first call has the source
        decoded.append(np.asarray(out.logits)[..., :V])
    error = np.abs(np.concatenate(decoded, axis=1) - full).max() / max(1, np.abs(full).max())
    assert 1e-5 < error < TOLERANCE
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(cache)] == layout
