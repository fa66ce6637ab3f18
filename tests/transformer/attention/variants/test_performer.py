"""Performer: random features of queries and keys in place of softmax."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax.core import meta

from tests.transformer.feature_maps import dense_attention, positive, relu
from tests.transformer.formulas import array, assert_close, normal, random_params_like
from tests.transformer.mixers import apply_mixer, make_mixer
from transformer import (
    BlockConfig,
    Hardware,
    IdentityConfig,
    Initialization,
    LanguageModel,
    Mask,
    MaskPattern,
    PerformerConfig,
    Precision,
    TransformerConfig,
)
from transformer.attention.mixer import MixerInputs
from transformer.attention.variants.performer import Performer
from transformer.flops import count_token_flops
from transformer.layers.cross_attention import Memory
from transformer.layers.stack import Stack
from transformer.layers.stack_weights import init_cache
from transformer.model_context import ModelContext
from transformer.testing.contract import ABILITY_CHECKS
from transformer.testing.mixer_under_test import make_trial

B, T, D, N, K, H, M = 2, 11, 6, 4, 2, 3, 7
CONFIG = PerformerConfig(num_heads=N, num_kv_heads=K, head_dim=H, num_features=M, seed=5)
CAUSAL = Mask(MaskPattern(causal=True))


@pytest.mark.parametrize("kind", ["positive", "relu"])
def test_matches_formula(kind: Any) -> None:
    """Four query heads on two key-value heads."""
    config = PerformerConfig(
        num_heads=N, num_kv_heads=K, head_dim=H, num_features=M, feature_map=kind, seed=5
    )
    mixer, w = make_mixer(config, D)
    x, directions = normal(0, B, T, D), Performer.constants(config, 2, D)
    y = apply_mixer(mixer, w, x, mask=CAUSAL, constants=directions).y
    q, k, v = (
        np.einsum("BTD,DNH->BTNH", np.float64(x), w[name]) + w[f"{name}_bias"][None, None]
        for name in ("query", "key", "value")
    )
    phi = positive if kind == "positive" else relu
    visible = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
    expected = dense_attention(phi(q, directions), phi(k, directions), v, visible)
    expected = np.einsum("BTNH,NHD->BTD", expected, w["output"]) + w["output_bias"]
    assert_close(y, expected)


def test_constants_depend_on_seed_layer_and_redraw() -> None:
    def drawn(layer: int = 0, **options: Any) -> Any:
        return Performer.constants(PerformerConfig(num_features=M, head_dim=H, **options), layer, D)

    assert drawn().shape == (M, H)
    assert np.array_equal(drawn(3, seed=1, redraw_index=2), drawn(3, seed=1, redraw_index=2))
    others = [drawn(1), drawn(seed=1), drawn(redraw_index=1)]
    assert not any(np.allclose(drawn(), other) for other in others)
    config = PerformerConfig(num_features=10, head_dim=H, feature_map="trigonometric")
    assert Performer.constants(config, 0, D).shape == (5, H)


def test_default_constants_are_those_of_layer_0() -> None:
    mixer, w = make_mixer(CONFIG, D)
    x, memory = normal(0, B, T, D), normal(1, B, T + 2, D)
    kwargs: Any = dict(memory=memory, mask=Mask(key_lengths=array([T + 2, 5])))
    first = Performer.constants(CONFIG, 0, D)
    y = apply_mixer(mixer, w, x, **kwargs).y
    assert_close(y, apply_mixer(mixer, w, x, constants=first, **kwargs).y)
    other = Performer.constants(CONFIG, 1, D)
    assert not np.allclose(y, apply_mixer(mixer, w, x, constants=other, **kwargs).y, atol=1e-3)


def test_cross_attention_uses_constants_of_its_layer() -> None:
    """Three layers of cross attention only, against the formula, with a memory and with a cached
    memory.
    """
    only = BlockConfig(
        mixer=IdentityConfig(), cross_attention=CONFIG, feed_forward=None, norm=None, residual=False
    )
    shared = ModelContext(D, 3, Precision(), Initialization(), Hardware())
    stack = Stack((only,), shared, "scan")
    x, memory = normal(0, B, T, D), normal(1, B, T + 2, D)
    positions: Any = np.arange(T)[None]
    encoder_memory = Memory(memory, Mask(MaskPattern(ordered=False)))
    mixer_inputs = MixerInputs(positions, CAUSAL)
    make = lambda x: stack.init(jax.random.key(0), x, mixer_inputs, encoder_memory)  # noqa: E731
    params = random_params_like(meta.unbox(jax.eval_shape(make, x))["params"])
    run = jax.jit(functools.partial(stack.apply, {"params": params}))
    result: Any = run(x, mixer_inputs, encoder_memory)
    expected: Any = np.float64(x)
    for layer in range(3):
        w = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["place_0"]["cross"])
        q, k, v = (
            np.einsum("BTD,DNH->BTNH", of, w[name]) + w[f"{name}_bias"]
            for name, of in (("query", expected), ("key", memory), ("value", memory))
        )
        directions = Performer.constants(CONFIG, layer, D)
        visible = np.ones((B, T, T + 2), bool)
        expected = dense_attention(positive(q, directions), positive(k, directions), v, visible)
        expected = np.einsum("BTNH,NHD->BTD", expected, w["output"]) + w["output_bias"]
    assert_close(result.x, expected)
    cache: Any = init_cache((only,), shared, B, T, T + 2)
    for tokens, source in ((slice(4), memory), (slice(4, None), None)):
        mixer_inputs = MixerInputs(positions[:, tokens], CAUSAL, cache=cache)
        result = run(x[:, tokens], mixer_inputs, encoder_memory._replace(x=source))
        cache = result.cache
        assert_close(result.x, expected[:, tokens])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["trigonometric", "relu"])
def test_contract_with_other_features(kind: Any) -> None:
    config = PerformerConfig(num_heads=2, num_kv_heads=1, num_features=10, feature_map=kind)
    trial = make_trial(config, 6, 17, (1, 17), Hardware())
    for ability in ("causal", "cached"):
        ABILITY_CHECKS[ability](trial)


def test_flops() -> None:
    def scores(**options: Any) -> int:
        block = BlockConfig(mixer=PerformerConfig(num_heads=N, **options), feed_forward=None)
        config = TransformerConfig(
            vocab_size=17, d_model=N * H, num_layers=1, layer_pattern=(block,)
        )
        flops = count_token_flops(LanguageModel(config), 1000)
        assert flops.scores == flops.scores_causal
        return flops.scores

    assert scores(num_features=10) == 2 * 2 * N * (10 * H + 10 * (H + 1))
    half = scores(num_features=10, feature_map="trigonometric")
    assert half == 2 * 2 * N * (5 * H + 10 * (H + 1))
