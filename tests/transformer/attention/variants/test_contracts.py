"""The mixer contract with settings other than the defaults, and calls that mixers refuse."""

from typing import Any, get_type_hints

import jax
import numpy as np
import pytest

from tests.transformer.mixers import inputs, make_context
from transformer import (
    AdditiveScore,
    ALiBi,
    AttentionConfig,
    BigBirdConfig,
    BilinearScore,
    DotScore,
    GatedDeltaConfig,
    LatentAttentionConfig,
    LongformerConfig,
    Mamba2Config,
    Mask,
    MaskPattern,
    Mixer,
    MixerConfig,
    NormConfig,
    ReformerConfig,
    RelativePositions,
    RoPE,
    RoutingAttentionConfig,
    SlidingWindowConfig,
    SparseTransformerConfig,
    T5RelativeBias,
    TopKConfig,
    YaRNScaling,
)
from transformer.attention.variants.bigbird import BigBird
from transformer.attention.variants.gated_delta import GatedDelta
from transformer.attention.variants.linear_attention import LinearAttention
from transformer.attention.variants.linformer import Linformer
from transformer.attention.variants.longformer import Longformer
from transformer.attention.variants.mamba2 import Mamba2
from transformer.attention.variants.performer import Performer
from transformer.attention.variants.primer import Primer
from transformer.attention.variants.reformer import Reformer
from transformer.attention.variants.routing_attention import RoutingAttention
from transformer.attention.variants.sliding_window import SlidingWindowAttention
from transformer.attention.variants.sparse_transformer import SparseTransformer
from transformer.baselines.cheng import Cheng
from transformer.baselines.convolution import Convolution
from transformer.baselines.gnmt import GNMTEncoder
from transformer.baselines.recurrent import LSTM, ElmanRNN
from transformer.testing.contract import check_mixer

FULL: list[MixerConfig] = [
    AttentionConfig(
        num_heads=2,
        position=RoPE(layout="interleaved", scaling=YaRNScaling(2.0, 16)),
        qk_norm=NormConfig("rms"),
        qk_norm_heads="separate",
    ),
    AttentionConfig(
        num_heads=4, num_kv_heads=2, position=RelativePositions(3), score=BilinearScore()
    ),
    AttentionConfig(
        num_heads=4,
        num_kv_heads=2,
        head_dim=3,
        value_head_dim=5,
        position=T5RelativeBias(8, 20),
        score=AdditiveScore(7),
    ),
    LatentAttentionConfig(
        num_heads=3,
        kv_rank=10,
        query_rank=7,
        nope_head_dim=5,
        value_head_dim=9,
        bias=True,
        position=RoPE(layout="interleaved", scaling=YaRNScaling(2.0, 16, mscale_all_dim=0.5)),
        dropout=0.1,
    ),
    AttentionConfig(num_heads=4, num_kv_heads=2, value_head_dim=5, output_gate=True),
    AttentionConfig(num_heads=6, position=ALiBi(), score=DotScore(), qk_norm=NormConfig("layer")),
]
SPARSE: list[MixerConfig] = [
    BigBirdConfig(
        num_heads=4, num_kv_heads=2, block_size=4, num_random_blocks=2, random_block_span=44
    ),
    LongformerConfig(num_heads=4, one_sided_window=3, dilations=(1, 3, 1, 3), position=RoPE()),
    RoutingAttentionConfig(num_heads=2, head_dim=5, num_clusters=3, window=4, position=RoPE()),
    SlidingWindowConfig(num_heads=2, window=7, backend="blockwise", position=RoPE()),
    SlidingWindowConfig(num_heads=4, num_kv_heads=2, window=5, dilation=3, dropout=0.1, bias=False),
    SlidingWindowConfig(num_heads=2, window=1, qk_norm=NormConfig("rms")),
    SparseTransformerConfig(
        num_heads=4, num_kv_heads=2, position=RoPE(), pattern="strided", stride=5
    ),
    SparseTransformerConfig(
        num_heads=4,
        num_kv_heads=2,
        position=RoPE(),
        pattern="fixed",
        stride=7,
        num_summary_tokens=3,
        factorization="heads",
    ),
    TopKConfig(num_heads=5, num_kv_heads=1, head_dim=8, keys_per_query=3),
    GatedDeltaConfig(num_heads=4, num_key_heads=2, head_dim=3, value_head_dim=5, kernel_size=2),
    Mamba2Config(num_heads=4, num_groups=2, state_dim=5, conv_bias=False, bias=True),
]


@pytest.mark.full
@pytest.mark.parametrize("config", FULL)
def test_contract(config: MixerConfig) -> None:
    check_mixer(config, d_model=12, length=17, lengths=(1, 17, 23))


@pytest.mark.full
@pytest.mark.parametrize("config", SPARSE)
def test_contract_with_several_blocks(config: MixerConfig) -> None:
    check_mixer(config, d_model=12, length=67, lengths=(1, 67, 71))


@pytest.mark.full
def test_contract_with_balanced_clusters() -> None:
    config = RoutingAttentionConfig(
        num_heads=2, head_dim=5, num_clusters=3, window=11, balanced=True
    )
    check_mixer(config, d_model=7, length=31, lengths=(1, 31))


@pytest.mark.nightly
def test_contract_with_many_tokens_per_bucket() -> None:
    config = ReformerConfig(num_heads=3, head_dim=4, num_buckets=2, num_hashes=2, window=5)
    check_mixer(config, d_model=7, length=71, lengths=(1, 71))


B, T, D = 2, 16, 16

ONE_PATTERN = [
    BigBird,
    LinearAttention,
    Linformer,
    Longformer,
    Performer,
    Reformer,
    RoutingAttention,
    SlidingWindowAttention,
    SparseTransformer,
    Cheng,
    Convolution,
    GatedDelta,
    GNMTEncoder,
    ElmanRNN,
    LSTM,
    Mamba2,
]
"""Mixers with a pattern of their own, which takes no other."""

CACHED_IN_ORDER = [
    BigBird,
    LinearAttention,
    Longformer,
    Performer,
    Primer,
    RoutingAttention,
    SlidingWindowAttention,
    Convolution,
]
"""Mixers whose cache holds less than all tokens, in an order that needs a causal mask."""


def trace(mixer: Mixer, **given: Any) -> None:
    constants = mixer.constants(mixer.config, 0, D)
    x = np.zeros((B, T, D), np.float32)
    jax.eval_shape(mixer.init, jax.random.key(0), x, inputs(T, constants=constants, **given))


def make(mixer_class: Any) -> Mixer:
    mixer: Mixer = mixer_class(get_type_hints(mixer_class)["config"](), make_context(D))
    return mixer


@pytest.mark.parametrize("mixer_class", ONE_PATTERN)
def test_a_window_of_the_mask(mixer_class: Any) -> None:
    mixer = make(mixer_class)
    causal = mixer.abilities(mixer.config).causal
    trace(mixer, mask=Mask(MaskPattern(causal=causal)))
    with pytest.raises(ValueError, match=f"^mixer {mixer.config.kind}: .*window.*; "):
        trace(mixer, mask=Mask(MaskPattern(causal=causal, window=3)))


@pytest.mark.parametrize("mixer_class", CACHED_IN_ORDER)
def test_a_cache_without_a_causal_mask(mixer_class: Any) -> None:
    mixer = make(mixer_class)
    trace(mixer, mask=Mask(MaskPattern(causal=True)), cache=mixer.init_cache(B, T))
    with pytest.raises(ValueError, match=f"^mixer {mixer.config.kind}: .*causal mask"):
        trace(mixer, cache=mixer.init_cache(B, T))
