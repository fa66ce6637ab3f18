"""Elman's recurrent network against its formula and PyTorch's."""

from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.recurrent import LENGTHS, WIDTH, inputs
from tests.fixtures.tiny import drawn
from tests.transformer.baselines import formulas
from tests.transformer.formulas import array, assert_close, normal
from tests.transformer.mixers import apply_mixer, axes, make_mixer
from transformer import Mask, MaskPattern
from transformer.baselines.recurrent import ElmanConfig
from transformer.testing.contract import check_mixer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "recurrent.npz"
B, T, D, H = 2, 7, 5, 3


def test_matches_formula() -> None:
    mixer, params = make_mixer(ElmanConfig(hidden_size=H, transition_depth=3), D)
    x = normal(1, B, T, D)
    y = apply_mixer(mixer, params, x, mask=Mask(MaskPattern(causal=True))).y
    states = np.stack([formulas.elman(row, params, 3) for row in x])
    assert_close(y, states @ params["output"] + params["output_bias"])


@pytest.mark.full
def test_contract_with_a_deep_transition() -> None:
    check_mixer(
        ElmanConfig(hidden_size=7, transition_depth=2), d_model=6, length=17, lengths=(1, 17, 23)
    )


def test_states_match_pytorch() -> None:
    mixer, _ = make_mixer(ElmanConfig(), WIDTH)
    square = {part: drawn(f"rnn.weight_{part}_l0", (WIDTH, WIDTH)) for part in ("ih", "hh")}
    biases = [drawn(f"rnn.bias_{part}_l0", (WIDTH,)) for part in ("ih", "hh")]
    params = {"input": square["ih"].T, "recurrent": square["hh"].T, "input_bias": sum(biases)}
    y = apply_mixer(mixer, params, inputs(), mask=Mask(key_lengths=array(LENGTHS))).y
    is_token = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    with np.load(FIXTURES) as expected:
        assert_close(np.asarray(y)[is_token], expected["rnn"][is_token])
    assert not np.asarray(y)[~is_token].any()


def test_logical_axes() -> None:
    assert axes(ElmanConfig(transition_depth=2), D) == {
        "input": ("embed", "hidden"),
        "input_bias": ("hidden",),
        "recurrent": ("state", "hidden"),
        "deeper_1": ("state", "hidden"),
        "deeper_1_bias": ("hidden",),
    }
