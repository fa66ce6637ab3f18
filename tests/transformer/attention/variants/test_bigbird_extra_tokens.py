"""BigBird with extra global tokens before the input: ETC (Zaheer et al. 2020, section 2).

The expected pattern is built here from the paper: extra tokens see everything and are visible to
all. A
block of the input sees its window of the input, and the random blocks of its head.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.mixers import make_mixer
from transformer import BigBirdConfig, Mask
from transformer.attention.mixer import MixerInputs
from transformer.attention.variants.bigbird import BigBird
from transformer.testing.mixer_under_test import reference_softmax_attention

B, D, N, BLOCK, T = 2, 6, 3, 4, 43
BLOCKS = -(-T // BLOCK)  # of the input


def config(extra: int) -> BigBirdConfig:
    """Return a config with `extra` blocks of extra tokens; no token of the input is global."""
    return BigBirdConfig(
        num_heads=N,
        head_dim=5,
        block_size=BLOCK,
        num_global_blocks=extra,
        last_block_is_global=False,
        num_random_blocks=2,
        random_block_span=extra * BLOCK + T,
    )


def random_blocks(extra: int, layer: int) -> Any:  # [N, R, r], with rows for extra blocks
    return BigBird.constants(config(extra), layer, D)


def pattern(table: Array, extra: int, is_token: Array) -> Array:  # [B, N, extra and T, extra and T]
    """Return the visible pairs: query i of the input sees its own block, its neighbors, and its
    random blocks.
    """
    rows, num_extra = table.shape[1] - extra, extra * BLOCK
    visible = np.zeros((B, N, num_extra + T, num_extra + T), bool)
    visible[:, :, :num_extra] = visible[..., :num_extra] = True
    assert rows == BLOCKS
    for n, i, j in np.ndindex(N, T, T):
        own, other = i // BLOCK, j // BLOCK
        in_window = abs(own - other) <= 1
        visible[:, n, num_extra + i, num_extra + j] = (
            in_window or other + extra in table[n, own + extra]
        )
    all_tokens = np.concatenate([np.ones((B, num_extra), bool), is_token], axis=1)
    return visible & all_tokens[:, None, None]


def dense_attention(w: Any, x: Array, seen: Array) -> Array:  # [B, T, D] -> [B, T, D]
    q, k, v = (
        np.einsum("BTD,DNH->BTNH", x, w[name]) + w[f"{name}_bias"]
        for name in ("query", "key", "value")
    )
    y = reference_softmax_attention(q, k, v, seen)
    return np.asarray(np.einsum("BTNH,NHD->BTD", y, w["output"]) + w["output_bias"])


@pytest.mark.sampled("1")
@pytest.mark.parametrize("extra", [1, 2])
def test_matches_dense_attention_with_extra_tokens(extra: int) -> None:
    """One and two blocks of learned tokens, before inputs of two lengths."""
    layer = 3
    table = random_blocks(extra, layer)
    mixer, w = make_mixer(config(extra), D, constants=table)
    learned, x = normal(0, extra * BLOCK, D), normal(1, B, T, D)
    lengths = array([T, 30])
    is_token = np.arange(T)[None] < lengths[:, None]

    @jax.jit
    def run(learned: Any, x: Any) -> Any:
        extra_tokens = jnp.broadcast_to(learned[None], (B, *learned.shape))
        extended = jnp.concatenate([extra_tokens, x], axis=1)
        kwargs: Any = dict(
            positions=jnp.arange(extended.shape[1])[None],
            mask=Mask(key_lengths=extra * BLOCK + lengths),
            constants=table,
        )
        output: Any = mixer.apply({"params": w}, extended, MixerInputs(**kwargs))
        return output.y[:, len(learned) :]

    y = run(learned, x)
    visible = pattern(table, extra, is_token)
    extended_input = np.concatenate([np.broadcast_to(learned, (B, *learned.shape)), x], axis=1)
    expected = dense_attention(w, extended_input.astype(np.float64), visible)[:, extra * BLOCK :]
    assert_close(np.where(is_token[..., None], y, 0), np.where(is_token[..., None], expected, 0))
    # The learned tokens affect every token of the input, and get gradients from each.
    assert np.any(run(learned + 1, x) != y, axis=-1)[is_token].all()
    jacobian = jax.jit(jax.jacrev(lambda learned: run(learned, x).sum(-1)))(learned)
    assert np.any(jacobian, axis=-1)[is_token].all()


@pytest.mark.full
def test_extra_tokens_connect_distant_tokens() -> None:
    """A change outside a token's pattern reaches it in the second layer, through extra tokens."""
    table = random_blocks(1, 0)
    mixer, w = make_mixer(config(1), D, constants=table)
    x = normal(1, 1, BLOCK + T, D)
    kwargs: Any = dict(positions=np.arange(BLOCK + T)[None], mask=Mask(), constants=table)

    @jax.jit
    def two_layers(x: Any) -> Any:
        first: Any = mixer.apply({"params": w}, x, MixerInputs(**kwargs))
        second: Any = mixer.apply({"params": w}, first.y, MixerInputs(**kwargs))
        return first.y, second.y

    visible = pattern(table, 1, np.ones((B, T), bool))[0]
    row = BLOCK + 1
    far = np.flatnonzero(~visible.any(0)[row])[-1]
    changed = x.copy()
    changed[:, far] += 1
    (first, second), (changed_first, changed_second) = two_layers(x), two_layers(changed)
    assert np.any(first[0, :BLOCK] != changed_first[0, :BLOCK], axis=-1).all()
    assert np.array_equal(first[0, row], changed_first[0, row])
    assert np.any(second[0, row] != changed_second[0, row])


def test_random_blocks_exclude_extra_blocks_and_the_window() -> None:
    """It sees those anyway: each draw is one of the input's, and of those beyond the window."""
    for extra in (1, 2):
        table = random_blocks(extra, 0)[:, extra:]
        own = extra + np.arange(BLOCKS)[None, :, None]
        assert (table >= extra).all()
        assert (np.abs(table - own) > 1).all()
