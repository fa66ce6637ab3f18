"""LongRoPE against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer import (
    AttentionConfig,
    BlockConfig,
    LanguageModel,
    LongRoPEScaling,
    RoPE,
    generate,
)
from transformer.attention.rope import rope_angles
from transformer.config import TransformerConfig

SHORT, LONG, TRAINED = (1.0, 1.5, 2.0), (2.0, 5.0, 7.0), 8


def expected_angles(length: int, factors: tuple[float, ...]) -> np.ndarray:
    frequencies = 100.0 ** (-np.arange(0, 6, 2) / 6) / np.array(factors)
    return np.arange(length)[:, None] * frequencies


@pytest.mark.parametrize(("length", "factors"), [(TRAINED, SHORT), (TRAINED + 1, LONG)])
def test_row_length_selects_the_factors(length: int, factors: tuple[float, ...]) -> None:
    rope = RoPE(theta=100.0, scaling=LongRoPEScaling(SHORT, LONG, TRAINED))
    angles = rope_angles(jnp.arange(length)[None], 6, rope)[0]
    expected = expected_angles(length, factors)
    np.testing.assert_allclose(np.cos(angles), np.cos(expected), atol=1e-5)
    np.testing.assert_allclose(np.sin(angles), np.sin(expected), atol=1e-5)


def test_rows_are_independent() -> None:
    rope = RoPE(theta=100.0, scaling=LongRoPEScaling(SHORT, LONG, TRAINED))
    rows = jnp.stack([jnp.arange(5), jnp.arange(20, 25)])
    both = rope_angles(rows, 6, rope)
    np.testing.assert_array_equal(both[:1], rope_angles(rows[:1], 6, rope))
    np.testing.assert_array_equal(both[1:], rope_angles(rows[1:], 6, rope))
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
    params = short.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    found = generate(short, params, [[1, 2, 3]], max_new_tokens=TRAINED - 3)
    assert len(found.tokens[0]) == TRAINED - 3
    assert model("long").init_cache(1, TRAINED + 1)
    with pytest.raises(ValueError, match="a cache of 9 tokens: LongRoPE changes its factors"):
        model("by_length").init_cache(1, TRAINED + 1)


def test_invalid_factors_raise() -> None:
    with pytest.raises(ValueError, match="has 3 factors and a head 2 rotated pairs"):
        LongRoPEScaling(SHORT, LONG).frequencies(100.0, 4)
    with pytest.raises(ValueError, match="is not positive; give numbers above 0"):
        LongRoPEScaling((1.0, 0.0), (1.0, 1.0))
