"""Linformer against dense matrices, with a separate padded matrix for every document."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, assert_trees_close, normal
from tests.transformer.mixers import apply_mixer, axes, make_mixer, value_and_gradients
from transformer import (
    BlockConfig,
    LanguageModel,
    LinformerConfig,
    Mask,
    MaskPattern,
    TransformerConfig,
)
from transformer.attention.masks import dense_mask
from transformer.attention.mixer import MixerInputs
from transformer.flops import count_token_flops

B, T, S, D, N, K, H, R = 2, 11, 9, 6, 4, 2, 3, 5
LENGTH = 13


def config(**fields: Any) -> LinformerConfig:
    defaults: Any = dict(
        num_heads=N, num_kv_heads=K, head_dim=H, max_length=LENGTH, rank=R, bias=False
    )
    return LinformerConfig(**defaults | fields)


def positions_in_documents(mask: Mask, keys: int) -> Array:  # [B, S]
    if mask.segments is None:
        return np.arange(keys)[None].repeat(B, 0)
    key_segments = np.asarray(mask.segments if mask.key_segments is None else mask.key_segments)
    return np.array([[t - list(row).index(row[t]) for t in range(keys)] for row in key_segments])


def expected_output(
    visible: Array, key_positions: Array, x: Any, memory: Any, w: Any, xp: Any = np
) -> Any:
    """Compute the formula query by query, projecting its visible keys by their positions."""
    e, f = w["key_rows"], w.get("value_rows", w["key_rows"])
    e, f = (xp.broadcast_to(table, (K, LENGTH, R)) for table in (e, f))
    q = xp.einsum("BTD,DNH->BTNH", x, w["query"])
    k, v = (xp.einsum("BSD,DKH->BSKH", memory, w[name]) for name in ("key", "value"))
    seen = visible[:, :, None, :, None]
    e, f = (seen * table[:, key_positions].swapaxes(0, 1)[:, None] for table in (e, f))
    keys = xp.einsum("BTKSR,BSKH->BTKRH", e, k)
    values = xp.einsum("BTKSR,BSKH->BTKRH", f, v)
    keys, values = (xp.repeat(each, N // K, axis=2) for each in (keys, values))
    scores = xp.exp(xp.einsum("BTNH,BTNRH->BTNR", q, keys) / H**0.5)
    y = xp.einsum("BTNR,BTNRH->BTNH", scores / scores.sum(-1)[..., None], values)
    return xp.einsum("BTNH,NHD->BTD", y, w["output"])


SEGMENTS = array([[4, 4, 4, 4, 4, 4, 2, 2, 2, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]])
KEY_SEGMENTS = array([[2, 2, 2, 0, 4, 4, 4, 4, 4], [1, 0, 0, 0, 0, 0, 0, 0, 0]])
CASES = [
    (dict(sharing="heads"), Mask(), T),
    (dict(sharing="none"), Mask(segments=SEGMENTS), T),
    (dict(sharing="key_value"), Mask(key_lengths=array([10, 1])), T),
    (dict(sharing="heads"), Mask(segments=SEGMENTS, key_segments=KEY_SEGMENTS), S),
    (dict(max_documents=1), Mask(key_lengths=array([3, 11])), T),
]


@pytest.mark.parametrize(("settings", "mask", "keys"), CASES, ids=range(len(CASES)))
def test_matches_dense_matrices(settings: Any, mask: Mask, keys: int) -> None:
    mixer, w = make_mixer(config(**settings), D)
    x, other = normal(0, B, T, D), normal(1, B, keys, D)
    memory = None if keys == T else other
    positions, key_positions = np.arange(T)[None], positions_in_documents(mask, keys)
    visible = np.broadcast_to(dense_mask(mask, T, keys), (B, T, keys))

    def run_mixer(w: Any, x: Any, other: Any) -> Any:
        memory = None if keys == T else other
        output: Any = mixer.apply(
            {"params": w}, x, MixerInputs(array(positions), mask, memory=memory)
        )
        return output.y

    def run_dense(w: Any, x: Any, other: Any, xp: Any = jnp) -> Any:
        return expected_output(visible, key_positions, x, x if keys == T else other, w, xp)

    actual = value_and_gradients(run_mixer, w, x, other)
    exact = run_dense(jax.tree.map(np.float64, w), np.float64(x), np.float64(other), np)
    assert_close(actual[0], exact)
    assert_trees_close(actual, value_and_gradients(run_dense, w, x, other))
    assert memory is None or np.any(actual[1][2])


def test_weight_shapes_and_axes() -> None:
    shapes = {}
    for sharing in ("none", "heads", "key_value"):
        _, w = make_mixer(config(sharing=sharing), D)
        shapes[sharing] = {name: w[name].shape for name in w if name.endswith("rows")}
    assert shapes["none"] == dict.fromkeys(("key_rows", "value_rows"), (K, LENGTH, R))
    assert shapes["heads"] == dict.fromkeys(("key_rows", "value_rows"), (LENGTH, R))
    assert shapes["key_value"] == {"key_rows": (LENGTH, R)}
    assert axes(config(sharing="none"), D)["key_rows"] == ("kv_heads", "positions", "rank")


def test_too_many_documents_give_nan() -> None:
    mixer, w = make_mixer(config(), D)
    three_documents = np.where(np.arange(T) == 10, [[3], [0]], SEGMENTS)
    y = apply_mixer(mixer, w, normal(0, B, T, D), mask=Mask(segments=array(three_documents))).y
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


def test_flops() -> None:
    block = BlockConfig(mixer=config(sharing="none"), feed_forward=None)
    model = LanguageModel(
        TransformerConfig(
            vocab_size=17, d_model=D, num_layers=1, layer_pattern=(block,), causal=False
        )
    )
    flops = count_token_flops(model, LENGTH)
    assert flops.scores == 2 * (2 * K * H * R + 2 * N * H * R)
    assert flops.projections == 2 * D * H * (2 * N + 2 * K)


def test_inputs_that_do_not_fit_the_projections_raise() -> None:
    mixer, w = make_mixer(config(), D)
    x = normal(0, 1, LENGTH + 1, D)
    with pytest.raises(ValueError, match="14 tokens are more than the 13"):
        apply_mixer(mixer, w, x)
    with pytest.raises(ValueError, match="does not support a causal mask"):
        apply_mixer(mixer, w, x[:, :3], mask=Mask(MaskPattern(causal=True)))
    one_document, _ = make_mixer(config(max_documents=1), D)
    with pytest.raises(ValueError, match="max_documents 1 cannot keep"):
        apply_mixer(one_document, w, x[:, :3], mask=Mask(segments=array([[1, 1, 0]])))
