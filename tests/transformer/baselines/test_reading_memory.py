"""Recurrent decoders with attention to a memory, against their formulas, with packed documents."""

from typing import Any

import numpy as np
import pytest

from tests.transformer.baselines import formulas
from tests.transformer.formulas import array, assert_close, normal
from tests.transformer.mixers import apply_mixer, axes, make_mixer
from transformer import Hardware, Mask, MaskPattern, MixerConfig
from transformer.attention.scores import AdditiveScore, BilinearScore, DotScore
from transformer.baselines.bahdanau import BahdanauConfig
from transformer.baselines.lstm_seq2seq import Seq2SeqConfig
from transformer.baselines.luong import LuongConfig
from transformer.baselines.memory_attention import first_visible, last_visible, memory_mask
from transformer.testing.contract import check_cross, check_mixer, check_segments
from transformer.testing.mixer_under_test import make_trial

B, T, S, D, H, A = 2, 7, 6, 5, 3, 4
SEGMENTS = array([[1, 1, 1, 2, 2, 0, 0], [0, 4, 4, 4, 4, 4, 4]])
MEMORY_SEGMENTS = array([[2, 2, 2, 2, 1, 1], [4, 4, 4, 0, 0, 0]])
DOCUMENTS = ((0, 1), (0, 2), (1, 4))
MASK = Mask(MaskPattern(ordered=False), segments=SEGMENTS, key_segments=MEMORY_SEGMENTS)
WEIGHTS = frozenset({"weights"})
ATTENTIONAL = {
    "bahdanau": BahdanauConfig(hidden_size=H, score_size=A),
    "dot": LuongConfig(score=DotScore()),
    "general": LuongConfig(hidden_size=H),
    "concat": LuongConfig(hidden_size=H, score=AdditiveScore(A)),
}
ONE = np.zeros((1, 1, D), np.float32)


@pytest.mark.full
@pytest.mark.parametrize("name", ATTENTIONAL)
def test_recurrent_attention_matches_formula(name: str) -> None:
    config = ATTENTIONAL[name]
    mixer, params = make_mixer(config, D, memory=ONE)
    formula: Any = formulas.bahdanau if name == "bahdanau" else formulas.luong
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    output = apply_mixer(mixer, params, x, WEIGHTS, memory=memory, mask=MASK)
    y, weights = np.asarray(output.y), np.zeros((B, 1, T, S))
    for row, document in DOCUMENTS:
        target, source = SEGMENTS[row] == document, MEMORY_SEGMENTS[row] == document
        expected, expected_weights = formula(x[row, target], memory[row, source], params)
        assert_close(y[row, target], expected)
        weights[row, 0][np.ix_(target, source)] = expected_weights
    assert_close(output.aux["weights"], weights)
    output = apply_mixer(mixer, params, x, memory=memory)
    alone = np.stack([formula(*both, params)[0] for both in zip(x, memory, strict=True)])
    assert_close(output.y, alone)
    assert output.aux == {}


def test_seq2seq_matches_formula() -> None:
    mixer, params = make_mixer(Seq2SeqConfig(), D, memory=ONE)
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    y = np.asarray(apply_mixer(mixer, params, x, memory=memory, mask=MASK).y)
    for row, document in DOCUMENTS:
        target, source = SEGMENTS[row] == document, MEMORY_SEGMENTS[row] == document
        assert_close(y[row, target], formulas.seq2seq(x[row, target], memory[row, source], params))
    y = apply_mixer(mixer, params, x, memory=memory).y
    assert_close(y, np.stack([formulas.seq2seq(*each, params) for each in zip(x, memory)]))  # noqa: B905


@pytest.mark.full
def test_first_and_last_visible_positions() -> None:
    visible = memory_mask(MASK, T, S)
    assert visible.shape == (B, T, S)
    assert not memory_mask(MASK, T, S)[0, 5].any()
    memory: Any = np.arange(B * S).reshape(B, S, 1) + 1
    firsts, lasts = (
        np.asarray(each(memory, visible))[..., 0] for each in (first_visible, last_visible)
    )
    assert firsts.tolist() == [[5, 5, 5, 1, 1, 0, 0], [0, 7, 7, 7, 7, 7, 7]]
    assert lasts.tolist() == [[6, 6, 6, 4, 4, 0, 0], [0, 9, 9, 9, 9, 9, 9]]
    lengths = Mask(key_lengths=array([2, 6]))
    assert np.asarray(last_visible(memory, memory_mask(lengths, 1, S))).ravel().tolist() == [2, 12]


@pytest.mark.full
def test_contract_with_additive_score() -> None:
    check_mixer(ATTENTIONAL["concat"], d_model=6, length=17, lengths=(1, 17, 23))


@pytest.mark.full
def test_contract_detects_a_mixer_that_ignores_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = lambda scores, visible, values, dtype: (0 * values[:, 0], 0 * scores)  # noqa: E731
    nothing = lambda memory, visible: first_visible(0 * memory, visible)  # noqa: E731
    monkeypatch.setattr("transformer.baselines.bahdanau.attend_with_scores", silent)
    monkeypatch.setattr("transformer.baselines.bahdanau.first_visible", nothing)
    with pytest.raises(AssertionError, match="cross: the result does not depend on the memory"):
        check_cross(make_trial(BahdanauConfig(hidden_size=2), 6, 9, (1,), Hardware()))


@pytest.mark.full
def test_contract_detects_a_mixer_that_reads_memory_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything: Any = lambda mask, queries, size: np.ones((1, queries, size), bool)  # noqa: E731
    monkeypatch.setattr("transformer.baselines.memory_attention.memory_mask", everything)
    trial = make_trial(LuongConfig(hidden_size=2), 6, 9, (1,), Hardware())
    with pytest.raises(AssertionError, match="cross: padding of the memory changes the result"):
        check_cross(trial)
    with pytest.raises(AssertionError, match="segments: document 1 gives other results"):
        check_segments(trial)


def test_logical_axes() -> None:
    names = axes(ATTENTIONAL["bahdanau"], D, memory=ONE)
    assert names["gates"] == ("state", "gates", "hidden")
    assert names["context"] == ("embed", "gates", "hidden")
    assert names["score_vector"] == ("score",)
    assert names["output_state"] == ("state", "pieces", "hidden")
    names = axes(ATTENTIONAL["general"], D, memory=ONE)
    assert names["feed"] == ("embed", "gates", "hidden")
    assert names["combine"] == ("both", "hidden")
    assert names["score_key"] == ("embed", "score")


@pytest.mark.parametrize("config", [Seq2SeqConfig(), BahdanauConfig(), LuongConfig()])
def test_missing_memory_raises(config: MixerConfig) -> None:
    mixer, params = make_mixer(config, D, memory=ONE)
    with pytest.raises(ValueError, match=f"^mixer {config.kind}: has no memory to read"):
        apply_mixer(mixer, params, normal(0, B, T, D))


def test_settings_and_caches_that_do_not_fit_raise() -> None:
    with pytest.raises(ValueError, match="the dot score needs states as wide"):
        LuongConfig(hidden_size=3, score=DotScore()).check_d_model(D)
    LuongConfig(hidden_size=D, score=DotScore()).check_d_model(D)
    LuongConfig(hidden_size=3, score=BilinearScore()).check_d_model(D)
    mixer, _ = make_mixer(LuongConfig(), D, memory=ONE)
    with pytest.raises(ValueError, match="its cache is one for a memory"):
        mixer.init_cache(B, T)
