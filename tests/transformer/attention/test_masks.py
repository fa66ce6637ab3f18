"""Every field of a mask as a drawing: one row per query, `x` where it sees the key."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import Array, array
from tests.transformer.refused import assert_refused
from transformer import Mask, MaskPattern
from transformer.attention.backends.dispatch import causal_block
from transformer.attention.masks import dense_mask


def drawing(*rows: str) -> Array:
    return np.array([[letter == "x" for letter in row] for row in rows])


def visible(mask: Mask, queries: int, keys: int) -> Array:
    return np.asarray(jax.jit(dense_mask, static_argnums=(1, 2))(mask, queries, keys))


def assert_sees(mask: Mask, *examples: Array) -> None:
    """Assert that the dense mask equals the drawing of each example, or one for all examples."""
    queries, keys = examples[0].shape
    assert np.array_equal(visible(mask, queries, keys), np.stack(examples))


ALL = drawing("xxxx", "xxxx", "xxxx")
CAUSAL = drawing("x....", "xx...", "xxx..", "xxxx.", "xxxxx")


def test_causal() -> None:
    assert_sees(Mask(MaskPattern(causal=True)), CAUSAL)


def test_bidirectional_window() -> None:
    pattern = MaskPattern(window=2)
    assert_sees(Mask(pattern), drawing("xx...", "xxx..", ".xxx.", "..xxx", "...xx"))


def test_causal_window_has_window_keys() -> None:
    pattern = MaskPattern(causal=True, window=3)
    assert_sees(Mask(pattern), drawing("x....", "xx...", "xxx..", ".xxx.", "..xxx"))


def test_dilated_causal_window() -> None:
    pattern = MaskPattern(causal=True, window=2, dilation=3)
    rows = ("x.....", ".x....", "..x...", "x..x..", ".x..x.", "..x..x")
    assert_sees(Mask(pattern), drawing(*rows))


def test_prefix_is_visible_to_all() -> None:
    mask = Mask(MaskPattern(causal=True, prefix=True), prefix_lengths=array([3, 0]))
    assert_sees(mask, drawing("xxx..", "xxx..", "xxx..", "xxxx.", "xxxxx"), CAUSAL)


def test_prefix_lengths_need_a_prefix_pattern() -> None:
    assert_sees(Mask(MaskPattern(causal=True), prefix_lengths=array([3])), CAUSAL)


def test_global_tokens_see_all_and_are_visible_to_all() -> None:
    mask = Mask(MaskPattern(window=1), global_positions=array([[1, -1], [3, 0]]))
    first = drawing("xx...", "xxxxx", ".xx..", ".x.x.", ".x..x")
    second = drawing("xxxxx", "xx.x.", "x.xx.", "xxxxx", "x..xx")
    assert_sees(mask, first, second)


def test_causal_global_tokens_do_not_see_the_future() -> None:
    mask = Mask(MaskPattern(causal=True, window=1), global_positions=array([[2]]))
    assert_sees(mask, drawing("x....", ".x...", "xxx..", "..xx.", "..x.x"))


def test_key_lengths_hide_padding() -> None:
    mask = Mask(key_lengths=array([4, 2, 0]))
    assert_sees(mask, ALL, drawing("xx..", "xx..", "xx.."), drawing("....", "....", "...."))


def test_segments_separate_documents_and_hide_padding() -> None:
    mask = Mask(segments=array([[7, 7, 2, 2, 0]]))
    assert_sees(mask, drawing("xx...", "xx...", "..xx.", "..xx.", "....."))


def test_causal_documents_with_restarting_positions() -> None:
    mask = Mask(
        MaskPattern(causal=True),
        positions=array([[0, 1, 0, 1, 2]]),
        segments=array([[1, 1, 2, 2, 2]]),
    )
    assert_sees(mask, drawing("x....", "xx...", "..x..", "..xx.", "..xxx"))


def test_segments_narrow_prefix_and_globals() -> None:
    pattern = MaskPattern(causal=True, prefix=True)
    segments = array([[1, 1, 2, 2]])
    mask = Mask(
        pattern, segments=segments, prefix_lengths=array([2]), global_positions=array([[3]])
    )
    assert_sees(mask, drawing("xx..", "xx..", "..x.", "..xx"))


def test_key_segments() -> None:
    mask = Mask(segments=array([[1, 2, 0]]), key_segments=array([[2, 1, 0, 1]]))
    assert_sees(mask, drawing(".x.x", "x...", "...."))


def test_positions_and_segments_of_other_keys() -> None:
    mask = Mask(MaskPattern(causal=True), positions=array([[2, 5]]), segments=array([[1, 1]]))
    assert_sees(
        mask.with_keys(array([[5, 3, 2, 0]]), array([[1, 1, 0, 1]])), drawing("...x", "xx.x")
    )


def test_default_positions_of_other_keys_start_at_0() -> None:
    mask = Mask(MaskPattern(causal=True), positions=array([[1, 3]]))
    assert_sees(mask, drawing("xx...", "xxxx."))


def test_allowed_array() -> None:
    """Any M in {0, -inf}, for each example or for all."""
    first, second = drawing(".xx", "x.x", "..."), drawing("xxx", "..x", "x..")
    causal = np.tri(3, dtype=bool)
    assert_sees(Mask(allowed=array([first, second])), first, second)
    assert_sees(Mask(MaskPattern(causal=True), allowed=array([first])), first & causal)


def test_allowed_array_overrides_prefix_and_globals() -> None:
    hidden = array([drawing("xxx", "xx.", "...")])
    mask = Mask(
        MaskPattern(prefix=True),
        prefix_lengths=array([3]),
        global_positions=array([[2]]),
        allowed=hidden,
    )
    assert_sees(mask, hidden[0])


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


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (MaskPattern, dict(window=-1)),
        (MaskPattern, dict(dilation=0)),
    ],
)
def test_settings_are_checked(config: Any, fields: dict[str, Any]) -> None:
    assert_refused(config, fields)
