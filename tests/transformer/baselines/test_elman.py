"""Elman's recurrent network against its formula and PyTorch's, and the size of its gradients."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.fixtures.recurrent import LENGTHS, WIDTH, inputs
from tests.fixtures.tiny import drawn
from tests.transformer.baselines import formulas
from tests.transformer.formulas import array, assert_close, normal
from tests.transformer.mixers import apply_mixer, axes, make_mixer
from transformer import Mask, MaskPattern
from transformer.attention.mixer import MixerInputs
from transformer.baselines.baseline_configs import ElmanConfig
from transformer.testing.contract import check_mixer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "recurrent.npz"
B, T, D, H = 2, 7, 5, 3


@pytest.mark.parametrize("depth", [1, 3])
def test_matches_formula(depth: int) -> None:
    mixer, params = make_mixer(ElmanConfig(hidden_size=H, transition_depth=depth), D)
    x = normal(1, B, T, D)
    y = apply_mixer(mixer, params, x, mask=Mask(MaskPattern(causal=True))).y
    states = np.stack([formulas.elman(row, params, depth) for row in x])
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


@pytest.mark.parametrize("scale", [0.5, 1.5], ids=["vanishes", "explodes"])
def test_gradient_vanishes_or_explodes_with_distance(scale: float) -> None:
    """Around zero, a recurrent matrix with one singular value multiplies the gradient by it at each
    step.
    """
    mixer, params = make_mixer(ElmanConfig(), D)
    turn = np.linalg.qr(normal(2, D, D))[0]
    params = params | {"recurrent": scale * turn, "input": np.eye(D), "input_bias": np.zeros(D)}
    params = jax.tree.map(np.float32, params)

    def last(x: jax.Array) -> Any:
        positions: Any = np.arange(T)[None]
        return mixer.apply({"params": params}, x, MixerInputs(positions, Mask()))[0][0, -1, 0]

    gradient = np.asarray(jax.jit(jax.grad(last))(np.zeros((1, T, D), np.float32)))[0]
    assert_close(np.linalg.norm(gradient, axis=-1)[::-1], scale ** np.arange(T))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": -3}, "elman.hidden_size -3: give 0 or more"),
        ({"transition_depth": 0}, "elman.transition_depth 0: give 1 or more"),
    ],
)
def test_invalid_fields_raise(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        ElmanConfig(**fields)
