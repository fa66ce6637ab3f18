"""RoPE scaling for longer contexts, against Hugging Face; LongRoPE against its formula."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.fixtures.positions import ROTARY
from tests.transformer.formulas import Array, array, assert_close, normal, random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    LanguageModel,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NoScaling,
    NTKScaling,
    RoPE,
    TransformerConfig,
    YaRNScaling,
    generate,
)
from transformer.attention.rope import RopeScaling
from transformer.attention.rope import apply_rope as rotate_eagerly
from transformer.attention.rope import rope_angles as angles_eagerly

rotate = jax.jit(rotate_eagerly, static_argnums=2)
angles_of = jax.jit(angles_eagerly, static_argnums=(1, 2))

FIXTURES = Path(__file__).parents[2] / "fixtures" / "positions.npz"

SCALINGS: dict[str, RopeScaling] = {
    "plain": NoScaling(),
    "linear": LinearScaling(3.0),
    "ntk": NTKScaling(5.0),
    "yarn": YaRNScaling(4.0, 4096),
    "yarn of other bounds": YaRNScaling(
        7.0, 64, beta_fast=5.0, beta_slow=2.0, attention_factor=1.25
    ),
    "llama3": Llama3Scaling(8.0, 1.0, 4.0, 8192),
    "llama3 of other bounds": Llama3Scaling(3.0, 2.0, 11.0, 512),
}


def frequencies(config: RopeScaling, base: float, width: int) -> Array:  # [R / 2]
    return np.asarray(jax.jit(config.frequencies, static_argnums=(0, 1))(base, width))


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_match_hugging_face(name: str) -> None:
    config, case = SCALINGS[name], ROTARY[name]
    fixtures = np.load(FIXTURES)
    actual = frequencies(config, case.base, case.width)
    assert_close(actual / fixtures[f"rotary/{name}"], np.ones(case.width // 2))
    assert config.amplitude == pytest.approx(float(fixtures[f"factor/{name}"]))


def test_yarn_attention_factor() -> None:
    """Queries and keys are each multiplied by sqrt(1/t) = 0.1 ln(s) + 1."""
    assert YaRNScaling(1.0).amplitude == 1
    assert YaRNScaling(16.0).amplitude == pytest.approx(0.1 * math.log(16) + 1)
    x = normal(0, 2, 5, 3, 14)
    y = rotate(x, array([[0, 1, 2, 3, 4]]), RoPE(scaling=YaRNScaling(16.0)))
    assert_close(np.linalg.norm(y, axis=-1), (0.1 * math.log(16) + 1) * np.linalg.norm(x, axis=-1))


def test_ntk_requires_two_pairs() -> None:
    with pytest.raises(ValueError, match=r"^rope.scaling NTKScaling: needs 4 rotated entries"):
        NTKScaling(2.0).frequencies(10_000.0, 2)


SHORT, LONG, TRAINED = (1.0, 1.5, 2.0), (2.0, 5.0, 7.0), 8


def expected_angles(length: int, factors: tuple[float, ...]) -> np.ndarray:
    frequencies = 100.0 ** (-np.arange(0, 6, 2) / 6) / np.array(factors)
    return np.arange(length)[:, None] * frequencies


@pytest.mark.parametrize(("length", "factors"), [(TRAINED, SHORT), (TRAINED + 1, LONG)])
def test_row_length_selects_the_factors(length: int, factors: tuple[float, ...]) -> None:
    rope = RoPE(theta=100.0, scaling=LongRoPEScaling(SHORT, LONG, TRAINED))
    angles = np.asarray(angles_of(np.arange(length)[None], 6, rope))[0]
    expected = expected_angles(length, factors)
    np.testing.assert_allclose(np.cos(angles), np.cos(expected), atol=1e-5)
    np.testing.assert_allclose(np.sin(angles), np.sin(expected), atol=1e-5)


def test_rows_are_independent() -> None:
    rope = RoPE(theta=100.0, scaling=LongRoPEScaling(SHORT, LONG, TRAINED))
    rows = np.stack([np.arange(5), np.arange(20, 25)])
    both = np.asarray(angles_of(rows, 6, rope))
    for row in range(2):
        alone = angles_of(rows[row : row + 1], 6, rope)
        np.testing.assert_array_equal(both[row : row + 1], alone)
    np.testing.assert_allclose(np.cos(both[1]), np.cos(expected_angles(25, LONG)[20:]), atol=1e-5)


def test_cache_beyond_the_short_factors_raises() -> None:
    def model(factors: str) -> LanguageModel:
        scaling = LongRoPEScaling(SHORT, LONG, TRAINED, factors=factors)  # type: ignore[arg-type]
        mixer = AttentionConfig(num_heads=2, head_dim=6, position=RoPE(scaling=scaling))
        return LanguageModel(
            TransformerConfig(
                vocab_size=11, d_model=12, num_layers=1, layer_pattern=(BlockConfig(mixer=mixer),)
            )
        )

    short = model("by_length")
    assert short.init_cache(1, TRAINED)
    # A cache is longer than it need be, but not longer than the factors allow.
    params = random_params_like(jax.eval_shape(short.init_params, jax.random.key(0)))
    found = generate(short, params, [[1, 2, 3]], max_new_tokens=TRAINED - 3)
    assert len(found.tokens[0]) == TRAINED - 3
    with pytest.raises(ValueError, match=r"^prompt 0: 3 tokens leave no room for 6 more among the"):
        generate(short, params, [[1, 2, 3]], max_new_tokens=TRAINED - 2)
    assert model("long").init_cache(1, TRAINED + 1)
    with pytest.raises(ValueError, match=r"a cache of 9 tokens: the model.s positions reach 8"):
        model("by_length").init_cache(1, TRAINED + 1)


def test_invalid_factors_raise() -> None:
    with pytest.raises(ValueError, match="has 3 factors and a head 2 rotated pairs"):
        LongRoPEScaling(SHORT, LONG).frequencies(100.0, 4)
    with pytest.raises(ValueError, match="is not positive; give numbers above 0"):
        LongRoPEScaling((1.0, 0.0), (1.0, 1.0))
