"""Known facts about attention and positions, as small experiments."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, normal, random_params_like
from tests.transformer.mixers import apply_mixer, make_mixer
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LanguageModel,
    SinusoidalPositions,
    TransformerConfig,
)
from transformer.layers.position_embedding import sinusoidal_embedding


def test_products_of_unit_entries_have_variance_d_k() -> None:
    """So scores are divided by sqrt(d_k) (Vaswani et al. 2017, footnote 4)."""
    for d_k in (4, 64):
        q, k = normal(0, 20_000, d_k), normal(1, 20_000, d_k)
        scores = (q * k).sum(-1)
        assert scores.var() == pytest.approx(d_k, rel=0.05)
        assert (scores / math.sqrt(d_k)).var() == pytest.approx(1, rel=0.05)


def sinusoids(count: int, width: int) -> Array:  # [count, D]
    return np.asarray(
        jax.jit(sinusoidal_embedding, static_argnums=1)(array([np.arange(count)]), width)[0]
    )


@pytest.mark.parametrize("k", [1, 7])
def test_sinusoid_at_t_plus_k_is_a_linear_map_of_sinusoid_at_t(k: int) -> None:
    """The map rotates each pair (sin, cos), and is the same for every t."""
    p, width = sinusoids(60, 10), 10
    turn = np.zeros((width, width))
    for i in range(0, width, 2):
        angle = k / 10_000 ** (i / width)
        cos, sin = math.cos(angle), math.sin(angle)
        turn[i : i + 2, i : i + 2] = [[cos, sin], [-sin, cos]]
    assert_close(p[:-k] @ turn.T, p[k:])


def test_products_of_sinusoids_encode_distance_not_direction() -> None:
    """p_t . p_{t+k} = p_t . p_{t-k}, the same for every t; its envelope falls with k."""
    p = sinusoids(1200, 128)
    products = p @ p.T
    t, k = 600, np.arange(600)
    assert_close(products[t, t + k], products[t, t - k])
    assert_close(products[t, t + k], products[0, k])
    ranges = ((0, 1), (1, 8), (8, 64), (64, 512))
    envelope = [products[0, start:end].max() for start, end in ranges]
    assert envelope == sorted(envelope, reverse=True)
    assert envelope[-1] < 0.6 * envelope[0]


def hidden(config: TransformerConfig, tokens: Any) -> Array:  # [B, T, D]
    """Return the hidden states of an encoder: every token sees all."""
    model = LanguageModel(dataclasses.replace(config, causal=False))
    params = random_params_like(jax.eval_shape(model.init, jax.random.key(0), tokens)["params"])
    return np.asarray(jax.jit(model.apply)({"params": params}, tokens).hidden)


BLOCK = BlockConfig(mixer=AttentionConfig(num_heads=2), feed_forward=FeedForwardConfig(d_ff=13))
WITHOUT_POSITIONS = TransformerConfig(
    vocab_size=11, d_model=8, num_layers=2, layer_pattern=(BLOCK,), pad_vocab_to_multiple=1
)
WITH_POSITIONS = dataclasses.replace(WITHOUT_POSITIONS, position_embedding=SinusoidalPositions())


def test_identical_tokens_have_identical_vectors_without_positions() -> None:
    tokens = array([[3, 5, 3, 7, 3]])
    blind, sighted = hidden(WITHOUT_POSITIONS, tokens)[0], hidden(WITH_POSITIONS, tokens)[0]
    assert_close(blind[[2, 4]], blind[[0, 0]])
    assert np.abs(sighted[2] - sighted[0]).max() > 1e-2
    assert np.abs(blind[1] - blind[0]).max() > 1e-2


def test_attention_without_positions_is_permutation_equivariant() -> None:
    """Permuting the tokens permutes the vectors."""
    tokens, order = array([[3, 5, 2, 7, 9]]), [4, 2, 0, 1, 3]
    assert_close(
        hidden(WITHOUT_POSITIONS, tokens[:, order]), hidden(WITHOUT_POSITIONS, tokens)[:, order]
    )
    moved = hidden(WITH_POSITIONS, tokens[:, order]) - hidden(WITH_POSITIONS, tokens)[:, order]
    assert np.abs(moved).max() > 1e-2


def test_multi_head_is_a_sum_of_single_heads() -> None:
    """MultiHead = Concat(head_i) W^O is a sum over heads, each with its own rows of W^O."""
    mixer, params = make_mixer(AttentionConfig(num_heads=3, bias=False), 12)
    x = normal(1, 2, 5, 12)
    one, _ = make_mixer(AttentionConfig(num_heads=1, head_dim=4, bias=False), 12)
    total = np.zeros(x.shape)
    for head in range(3):
        own = {name: params[name][:, head : head + 1] for name in ("query", "key", "value")}
        own["output"] = params["output"][head : head + 1]
        total += apply_mixer(one, own, x).y
    assert_close(apply_mixer(mixer, params, x).y, total)
