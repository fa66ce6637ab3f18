"""BigBird with extra global tokens before the input: ETC (Zaheer et al. 2020, section 2).

The pattern is worked out here, from the paper: extra tokens see everything and are seen by all. A
block of the input sees its window of the input, and blocks of the input that are drawn for it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.mixers import made
from transformer import BigBirdConfig, Mask
from transformer.attention.mixer import MixerInputs
from transformer.attention.variants.bigbird import BigBird
from transformer.testing.trial import reference_softmax_attention

B, D, N, BLOCK, T = 2, 6, 3, 4, 43
BLOCKS = -(-T // BLOCK)  # of the input


def config(extra: int) -> BigBirdConfig:
    """Return a config with `extra` blocks of extra tokens. No token of the input is global."""
    return BigBirdConfig(
        num_heads=N,
        head_dim=5,
        block_size=BLOCK,
        num_global_blocks=extra,
        last_block_is_global=False,
        num_random_blocks=2,
        random_block_span=extra * BLOCK + T,
    )


def drawn(extra: int, layer: int) -> Any:  # [N, R, r] what the mixer has drawn, extra blocks too
    return BigBird.constants(config(extra), layer, D)


def pattern(table: Array, extra: int, there: Array) -> Array:  # [B, N, extra and T, extra and T]
    """Token by token: query i of the input sees key j in its own block, in those beside it, and in
    those that its head has drawn."""
    rows, tokens = table.shape[1] - extra, extra * BLOCK
    seen = np.zeros((B, N, tokens + T, tokens + T), bool)
    seen[:, :, :tokens] = seen[..., :tokens] = True
    assert rows == BLOCKS
    for n, i, j in np.ndindex(N, T, T):
        own, other = i // BLOCK, j // BLOCK
        near = abs(own - other) <= 1
        seen[:, n, tokens + i, tokens + j] = near or other + extra in table[n, own + extra]
    real = np.concatenate([np.ones((B, tokens), bool), there], axis=1)
    return seen & real[:, None, None]


def softmax(w: Any, x: Array, seen: Array) -> Array:  # [B, T, D] -> [B, T, D]
    q, k, v = (
        np.einsum("BTD,DNH->BTNH", x, w[name]) + w[f"{name}_bias"]
        for name in ("query", "key", "value")
    )
    y = reference_softmax_attention(q, k, v, seen)
    return np.asarray(np.einsum("BTNH,NHD->BTD", y, w["output"]) + w["output_bias"])


@pytest.mark.slow
@pytest.mark.sampled("1")
@pytest.mark.parametrize("extra", [1, 2])
def test_the_input_is_softmax_under_the_pattern_of_extra_tokens(extra: int) -> None:
    """One block of learned tokens and two, before inputs of two lengths."""
    layer = 3
    table = drawn(extra, layer)
    mixer, w = made(config(extra), D, constants=table)
    learned, x = normal(0, extra * BLOCK, D), normal(1, B, T, D)
    lengths = array([T, 30])
    there = np.arange(T)[None] < lengths[:, None]

    @jax.jit
    def run(learned: Any, x: Any) -> Any:
        before = jnp.broadcast_to(learned[None], (B, *learned.shape))
        both = jnp.concatenate([before, x], axis=1)
        given: Any = dict(
            positions=jnp.arange(both.shape[1])[None],
            mask=Mask(key_lengths=extra * BLOCK + lengths),
            constants=table,
        )
        output: Any = mixer.apply({"params": w}, both, MixerInputs(**given))
        return output.y[:, len(learned) :]

    y = run(learned, x)
    seen = pattern(table, extra, there)
    whole = np.concatenate([np.broadcast_to(learned, (B, *learned.shape)), x], axis=1)
    expected = softmax(w, whole.astype(np.float64), seen)[:, extra * BLOCK :]
    assert_close(np.where(there[..., None], y, 0), np.where(there[..., None], expected, 0))
    # What is learned matters to every token of the input, and learns from each.
    assert np.any(run(learned + 1, x) != y, axis=-1)[there].all()
    of_tokens = jax.jit(jax.jacrev(lambda learned: run(learned, x).sum(-1)))(learned)
    assert np.any(of_tokens, axis=-1)[there].all()


@pytest.mark.slow
def test_extra_tokens_see_everything_and_gather_what_is_far() -> None:
    """An input token knows of a far one that it does not see, in the second layer."""
    table = drawn(1, 0)
    mixer, w = made(config(1), D, constants=table)
    x = normal(1, 1, BLOCK + T, D)
    given: Any = dict(positions=np.arange(BLOCK + T)[None], mask=Mask(), constants=table)

    @jax.jit
    def twice(x: Any) -> Any:
        once: Any = mixer.apply({"params": w}, x, MixerInputs(**given))
        again: Any = mixer.apply({"params": w}, once.y, MixerInputs(**given))
        return once.y, again.y

    seen = pattern(table, 1, np.ones((B, T), bool))[0]
    row = BLOCK + 1
    far = np.flatnonzero(~seen.any(0)[row])[-1]
    changed = x.copy()
    changed[:, far] += 1
    (once, again), (moved, moved_again) = twice(x), twice(changed)
    assert np.any(once[0, :BLOCK] != moved[0, :BLOCK], axis=-1).all()
    assert np.array_equal(once[0, row], moved[0, row])
    assert np.any(again[0, row] != moved_again[0, row])


def test_nothing_of_the_input_draws_an_extra_block() -> None:
    """It sees those anyway: each draw is one of the input's, and of those beyond the window."""
    for extra in (1, 2):
        table = drawn(extra, 0)[:, extra:]
        own = extra + np.arange(BLOCKS)[None, :, None]
        assert (table >= extra).all()
        assert (np.abs(table - own) > 1).all()
