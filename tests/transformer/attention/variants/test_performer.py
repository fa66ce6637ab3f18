"""Performer: random features of queries and keys in place of softmax."""

from typing import Any

import numpy as np
import pytest

from tests.transformer.feature_maps import dense_attention, positive, relu
from tests.transformer.formulas import array, assert_close, normal
from tests.transformer.mixers import apply_mixer, make_mixer
from transformer import Hardware, Mask, MaskPattern, PerformerConfig
from transformer.attention.variants.performer import Performer
from transformer.testing.contract import ABILITY_CHECKS
from transformer.testing.mixer_under_test import make_trial

B, T, D, N, K, H, M = 2, 11, 6, 4, 2, 3, 7
CONFIG = PerformerConfig(num_heads=N, num_kv_heads=K, head_dim=H, num_features=M, seed=5)
CAUSAL = Mask(MaskPattern(causal=True))


@pytest.mark.parametrize("kind", ["positive", "relu"])
def test_matches_formula(kind: Any) -> None:
    """Four query heads on two key-value heads: itself, and a memory that is read once."""
    config = PerformerConfig(
        num_heads=N, num_kv_heads=K, head_dim=H, num_features=M, feature_map=kind, seed=5
    )
    mixer, w = make_mixer(config, D)
    x, directions = normal(0, B, T, D), Performer.constants(config, 2, D)
    memory, phi = normal(1, B, T + 2, D), positive if kind == "positive" else relu

    def expected(source: Any, visible: Any) -> Any:
        q, k, v = (
            np.einsum("BTD,DNH->BTNH", np.float64(of), w[name]) + w[f"{name}_bias"][None, None]
            for name, of in (("query", x), ("key", source), ("value", source))
        )
        y = dense_attention(phi(q, directions), phi(k, directions), v, visible)
        return np.einsum("BTNH,NHD->BTD", y, w["output"]) + w["output_bias"]

    y = apply_mixer(mixer, w, x, mask=CAUSAL, constants=directions).y
    assert_close(y, expected(x, np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))))
    of_memory = expected(memory, np.ones((B, T, T + 2), bool))
    cache = mixer.init_memory_cache(B, T + 2)
    for tokens, source in ((slice(4), memory), (slice(4, None), None)):
        given: Any = dict(memory=source, cache=cache, constants=directions)
        y, cache, _ = apply_mixer(mixer, w, x[:, tokens], **given)
        assert_close(y, of_memory[:, tokens])


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


@pytest.mark.full
@pytest.mark.parametrize("kind", ["trigonometric", "relu"])
def test_contract_with_other_features(kind: Any) -> None:
    config = PerformerConfig(num_heads=2, num_kv_heads=1, num_features=10, feature_map=kind)
    trial = make_trial(config, 6, 17, (1, 17), Hardware())
    for ability in ("causal", "cached"):
        ABILITY_CHECKS[ability](trial)


def test_flops() -> None:
    def scores(**options: Any) -> Any:
        return Performer.score_flops(PerformerConfig(num_heads=N, **options), N * H, 1000)

    assert scores(num_features=10) == (2 * 2 * N * (10 * H + 10 * (H + 1)),) * 2
    half = scores(num_features=10, feature_map="trigonometric")
    assert half == (2 * 2 * N * (5 * H + 10 * (H + 1)),) * 2
