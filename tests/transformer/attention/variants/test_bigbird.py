"""BigBird equals softmax under its pattern and Hugging Face's layer; its pattern is checked by
counts.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.fixtures.long import BIGBIRD, drawn_blocks, real, stream
from tests.fixtures.tiny import drawn
from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.layouts import attention, linear
from tests.transformer.mixers import apply_mixer, assert_matches_dense, make_mixer
from transformer import BigBirdConfig, Hardware, Mask, MaskPattern, RoPE
from transformer.attention.masks import dense_mask
from transformer.attention.mixer import MixerInputs
from transformer.attention.projections import QKV
from transformer.attention.variants import bigbird
from transformer.attention.variants.bigbird import BigBird, bigbird_visible_keys
from transformer.testing.contract import check_cached
from transformer.testing.mixer_under_test import make_trial

FIXTURES = np.load(Path(__file__).parents[3] / "fixtures" / "long.npz")

B, T, D, N, BLOCK = 2, 43, 8, 4, 4
BLOCKS = -(-T // BLOCK)
CONFIG = BigBirdConfig(
    num_heads=N, num_kv_heads=2, block_size=BLOCK, num_random_blocks=2, random_block_span=44
)
SEGMENTS = array(np.repeat([[1, 2, 0], [1, 2, 3]], [15, 20, 8], axis=1))


def random_blocks(config: BigBirdConfig, layer: int = 0) -> Any:
    return BigBird.constants(config, layer, D)


def select_all(mixer: Any, x: Any, inputs: MixerInputs) -> Array:  # [B or 1, N, T, T] booleans
    """Return the pairs that BigBird selects, which do not depend on queries and keys."""
    return np.asarray(jax.jit(lambda x: mixer.select(QKV(x, x, x), inputs))(x))


@pytest.mark.sampled("True")
@pytest.mark.parametrize("causal", [False, True])
def test_matches_dense_attention_under_its_pattern(causal: bool) -> None:
    mixer, params = make_mixer(CONFIG, D, constants=random_blocks(CONFIG))
    x = 0.5 * normal(1, B, T, D)
    positions = array([np.concatenate([np.arange(15), np.arange(20), np.arange(8)])])
    mask = Mask(MaskPattern(causal=causal), positions=positions, segments=SEGMENTS)
    inputs = MixerInputs(positions, mask, constants=random_blocks(CONFIG))
    visible = select_all(mixer, x, inputs) & np.asarray(dense_mask(mask, T, T))[:, None]
    assert_matches_dense(mixer, params, x, inputs, visible)


@pytest.mark.sampled("43")
@pytest.mark.parametrize("length", [9, 43])
def test_cached_decoding_matches_full_pass(length: int) -> None:
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


def test_decoding_step_reads_only_selected_blocks() -> None:
    """Its FLOPs are far below those of attending to the whole cache."""
    length = 4096
    config = BigBirdConfig(
        num_heads=N, head_dim=64, block_size=BLOCK, num_random_blocks=2, random_block_span=length
    )
    mixer, params = make_mixer(config, D, constants=random_blocks(config))
    kwargs: Any = dict(mask=Mask(MaskPattern(causal=True)), constants=random_blocks(config))

    def step(x: Any, cache: Any, positions: Any) -> Any:
        output: Any = mixer.apply(
            {"params": params}, x, MixerInputs(positions, cache=cache, **kwargs)
        )
        return output.y

    arguments = normal(0, 1, 1, D), mixer.init_cache(1, length), array([[length - 1]])
    program: Any = jax.jit(step).lower(*arguments).compile()
    flops_of_all_keys = 2 * 2 * length * N * 64
    assert program.cost_analysis()["flops"] < flops_of_all_keys / 2


def visible_blocks(config: BigBirdConfig, length: int, layer: int = 0, **mask: Any) -> Array:
    """Return [B or 1, N, blocks, blocks] booleans, taken from the first token of each block."""
    mixer, _ = make_mixer(config, D, constants=random_blocks(config))
    positions, x = array(np.arange(length)[None]), array(np.zeros((1, length, D), np.float32))
    inputs = MixerInputs(positions, Mask(**mask), constants=random_blocks(config, layer))
    visible = select_all(mixer, x, inputs)
    blocks = visible[:, :, :: config.block_size, :: config.block_size]
    repeated = blocks.repeat(config.block_size, 2).repeat(config.block_size, 3)
    assert np.array_equal(
        visible, repeated[:, :, :length, :length]
    )  # the same for all tokens of a block
    return np.asarray(blocks)


def test_each_block_sees_global_window_and_random_blocks() -> None:
    """Global blocks, the first and the last, see everything and are visible to all."""
    visible, index = visible_blocks(CONFIG, T)[0], np.arange(BLOCKS)
    drawn = (random_blocks(CONFIG)[..., None] == index).any(-2)
    in_window = np.abs(index[:, None] - index) <= 1
    is_global = np.isin(index, [0, BLOCKS - 1])
    assert np.array_equal(visible, in_window | is_global | is_global[:, None] | drawn)


def test_last_global_block_is_the_last_with_tokens() -> None:
    lengths = array([T, 2 * BLOCK + 1])
    visible = visible_blocks(CONFIG, T, key_lengths=lengths)
    assert visible[0, :, :, -1].all()
    assert visible[1, :, :, 2].all()
    assert not visible[1, :, :, -1].all()
    without_last = visible_blocks(dataclasses.replace(CONFIG, last_block_is_global=False), T)
    assert not without_last[:, :, :, -1].all()
    assert not visible_blocks(CONFIG, T, pattern=MaskPattern(causal=True))[..., -1].all()


def test_random_blocks_depend_on_seed_and_layer() -> None:
    first, again = random_blocks(CONFIG), random_blocks(dataclasses.replace(CONFIG, dropout=0.5))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, random_blocks(CONFIG, layer=1))
    assert not np.array_equal(first, random_blocks(dataclasses.replace(CONFIG, seed=1)))
    assert not np.array_equal(first[0], first[1])  # each head has its own draw
    # These values must never change: trained models depend on them.
    assert first[0, :4].tolist() == [[5, 9], [4, 5], [9, 6], [1, 10]]


def test_random_blocks_are_distinct_and_outside_window_and_globals() -> None:
    for num_global in (1, 2):
        drawn_blocks = random_blocks(dataclasses.replace(CONFIG, num_global_blocks=num_global))
        rows = np.arange(drawn_blocks.shape[1])
        assert (np.abs(drawn_blocks - rows[None, :, None]) > 1).all()
        assert ((drawn_blocks >= num_global) & (drawn_blocks < 11)).all()
        assert (drawn_blocks[..., 0] != drawn_blocks[..., 1]).all()
    few = random_blocks(dataclasses.replace(CONFIG, random_block_span=12))
    assert few[0].tolist() == [[2, -1], [-1, -1], [-1, -1]]  # fewer candidates than draws


def test_random_blocks_repeat_beyond_their_span() -> None:
    """Each section of 44 tokens has the same draw, relative to its start."""
    config = dataclasses.replace(CONFIG, num_global_blocks=0, last_block_is_global=False)
    visible = visible_blocks(config, 88)[0]
    assert np.array_equal(visible[:, :10, :11], visible[:, 11:21, 11:])
    outside_window = np.abs(np.arange(22)[:, None] - np.arange(22)) > 1
    assert not (visible & outside_window)[:, :11, 11:].any()


def test_matches_hugging_face() -> None:
    """The fixture is from tests/fixtures/make_long.py, with the same random blocks."""
    sizes, d = BIGBIRD, BIGBIRD.width
    config = BigBirdConfig(
        num_heads=sizes.heads, block_size=sizes.block, num_random_blocks=sizes.random
    )
    qkv = [linear(drawn, name, d, d) for name in ("query", "key", "value")]
    identity_output = (np.eye(d, dtype=np.float32), np.zeros(d, np.float32))
    params = attention(qkv, identity_output, sizes.heads)
    is_token = real(sizes)
    kwargs: Any = dict(mask=Mask(segments=array(is_token)), constants=drawn_blocks(sizes))
    mixer = make_mixer(config, d, constants=drawn_blocks(sizes))[0]
    y = np.asarray(apply_mixer(mixer, params, stream(sizes), **kwargs).y)
    assert_close(y[is_token == 1], FIXTURES["bigbird"][is_token == 1])


def test_flops_count_visible_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    one_program = jax.jit(bigbird.select_blocks, static_argnums=(0, 2, 4))
    monkeypatch.setattr(bigbird, "select_blocks", one_program)
    counted = bigbird_visible_keys(CONFIG, T)
    to_tokens = lambda visible: visible.repeat(BLOCK, 1).repeat(BLOCK, 2)[:, :T, :T]  # noqa: E731
    visible = to_tokens(visible_blocks(CONFIG, T)[0])
    assert counted.bidirectional == pytest.approx(visible.sum() / (N * T))
    causal = to_tokens(visible_blocks(CONFIG, T, pattern=MaskPattern(causal=True))[0])
    causal = causal & np.tri(T, dtype=bool)
    assert counted.causal == pytest.approx(causal.sum() / (N * T))
