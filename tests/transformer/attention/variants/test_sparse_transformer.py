"""Sparse Transformer's attention is softmax attention under its patterns."""

from typing import Any, cast

import jax
import numpy as np
import pytest

from tests.transformer.formulas import Array, array
from tests.transformer.mixers import (
    assert_chunks_match_full_pass,
    assert_matches_dense,
    project_and_select,
)
from transformer import Hardware, Mask, MaskPattern, RoPE, SparseTransformerConfig
from transformer.attention.masks import dense_mask
from transformer.attention.projections import QKV
from transformer.attention.variants.sparse_transformer import (
    pattern_mask,
    sparse_transformer_visible_keys,
)
from transformer.testing.contract import pack_two_documents
from transformer.testing.mixer_under_test import Trial, make_trial

T = 67


def trial_of(config: SparseTransformerConfig, length: int = T) -> Trial:
    return make_trial(config, 12, length, (length,), Hardware())


KINDS: list[dict[str, Any]] = [
    dict(pattern="strided", stride=5),
    dict(pattern="fixed", stride=5, num_summary_tokens=2),
    dict(pattern="strided", stride=7, factorization="heads"),
    dict(pattern="fixed", stride=7, num_summary_tokens=3, factorization="heads"),
    dict(pattern="strided", stride=6, factorization="far"),
    dict(pattern="fixed", stride=6, num_summary_tokens=1, factorization="far"),
    dict(pattern="fixed", stride=8, factorization="local"),
]


def test_patterns_by_hand() -> None:
    """Queries 0 to 8 with a stride of three, as in figure 3 of the paper."""
    index = array([np.arange(9)])

    def rows(pattern: Any, component: Any) -> list[list[int]]:
        config = SparseTransformerConfig(pattern=pattern, stride=3, num_summary_tokens=1)
        visible = np.tril(np.asarray(pattern_mask(config, component, index, index))[0])
        return [np.flatnonzero(row).tolist() for row in visible]

    assert rows("strided", "local")[8] == [5, 6, 7, 8]
    assert rows("strided", "far")[8] == [2, 5, 8]
    assert rows("strided", "merged")[7] == [1, 4, 5, 6, 7]
    assert rows("fixed", "local")[7] == [6, 7]
    assert rows("fixed", "far")[7] == [2, 5]
    assert rows("fixed", "merged")[8] == [2, 5, 6, 7, 8]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_flops_count_visible_keys(kind: dict[str, Any]) -> None:
    config = SparseTransformerConfig(num_heads=4, **kind)
    trial = trial_of(config)
    mixer, inputs = cast(Any, trial.mixer), trial.mixer_inputs(T)
    select = jax.jit(lambda x: mixer.select(QKV(x, x, x), inputs))
    visible = np.asarray(select(trial.inputs(0)))[0]
    counted = sparse_transformer_visible_keys(config, T)
    assert counted.causal == pytest.approx(np.tril(visible).sum(-1).mean())
    if kind["pattern"] == "strided":  # of the fixed pattern it is an estimate
        assert counted.bidirectional == pytest.approx(visible.sum(-1).mean())


def assert_matches_pattern(trial: Trial, mask: Mask, positions: Array) -> None:
    x, inputs = trial.inputs(0), trial.mixer_inputs(trial.length, mask=mask, positions=positions)
    _, selected = project_and_select(trial.mixer, trial.params, x, inputs)
    visible = selected & np.asarray(dense_mask(mask, trial.length, trial.length))[:, None]
    assert_matches_dense(trial.mixer, trial.params, x, inputs, visible)


@pytest.mark.sampled("'stride': 5, 'num_summary_tokens': 2}-True")
@pytest.mark.parametrize(
    ("kind", "causal"),
    [(kind, True) for kind in KINDS] + [(KINDS[each], False) for each in (0, 1, 4, 5)],
    ids=str,
)
def test_matches_dense_attention_under_its_pattern(kind: dict[str, Any], causal: bool) -> None:
    """With packed documents and padding, at a length that is not a multiple of the stride."""
    segments, positions = map(array, pack_two_documents(T))
    mask = Mask(MaskPattern(causal=causal), positions=positions, segments=segments)
    trial = trial_of(SparseTransformerConfig(num_heads=4, **kind))
    assert_matches_pattern(trial, mask, positions)


@pytest.mark.full
def test_padding_by_lengths_is_hidden() -> None:
    trial = trial_of(SparseTransformerConfig(num_heads=4, **KINDS[1]))
    x, lengths = trial.inputs(0), array([T, 23, 1])
    is_token = np.arange(T)[None, :, None] < lengths[:, None, None]
    others = np.where(is_token, x, 100 * trial.inputs(1))
    before, after = (trial(each, mask=Mask(key_lengths=lengths)).y for each in (x, others))
    assert np.array_equal(np.where(is_token, before, 0), np.where(is_token, after, 0))


@pytest.mark.full
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("pattern", "length", "offset"), [("strided", 70, 40), ("fixed", 70, 40), ("fixed", 24, 40)]
)
def test_positions_may_start_anywhere(pattern: Any, length: int, offset: int, causal: bool) -> None:
    """A row that starts and ends among the last tokens of a block has more of them than others do.

    So does a row whose first document does not start at position 0.
    """
    trial = trial_of(
        SparseTransformerConfig(num_heads=2, pattern=pattern, stride=16, num_summary_tokens=8),
        length,
    )
    first = length // 2 - 1
    alone = offset + np.arange(length)[None]
    packed = np.where(np.arange(length) < first, alone, np.arange(length) - first)
    documents = array(1 + (np.arange(length)[None] >= first))
    for positions, segments in ((alone, None), (packed, documents)):
        mask = Mask(MaskPattern(causal=causal), positions=array(positions), segments=segments)
        assert_matches_pattern(trial, mask, positions)


@pytest.mark.sampled("kind0")
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]])
def test_chunked_prefill_matches_full_pass(kind: dict[str, Any]) -> None:
    """Queries attend to the cache in blocks, the last of which is not full."""
    config = SparseTransformerConfig(num_heads=4, num_kv_heads=2, position=RoPE(), **kind)
    assert_chunks_match_full_pass(trial_of(config, 300), (5, 150, 1, 144))
