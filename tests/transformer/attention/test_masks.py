"""Every field of a mask as a drawing: one row per query, `x` where it sees the key."""

import jax
import numpy as np
import pytest

from tests.transformer.formulas import Array, array
from transformer import Mask, MaskPattern
from transformer.attention.backends.query_blocks import causal_block
from transformer.attention.masks import dense_mask


def visible(mask: Mask, queries: int, keys: int) -> Array:
    return np.asarray(jax.jit(dense_mask, static_argnums=(1, 2))(mask, queries, keys))


def drawing(rows: str) -> Array:
    return np.array([[letter == "x" for letter in row] for row in rows.split()])


CAUSAL, CAUSAL_PREFIX = MaskPattern(causal=True), MaskPattern(causal=True, prefix=True)
TRIANGLE = "x.... xx... xxx.. xxxx. xxxxx"

DRAWINGS: dict[str, tuple[Mask, list[str]]] = {
    "causal": (Mask(CAUSAL), [TRIANGLE]),
    "bidirectional window": (
        Mask(MaskPattern(window=2)),
        ["xx... xxx.. .xxx. ..xxx ...xx"],
    ),
    "causal window": (
        Mask(MaskPattern(causal=True, window=3)),
        ["x.... xx... xxx.. .xxx. ..xxx"],
    ),
    "dilated causal window": (
        Mask(MaskPattern(causal=True, window=2, dilation=3)),
        ["x..... .x.... ..x... x..x.. .x..x. ..x..x"],
    ),
    "prefix": (
        Mask(CAUSAL_PREFIX, prefix_lengths=array([3, 0])),
        ["xxx.. xxx.. xxx.. xxxx. xxxxx", TRIANGLE],
    ),
    "prefix lengths without a prefix pattern": (
        Mask(CAUSAL, prefix_lengths=array([3])),
        [TRIANGLE],
    ),
    "global tokens see all and are visible to all": (
        Mask(MaskPattern(window=1), global_positions=array([[1, -1], [3, 0]])),
        ["xx... xxxxx .xx.. .x.x. .x..x", "xxxxx xx.x. x.xx. xxxxx x..xx"],
    ),
    "causal global tokens": (
        Mask(MaskPattern(causal=True, window=1), global_positions=array([[2]])),
        ["x.... .x... xxx.. ..xx. ..x.x"],
    ),
    "key lengths": (
        Mask(key_lengths=array([4, 2, 0])),
        ["xxxx xxxx xxxx", "xx.. xx.. xx..", ".... .... ...."],
    ),
    "segments": (
        Mask(segments=array([[7, 7, 2, 2, 0]])),
        ["xx... xx... ..xx. ..xx. ....."],
    ),
    "causal documents whose positions restart": (
        Mask(CAUSAL, positions=array([[0, 1, 0, 1, 2]]), segments=array([[1, 1, 2, 2, 2]])),
        ["x.... xx... ..x.. ..xx. ..xxx"],
    ),
    "segments narrow prefix and globals": (
        Mask(
            CAUSAL_PREFIX,
            segments=array([[1, 1, 2, 2]]),
            prefix_lengths=array([2]),
            global_positions=array([[3]]),
        ),
        ["xx.. xx.. ..x. ..xx"],
    ),
    "key segments": (
        Mask(segments=array([[1, 2, 0]]), key_segments=array([[2, 1, 0, 1]])),
        [".x.x x... ...."],
    ),
    "positions and segments of other keys": (
        Mask(CAUSAL, positions=array([[2, 5]]), segments=array([[1, 1]])).with_keys(
            array([[5, 3, 2, 0]]), array([[1, 1, 0, 1]])
        ),
        ["...x xx.x"],
    ),
    "positions of other keys start at 0": (
        Mask(CAUSAL, positions=array([[1, 3]])),
        ["xx... xxxx."],
    ),
    "an array for each example": (
        Mask(allowed=array([drawing(".xx x.x ..."), drawing("xxx ..x x..")])),
        [".xx x.x ...", "xxx ..x x.."],
    ),
    "a causal array": (
        Mask(CAUSAL, allowed=array([drawing(".xx x.x ..x")])),
        ["... x.. ..x"],
    ),
    "an array overrides prefix and globals": (
        Mask(
            MaskPattern(prefix=True),
            prefix_lengths=array([3]),
            global_positions=array([[2]]),
            allowed=array([drawing("xxx xx. ...")]),
        ),
        ["xxx xx. ..."],
    ),
}
"""Masks, and a drawing of each example or of all."""


@pytest.mark.parametrize("name", DRAWINGS)
def test_mask_as_drawn(name: str) -> None:
    mask, examples = DRAWINGS[name]
    expected = np.stack([drawing(each) for each in examples])
    assert np.array_equal(visible(mask, *expected.shape[1:]), expected)


MASKS = {
    "causal": Mask(MaskPattern(causal=True)),
    "window": Mask(MaskPattern(causal=True, window=3, dilation=2)),
    "positions": Mask(
        MaskPattern(causal=True),
        positions=array([[0, 1, 2, 0, 1, 2, 3]]),
        segments=array([[1, 1, 1, 2, 2, 0, 0], [5, 5, 5, 4, 4, 4, 4]]),
    ),
    "lengths and globals": Mask(
        MaskPattern(causal=True, window=2),
        key_lengths=array([6, 2]),
        global_positions=array([[0, 4], [-1, 3]]),
    ),
    "an array": Mask(
        MaskPattern(causal=True),
        allowed=array(np.random.default_rng(0).integers(0, 2, (2, 7, 7)) > 0),
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("start", "end"), [(0, 3), (3, 5)])
def test_causal_block_equals_slice_of_full_mask(name: str, start: int, end: int) -> None:
    full = visible(MASKS[name], 7, 7)
    block = visible(causal_block(MASKS[name], start, end, 7), end - start, end)
    assert np.array_equal(block, full[:, start:end, :end])
    assert not full[:, start:end, end:].any()


@pytest.mark.parametrize(
    ("mask", "irregular", "rows_may_be_empty"),
    [
        (Mask(MaskPattern(causal=True), positions=array([[0]])), False, False),
        (Mask(MaskPattern(causal=True, window=2)), False, False),
        (Mask(segments=array([[1]])), False, True),
        (Mask(key_lengths=array([1])), True, True),
        (Mask(prefix_lengths=array([1])), True, False),
        (Mask(global_positions=array([[1]])), True, False),
        (Mask(allowed=array([[[True]]])), True, True),
    ],
    ids=["causal", "window", "segments", "lengths", "prefix", "globals", "array"],
)
def test_static_mask_properties(mask: Mask, irregular: bool, rows_may_be_empty: bool) -> None:
    assert (mask.has_extra_masks, mask.may_have_empty_rows(1, 1)) == (irregular, rows_may_be_empty)


@pytest.mark.parametrize("pattern", [MaskPattern(causal=True), MaskPattern(window=2)])
def test_other_keys_may_leave_rows_empty(pattern: MaskPattern) -> None:
    mask, others = Mask(pattern, positions=array([[0, 1]])), array([[5, 6]])
    assert mask.with_keys(others).may_have_empty_rows(2, 2)
    assert mask.may_have_empty_rows(2, 3)
    assert not mask.may_have_empty_rows(2, 2)
    assert not mask.with_keys(array([[0, 1, 2]]), keys_include_queries=True).may_have_empty_rows(
        2, 3
    )
    assert not causal_block(mask, 1, 2, 2).may_have_empty_rows(1, 2)
    assert not Mask().with_keys(others).may_have_empty_rows(2, 2)
