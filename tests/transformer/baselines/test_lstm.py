"""The LSTM against its formula and PyTorch's."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.fixtures.recurrent import LENGTHS, WIDTH, inputs
from tests.fixtures.tiny import drawn
from tests.transformer.baselines import formulas
from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.mixers import apply_mixer, axes, make_mixer
from transformer import Hardware, Mask, MaskPattern
from transformer.attention.document_boundaries import document_boundaries
from transformer.attention.mixer import MixerInputs
from transformer.baselines import recurrent
from transformer.baselines.recurrent import LSTMConfig
from transformer.testing.contract import check_cached, check_mixer
from transformer.testing.mixer_under_test import make_trial

FIXTURES = Path(__file__).parents[2] / "fixtures" / "recurrent.npz"
B, T, D, H = 2, 7, 5, 3
SEGMENTS = array([[1, 1, 1, 2, 2, 0, 0], [0, 4, 4, 4, 4, 4, 4]])


def each_document(x: Array, run: Any) -> Array:  # [B, T, D] -> [B, T, ...]
    """Return `run` applied to each document of SEGMENTS by itself, and zeros elsewhere."""
    y = np.zeros((B, T, run(x[0]).shape[-1]))
    for row, document in ((0, 1), (0, 2), (1, 4)):
        own = SEGMENTS[row] == document
        y[row, own] = run(x[row, own])
    return y


def test_bidirectional_lstm_reads_documents_separately() -> None:
    mixer, params = make_mixer(LSTMConfig(hidden_size=H, bidirectional=True), D)
    x = normal(1, B, T, D)

    def both(x: Array) -> Array:
        ahead = formulas.lstm(x, params["forward"])
        back = formulas.lstm(x[::-1], params["backward"])[::-1]
        return np.concatenate([ahead, back], axis=-1)

    y = apply_mixer(mixer, params, x, mask=Mask(segments=SEGMENTS)).y
    assert_close(y, each_document(x, both) @ params["output"] + params["output_bias"])


@pytest.mark.full
def test_bidirectional_contract() -> None:
    check_mixer(LSTMConfig(bidirectional=True), d_model=6, length=17, lengths=(1, 17, 23))


@pytest.mark.full
def test_contract_detects_a_state_that_reads_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_segments(mask: Mask, positions: Any, **kwargs: Any) -> Any:
        return document_boundaries(mask, abs(positions), **kwargs)

    monkeypatch.setattr(recurrent, "document_boundaries", without_segments)
    message = "^mixer lstm: cached: a token after a padded prompt differs from the full pass"
    with pytest.raises(AssertionError, match=message):
        check_cached(make_trial(LSTMConfig(hidden_size=4), 6, 17, (17,), Hardware()))


def torch_weights(name: str, side: str, width: int, hidden: int) -> dict[str, Array]:
    """Return one direction of the layer `name` in PyTorch's layout: two biases, gates first."""
    shapes = {"weight_ih": (width,), "weight_hh": (hidden,), "bias_ih": (), "bias_hh": ()}
    w = {
        part: drawn(f"{name}.{part}_l0{side}", (4 * hidden, *inputs)).reshape(4, hidden, *inputs)
        for part, inputs in shapes.items()
    }
    return {
        "input": np.moveaxis(w["weight_ih"], -1, 0),
        "recurrent": np.moveaxis(w["weight_hh"], -1, 0),
        "bias": w["bias_ih"] + w["bias_hh"],
    }


@pytest.mark.parametrize("name", ["lstm", "both"])
def test_states_match_pytorch(name: str) -> None:
    both = name == "both"
    mixer, params = make_mixer(LSTMConfig(bidirectional=both), WIDTH)
    hidden = WIDTH // (1 + both)
    params["forward"] = torch_weights(name, "", WIDTH, hidden)
    if both:
        params["backward"] = torch_weights(name, "_reverse", WIDTH, hidden)
    y = apply_mixer(mixer, params, inputs(), mask=Mask(key_lengths=array(LENGTHS))).y
    with np.load(FIXTURES) as expected:
        assert_close(y, expected[name])


def test_axes_and_forget_gate_bias() -> None:
    assert axes(LSTMConfig(hidden_size=H), D) == {
        "forward/input": ("embed", "gates", "hidden"),
        "forward/recurrent": ("state", "gates", "hidden"),
        "forward/bias": ("gates", "hidden"),
        "output": ("hidden", "embed"),
        "output_bias": ("embed",),
    }
    mixer, _ = make_mixer(LSTMConfig(), D)
    x, positions = normal(0, 1, 1, D), np.zeros((1, 1), int)
    start = jax.jit(lambda key: mixer.init(key, x, MixerInputs(array(positions), Mask())))
    bias = start(jax.random.key(0))["params"]["forward"]["bias"]
    assert bias.tolist() == [[0] * D, [1] * D, [0] * D, [0] * D]


def test_causal_mask_of_a_bidirectional_lstm_raises() -> None:
    mixer, params = make_mixer(LSTMConfig(hidden_size=H, bidirectional=True), D)
    with pytest.raises(ValueError, match=r"^mixer lstm: bidirectional reads later tokens"):
        apply_mixer(mixer, params, normal(0, B, T, D), mask=Mask(MaskPattern(causal=True)))


def test_two_directions_share_an_even_width() -> None:
    assert LSTMConfig(bidirectional=True).resolved_hidden_size(6) == 3
    with pytest.raises(ValueError, match="halves the width 5, which is odd"):
        LSTMConfig(bidirectional=True).check_d_model(5)
