"""BigBird equals softmax under its pattern, and Hugging Face's layer; its pattern is counted."""

import dataclasses
import math
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.long import BIGBIRD, drawn_blocks, real, stream
from tests.fixtures.tiny import drawn
from tests.transformer.formulas import Array, array, assert_close, assert_trees_close, normal
from tests.transformer.layouts import attention, linear
from tests.transformer.mixers import applied, made
from transformer import BigBirdConfig, Hardware, Mask, MaskPattern, RoPE
from transformer.attention.masks import dense_mask
from transformer.attention.mixer import MixerInputs
from transformer.attention.projections import QKV
from transformer.attention.variants.bigbird import BigBird, bigbird_visible_keys
from transformer.testing.abilities import (
    check_any_length,
    check_cached,
    check_causal,
    check_segments,
)
from transformer.testing.trial import check_select, make_trial

FIXTURES = np.load(Path(__file__).parents[3] / "fixtures" / "long.npz")

B, T, D, N, BLOCK = 2, 43, 8, 4, 4
BLOCKS = -(-T // BLOCK)
CONFIG = BigBirdConfig(
    num_heads=N, num_kv_heads=2, block_size=BLOCK, num_random_blocks=2, random_block_span=44
)
SEGMENTS = array(np.repeat([[1, 2, 0], [1, 2, 3]], [15, 20, 8], axis=1))


def table(config: BigBirdConfig, layer: int = 0) -> Any:
    return BigBird.constants(config, layer, D)


def softmax(params: Any, x: Any, seen: Any) -> Any:
    """The formula, so that it can be differentiated."""
    q, k, v = (
        jnp.einsum("BTD,DNH->BTNH", x, params[name]) + params[f"{name}_bias"][None, None]
        for name in ("query", "key", "value")
    )
    k, v = (jnp.repeat(each, N // k.shape[2], axis=2) for each in (k, v))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(q.shape[-1])
    raised = jnp.where(seen, jnp.exp(scores), 0)
    total = raised.sum(-1, keepdims=True)
    y = jnp.einsum("BNTS,BSNH->BTNH", raised / jnp.where(total > 0, total, 1), v)
    return jnp.einsum("BTNH,NHD->BTD", y, params["output"]) + params["output_bias"][None, None]


@pytest.mark.slow
@pytest.mark.sampled("True")
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients_are_those_of_softmax_under_the_pattern(causal: bool) -> None:
    mixer, params = made(CONFIG, D, constants=table(CONFIG))
    x = 0.5 * normal(1, B, T, D)
    positions = array([np.concatenate([np.arange(15), np.arange(20), np.arange(8)])])
    mask = Mask(MaskPattern(causal=causal), positions=positions, segments=SEGMENTS)
    given: Any = dict(positions=positions, mask=mask, constants=table(CONFIG))
    chosen: Any = cast(Any, mixer).select(QKV(x, x, x), MixerInputs(**given))
    seen = chosen & dense_mask(mask, T, T)[:, None]

    def both(run: Any) -> Any:
        def inner(params: Any, x: Any) -> Any:
            y, pull = jax.vjp(run, params, x)
            return y, pull(jnp.cos(3 * y))

        return jax.jit(inner)(params, x)

    def mixed(params: Any, x: Any) -> Any:
        output: Any = mixer.apply({"params": params}, x, MixerInputs(**given))
        return output.y

    y, gradients = both(mixed)
    expected, wanted = both(lambda params, x: softmax(params, x, seen))
    assert_close(y, expected)
    assert_trees_close(gradients, wanted)


@pytest.mark.full
def test_the_contract_where_blocks_are_many() -> None:
    trial = make_trial(CONFIG, D, T, (1, 17, T + 6), Hardware())
    for check in (check_select, check_causal, check_segments, check_any_length, check_cached):
        check(trial)


@pytest.mark.parametrize("length", [9, 43])
def test_what_a_cache_holds_is_what_a_full_pass_sees(length: int) -> None:
    """Also where the table's rows repeat, and with two global blocks."""
    config = BigBirdConfig(
        num_heads=N,
        block_size=3,
        num_global_blocks=2,
        num_window_blocks=1,
        random_block_span=12,
        position=RoPE(),
    )
    check_cached(make_trial(config, D, length, (1,), Hardware()))


def test_a_token_reads_the_blocks_that_it_sees_alone() -> None:
    """Only the selected blocks of a long cache are used."""
    length = 4096
    config = BigBirdConfig(
        num_heads=N, head_dim=64, block_size=BLOCK, num_random_blocks=2, random_block_span=length
    )
    mixer, params = made(config, D, constants=table(config))
    given: Any = dict(mask=Mask(MaskPattern(causal=True)), constants=table(config))

    def step(x: Any, cache: Any, positions: Any) -> Any:
        output: Any = mixer.apply(
            {"params": params}, x, MixerInputs(positions, cache=cache, **given)
        )
        return output.y

    arguments = normal(0, 1, 1, D), mixer.init_cache(1, length), array([[length - 1]])
    program: Any = jax.jit(step).lower(*arguments).compile()
    of_all_keys = 2 * 2 * length * N * 64
    assert program.cost_analysis()["flops"] < of_all_keys / 2


def seen_blocks(config: BigBirdConfig, length: int, layer: int = 0, **mask: Any) -> Array:
    """[B or 1, N, blocks, blocks] booleans, from the first token of each block."""
    mixer, _ = made(config, D, constants=table(config))
    positions, x = array(np.arange(length)[None]), array(np.zeros((1, length, D), np.float32))
    inputs = MixerInputs(positions, Mask(**mask), constants=table(config, layer))
    seen = np.asarray(cast(Any, mixer).select(QKV(x, x, x), inputs))
    blocks = seen[:, :, :: config.block_size, :: config.block_size]
    repeated = blocks.repeat(config.block_size, 2).repeat(config.block_size, 3)
    assert np.array_equal(seen, repeated[:, :, :length, :length])  # alike in all of a block
    return np.asarray(blocks)


def test_what_each_block_sees() -> None:
    """Global ones everything, others the first and last block, three of a window, two drawn."""
    seen = seen_blocks(CONFIG, T)[0]
    assert seen[:, [0, -1]].all()
    assert seen[:, :, [0, -1]].all()
    index = np.arange(BLOCKS)
    near = np.abs(index[:, None] - index) <= 1
    assert seen[:, near].all()
    rest = seen & ~near
    rest[:, [0, -1]] = rest[:, :, [0, -1]] = False
    drawn_too = rest.sum(-1)[:, 1:-1]
    assert drawn_too.max() == 2
    assert drawn_too.mean() > 1.5  # some draw the last block, which they see anyway


def test_the_last_block_is_the_last_with_a_token() -> None:
    lengths = array([T, 2 * BLOCK + 1])
    seen = seen_blocks(CONFIG, T, key_lengths=lengths)
    assert seen[0, :, :, -1].all()
    assert seen[1, :, :, 2].all()
    assert not seen[1, :, :, -1].all()
    alone = seen_blocks(dataclasses.replace(CONFIG, last_block_is_global=False), T)
    assert not alone[:, :, :, -1].all()
    assert not seen_blocks(CONFIG, T, pattern=MaskPattern(causal=True))[..., -1].all()


def test_random_blocks_follow_from_seed_and_layer() -> None:
    first, again = table(CONFIG), table(dataclasses.replace(CONFIG, dropout=0.5))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, table(CONFIG, layer=1))
    assert not np.array_equal(first, table(dataclasses.replace(CONFIG, seed=1)))
    assert not np.array_equal(first[0], first[1])  # each head draws for itself
    # These numbers never change: models that were trained with them need them.
    assert first[0, :4].tolist() == [[5, 9], [4, 5], [9, 6], [1, 10]]


def test_random_blocks_are_neither_near_nor_global_nor_alike() -> None:
    drawn_blocks = table(CONFIG)
    rows = np.arange(drawn_blocks.shape[1])
    assert (np.abs(drawn_blocks - rows[None, :, None]) > 1).all()
    assert ((drawn_blocks >= 1) & (drawn_blocks < 11)).all()
    assert (drawn_blocks[..., 0] != drawn_blocks[..., 1]).all()
    few = table(dataclasses.replace(CONFIG, random_block_span=12))
    assert few[0].tolist() == [[2, -1], [-1, -1], [-1, -1]]  # there are not so many


def test_a_longer_input_repeats_the_draw() -> None:
    """Each section of 44 tokens draws blocks of its own, as the first does."""
    config = dataclasses.replace(CONFIG, num_global_blocks=0, last_block_is_global=False)
    seen = seen_blocks(config, 88)[0]
    assert np.array_equal(seen[:, :10, :11], seen[:, 11:21, 11:])
    apart = np.abs(np.arange(22)[:, None] - np.arange(22)) > 1
    assert not (seen & apart)[:, :11, 11:].any()


def test_it_computes_what_hugging_face_computes() -> None:
    """Made by tests/fixtures/make_long.py, where the same blocks are drawn."""
    sizes, d = BIGBIRD, BIGBIRD.width
    config = BigBirdConfig(
        num_heads=sizes.heads, block_size=sizes.block, num_random_blocks=sizes.random
    )
    inner = [linear(drawn, name, d, d) for name in ("query", "key", "value")]
    same = (np.eye(d, dtype=np.float32), np.zeros(d, np.float32))
    params = attention(inner, same, sizes.heads)
    there = real(sizes)
    given: Any = dict(mask=Mask(segments=array(there)), constants=drawn_blocks(sizes))
    mixer = made(config, d, constants=drawn_blocks(sizes))[0]
    y = np.asarray(applied(mixer, params, stream(sizes), **given).y)
    assert_close(y[there == 1], FIXTURES["bigbird"][there == 1])


def test_errors() -> None:
    with pytest.raises(
        ValueError, match=r"^bigbird.num_window_blocks 2: give an odd number: the bl"
    ):
        BigBirdConfig(num_window_blocks=2)
    with pytest.raises(ValueError, match=r"^bigbird.random_block_span 16: give 64 or more$"):
        BigBirdConfig(random_block_span=16)
    mixer, params = made(CONFIG, D, constants=table(CONFIG))
    window: Any = dict(mask=Mask(MaskPattern(window=3)), constants=table(CONFIG))
    with pytest.raises(ValueError, match=r"^mixer bigbird: does not support a window; use an"):
        applied(mixer, params, normal(0, B, T, D), **window)
    cached: Any = dict(cache=mixer.init_cache(B, T), constants=table(CONFIG))
    with pytest.raises(
        ValueError, match=r"^mixer bigbird: decoding with a cache needs a causal mask; give one"
    ):
        applied(mixer, params, normal(0, B, T, D), **cached)


def test_flops_count_the_keys_that_are_seen() -> None:
    counted = bigbird_visible_keys(CONFIG, T)
    tokens = lambda seen: seen.repeat(BLOCK, 1).repeat(BLOCK, 2)[:, :T, :T]  # noqa: E731
    seen = tokens(seen_blocks(CONFIG, T)[0])
    assert counted.bidirectional == pytest.approx(seen.sum() / (N * T))
    causal = tokens(seen_blocks(CONFIG, T, pattern=MaskPattern(causal=True))[0])
    causal = causal & np.tri(T, dtype=bool)
    assert counted.causal == pytest.approx(causal.sum() / (N * T))
