"""Longformer equals two dense passes: window and global keys, and the rows of global tokens."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.long import LONGFORMER, real, stream
from tests.fixtures.tiny import drawn
from tests.transformer.formulas import Array, array, assert_close, assert_trees_close, normal
from tests.transformer.layouts import attention, linear
from tests.transformer.mixers import (
    apply_mixer,
    dense_attention,
    make_mixer,
    value_and_gradients,
)
from transformer import Hardware, LongformerConfig, Mask, MaskPattern, NormConfig, RoPE
from transformer.attention.masks import dense_mask
from transformer.attention.mixer import MixerInputs
from transformer.attention.variants.longformer import longformer_visible_keys
from transformer.testing.contract import check_cached
from transformer.testing.mixer_under_test import make_trial

FIXTURES = np.load(Path(__file__).parents[3] / "fixtures" / "long.npz")

B, T, D, N, K = 2, 41, 8, 4, 2
PACKED = array(np.repeat([[1, 2, 0], [1, 2, 3]], [13, 21, 7], axis=1))
RESTARTED = array([np.concatenate([np.arange(size) for size in (13, 21, 7)])])
GLOBALS = array([[3, 0, 3, -1], [39, -1, 5, 8]])


def window_mask(config: LongformerConfig, positions: Array) -> Array:  # [B or 1, N, T, T] booleans
    """Return the pairs within the window: distances 0, d, ..., window d."""
    steps = np.broadcast_to(config.dilations, (config.num_heads,))[:, None, None]
    distance = np.abs(positions[:, None, :, None] - positions[:, None, None, :])
    return np.asarray((distance % steps == 0) & (distance <= config.one_sided_window * steps))


def expected_output(
    params: Any, x: Any, visible: Array, in_window: Array, is_global: Array
) -> Any:  # [B, T, D]
    """Compute softmax over window and global keys, and over all keys with other projections."""

    def softmax(suffix: str, seen: Array) -> Any:
        q, k, v = (
            jnp.einsum("BTD,DNH->BTNH", x, params[f"{name}{suffix}"])
            + params[f"{name}{suffix}_bias"][None, None]
            for name in ("query", "key", "value")
        )
        return dense_attention(q, k, v, seen)

    most = softmax("", visible[:, None] & (in_window | is_global[:, None, None, :]))
    few = softmax("_global", np.broadcast_to(visible[:, None], (B, 1, T, T)))
    y = jnp.where(is_global[:, :, None, None], few, most)
    return jnp.einsum("BTNH,NHD->BTD", y, params["output"]) + params["output_bias"][None, None]


INDEX = array([np.arange(T)])
CASES: dict[str, Any] = {
    "listed, of two lengths": (Mask(key_lengths=array([T, 29]), global_positions=GLOBALS), INDEX),
    "listed, causal": (Mask(MaskPattern(causal=True), global_positions=GLOBALS), INDEX),
    "packed": (Mask(segments=PACKED), RESTARTED),
    "packed, listed, causal": (
        Mask(MaskPattern(causal=True), segments=PACKED, global_positions=GLOBALS[:1]),
        RESTARTED,
    ),
    "few globals": (Mask(MaskPattern(causal=True)), INDEX),  # keys and values are not projected
}


@pytest.mark.sampled("[listed, causal", "[packed]", "few")
@pytest.mark.parametrize("case", CASES)
def test_matches_two_dense_passes(case: str) -> None:
    mask, positions = CASES[case]
    dilations = (3, 1, 1, 2) if "listed" in case else (1,)
    config = LongformerConfig(
        num_heads=N,
        num_kv_heads=K,
        head_dim=16 if case == "few globals" else 0,
        one_sided_window=3,
        dilations=dilations,
        num_global_tokens=2,
    )
    mixer, params = make_mixer(config, D)
    x = 0.5 * normal(1, B, T, D)
    listed = (
        np.array([[0, 1]]) if mask.global_positions is None else np.asarray(mask.global_positions)
    )
    is_global = (positions[:, :, None] == listed[:, None, :]).any(-1)
    if mask.key_lengths is not None:  # padding is not global
        is_global = is_global & (np.asarray(mask.key_lengths)[:, None] > INDEX)
    seen = dense_mask(mask.replace(positions=positions, global_positions=None), T, T)
    dense = np.asarray(seen), window_mask(config, positions), is_global

    def run_mixer(params: Any, x: Any) -> Any:
        output: Any = mixer.apply({"params": params}, x, MixerInputs(array(positions), mask))
        return output.y

    assert_trees_close(
        value_and_gradients(run_mixer, params, x),
        value_and_gradients(lambda params, x: expected_output(params, x, *dense), params, x),
    )


@pytest.mark.sampled("[9-settings0", "[37-settings2")
@pytest.mark.parametrize(
    "settings",
    [
        dict(
            one_sided_window=3, dilations=(1, 2, 1, 3), num_global_tokens=14, qk_norm=NormConfig()
        ),
        dict(one_sided_window=100, num_global_tokens=0),  # wider than what comes
        dict(one_sided_window=0, num_global_tokens=1, num_kv_heads=N),
    ],
)
@pytest.mark.parametrize("length", [9, 37])
def test_cached_decoding_matches_full_pass(length: int, settings: dict[str, Any]) -> None:
    """Also with single global tokens, and with a first chunk longer than the window."""
    config = LongformerConfig(**dict(num_heads=N, num_kv_heads=K) | settings)
    check_cached(make_trial(config, D, length, (1,), Hardware()))


def test_cache_size_does_not_depend_on_length() -> None:
    mixer, _ = make_mixer(
        LongformerConfig(num_heads=N, one_sided_window=5, dilations=(3,), num_global_tokens=2), D
    )
    sizes = [jax.tree.map(np.shape, mixer.init_cache(B, length)) for length in (16, 17, 100_000)]
    assert sizes[0] == sizes[1] == sizes[2]
    assert (sizes[0].window.keys[1], sizes[0].global_query_kv.keys[1]) == (5 * 3 + 1, 2)


ROWS = array(np.arange(T)[None] < np.array([[T], [29]]))  # of one document each, and padding
WITH_A_PACK = array(np.concatenate([7 * ROWS, PACKED[1:]]))


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        dict(head_dim=16),  # of few global queries: less is projected
        dict(head_dim=16, qk_norm=NormConfig(), position=RoPE(), num_global_tokens=2),
        dict(head_dim=16, qkv_clip=0.3),  # a clip is not linear: all keys are projected
    ],
)
def test_single_documents_match_those_in_a_packed_batch(settings: dict[str, Any]) -> None:
    """One row with several documents sends all rows another way, in results and gradients."""
    config = LongformerConfig(num_heads=N, num_kv_heads=K, one_sided_window=3, **settings)
    mixer, params = make_mixer(config, D)
    x, real = normal(1, 3, T, D), jnp.asarray(ROWS)[..., None]
    listed = None if "num_global_tokens" in settings else GLOBALS[[0, 1, 1]]

    @jax.jit
    def both(params: Any, x: Any, segments: Any) -> Any:
        mask = Mask(
            segments=segments, global_positions=None if listed is None else listed[: len(x)]
        )

        def run(params: Any, x: Any) -> Any:
            output: Any = mixer.apply({"params": params}, x, MixerInputs(array(INDEX), mask))
            return jnp.where(real, output.y[:2], 0)

        y, vjp_fn = jax.vjp(run, params, x)
        of_params, of_x = vjp_fn(jnp.cos(3 * y))
        return y, of_params, of_x[:2]

    apart, beside = both(params, x[:2], WITH_A_PACK[:2]), both(params, x, WITH_A_PACK)
    assert_trees_close(apart, beside)
    globals_of_rows = None if listed is None else GLOBALS
    reported = Mask(segments=7 * ROWS, global_positions=globals_of_rows, single_document=True)
    y = apply_mixer(mixer, params, x[:2], mask=reported).y  # known at compile time
    assert_close(apart[0], np.where(ROWS[..., None], y, 0))


def test_dropout_does_not_depend_on_other_rows() -> None:
    config = LongformerConfig(num_heads=N, one_sided_window=3, dropout=0.5)
    mixer, params = make_mixer(config, D)
    x, keys = normal(1, 3, T, D), jax.random.split(jax.random.key(0), 3)
    apart, beside = (
        np.asarray(
            apply_mixer(mixer, params, x, mask=Mask(segments=segments), dropout_rngs=keys).y
        )[:2]
        for segments in (WITH_A_PACK[[0, 1, 0]], WITH_A_PACK)
    )
    assert_close(np.where(ROWS[..., None], apart, 0), np.where(ROWS[..., None], beside, 0))


def test_matches_hugging_face() -> None:
    """The fixture is from tests/fixtures/make_long.py."""
    sizes, d = LONGFORMER, LONGFORMER.width
    config = LongformerConfig(num_heads=sizes.heads, one_sided_window=sizes.window)
    same = (np.eye(d, dtype=np.float32), np.zeros(d, np.float32))
    params = {}
    for suffix in ("_global", ""):
        inner = [linear(drawn, f"{name}{suffix}", d, d) for name in ("query", "key", "value")]
        for name, leaf in attention(inner, same, sizes.heads).items():
            base, bias = name.removesuffix("_bias"), name.endswith("_bias")
            params[f"{base}{suffix if base != 'output' else ''}{'_bias' * bias}"] = leaf
    is_token = real(sizes)
    mask = Mask(segments=array(is_token), global_positions=array(sizes.globals))
    y = np.asarray(apply_mixer(make_mixer(config, d)[0], params, stream(sizes), mask=mask).y)
    assert_close(y[is_token == 1], FIXTURES["longformer"][is_token == 1])


def test_listed_global_tokens_in_decoding_raise() -> None:
    mixer, params = make_mixer(LongformerConfig(num_heads=N), D)
    x, cache = normal(0, B, T, D), mixer.init_cache(B, T)
    listed = Mask(MaskPattern(causal=True), global_positions=GLOBALS)
    with pytest.raises(ValueError, match="in decoding, the global tokens"):
        apply_mixer(mixer, params, x, cache=cache, mask=listed)


def test_flops_count_visible_keys() -> None:
    config = LongformerConfig(
        num_heads=2, one_sided_window=3, dilations=(1, 3), num_global_tokens=2
    )
    in_window, is_global = window_mask(config, INDEX)[0], np.arange(T) < 2
    visible = in_window | is_global | is_global[:, None]
    counted = longformer_visible_keys(config, T)
    assert counted.bidirectional == pytest.approx(visible.sum() / (2 * T))
    assert counted.causal == pytest.approx((visible & np.tri(T, dtype=bool)).sum() / (2 * T))
