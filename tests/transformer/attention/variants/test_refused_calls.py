"""Calls that a mixer would compute wrongly are refused while it is traced, each with one line."""

from typing import Any, get_type_hints

import jax
import numpy as np
import pytest

from tests.transformer.mixers import inputs, make_context
from transformer import Mask, MaskPattern, Mixer
from transformer.attention.variants.bigbird import BigBird
from transformer.attention.variants.linear_attention import LinearAttention
from transformer.attention.variants.linformer import Linformer
from transformer.attention.variants.longformer import Longformer
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
    GNMTEncoder,
    ElmanRNN,
    LSTM,
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
