"""Cheng's LSTM with intra-attention, against its formula with lists as tapes."""

import numpy as np

from tests.transformer.baselines import formulas
from tests.transformer.formulas import array, assert_close, normal
from tests.transformer.mixers import apply_mixer, axes, make_mixer
from transformer import BlockConfig, LanguageModel, Mask, MaskPattern, TransformerConfig
from transformer.baselines.cheng import ChengConfig
from transformer.flops import count_token_flops

B, T, D, A = 2, 7, 5, 3
CONFIG = ChengConfig(score_size=A)
SEGMENTS = array([[1, 1, 1, 2, 2, 0, 0], [0, 4, 4, 4, 4, 4, 4]])


def test_matches_formula() -> None:
    mixer, params = make_mixer(CONFIG, D)
    x, causal = normal(1, B, T, D), MaskPattern(causal=True)
    y = apply_mixer(mixer, params, x, mask=Mask(causal)).y
    assert_close(y, np.stack([formulas.cheng(row, params) for row in x]))
    y = np.asarray(apply_mixer(mixer, params, x, mask=Mask(causal, segments=SEGMENTS)).y)
    for row, document in ((0, 1), (0, 2), (1, 4)):
        own = SEGMENTS[row] == document
        assert_close(y[row, own], formulas.cheng(x[row, own], params))


def test_new_document_in_a_used_cache() -> None:
    mixer, params = make_mixer(CONFIG, D)
    x, causal = normal(1, B, T, D), Mask(MaskPattern(causal=True))
    full = np.asarray(apply_mixer(mixer, params, x, mask=causal).y)
    positions = array([[3, 4, 0, 1, 2, 3, 4]])
    old = apply_mixer(
        mixer, params, x, mask=causal, cache=mixer.init_cache(B, 9), positions=positions
    )
    shifted = np.stack([formulas.cheng(row[2:], params) for row in x])
    assert_close(old.y[:, 2:], shifted)
    assert np.abs(np.asarray(old.y) - full)[:, 2:].max() > 1e-2


def test_axes_and_flops() -> None:
    names = axes(CONFIG, D)
    assert names["score_token"] == ("embed", "score")
    assert names["score_query"] == names["score_key"] == ("state", "score")
    block = BlockConfig(mixer=CONFIG, feed_forward=None)
    flops = count_token_flops(
        LanguageModel(
            TransformerConfig(vocab_size=17, d_model=D, num_layers=1, layer_pattern=(block,))
        ),
        T,
    )
    assert flops.projections == 2 * (4 * D * 2 * D + 3 * D * A)
    assert (flops.scores, flops.scores_causal) == (2 * (A + 2 * D) * T, (A + 2 * D) * (T - 1))
