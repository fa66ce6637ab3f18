"""RoPE scaling for longer contexts, against Hugging Face."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.fixtures.positions import ROTARY
from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.refused import assert_refused
from transformer import LinearScaling, Llama3Scaling, NoScaling, NTKScaling, RoPE, YaRNScaling
from transformer.attention.rope import apply_rope as rotate_eagerly
from transformer.attention.rope_scaling import RopeScaling

rotate = jax.jit(rotate_eagerly, static_argnums=2)

FIXTURES = Path(__file__).parents[2] / "fixtures" / "positions.npz"

SCALINGS: dict[str, RopeScaling] = {
    "plain": NoScaling(),
    "linear": LinearScaling(3.0),
    "ntk": NTKScaling(5.0),
    "yarn": YaRNScaling(4.0, 4096),
    "yarn of other bounds": YaRNScaling(
        7.0, 64, beta_fast=5.0, beta_slow=2.0, attention_factor=1.25
    ),
    "llama3": Llama3Scaling(8.0, 1.0, 4.0, 8192),
    "llama3 of other bounds": Llama3Scaling(3.0, 2.0, 11.0, 512),
}


def frequencies(config: RopeScaling, base: float, width: int) -> Array:  # [R / 2]
    return np.asarray(jax.jit(config.frequencies, static_argnums=(0, 1))(base, width))


def linear(config: LinearScaling, base: float, width: int) -> list[float]:
    return [base ** (-2 * i / width) / config.factor for i in range(width // 2)]


def ntk(config: NTKScaling, base: float, width: int) -> list[float]:
    larger = base * config.factor ** (width / (width - 2))
    return [larger ** (-2 * i / width) for i in range(width // 2)]


def yarn(config: YaRNScaling, base: float, width: int) -> list[float]:
    """Return YaRN's frequencies: a linear ramp between two pair indices mixes plain and scaled
    ones.
    """

    def pair(turns: float) -> float:
        return width / 2 * math.log(config.original_max_length / (2 * math.pi * turns), base)

    start, end = max(0, math.floor(pair(config.beta_fast))), math.ceil(pair(config.beta_slow))
    frequencies_of_pairs = []
    for i in range(width // 2):
        plain = base ** (-2 * i / width)
        ramp = min(1.0, max(0.0, 1 - (i - start) / (end - start)))
        frequencies_of_pairs.append(ramp * plain + (1 - ramp) * plain / config.factor)
    return frequencies_of_pairs


def llama3(config: Llama3Scaling, base: float, width: int) -> list[float]:
    """Return Llama 3's frequencies, by wavelength as in the published code."""
    frequencies_of_pairs = []
    for i in range(width // 2):
        plain = base ** (-2 * i / width)
        wavelength = 2 * math.pi / plain
        if wavelength < config.original_max_length / config.high_freq_factor:
            frequencies_of_pairs.append(plain)
        elif wavelength > config.original_max_length / config.low_freq_factor:
            frequencies_of_pairs.append(plain / config.factor)
        else:
            smooth = (config.original_max_length / wavelength - config.low_freq_factor) / (
                config.high_freq_factor - config.low_freq_factor
            )
            frequencies_of_pairs.append((1 - smooth) * plain / config.factor + smooth * plain)
    return frequencies_of_pairs


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_match_hugging_face(name: str) -> None:
    config, case = SCALINGS[name], ROTARY[name]
    fixtures = np.load(FIXTURES)
    actual = frequencies(config, case.base, case.width)
    assert_close(actual / fixtures[f"rotary/{name}"], np.ones(case.width // 2))
    assert config.amplitude == pytest.approx(float(fixtures[f"factor/{name}"]))


def test_yarn_attention_factor() -> None:
    """Queries and keys are each multiplied by sqrt(1/t) = 0.1 ln(s) + 1."""
    assert YaRNScaling(1.0).amplitude == 1
    assert YaRNScaling(16.0).amplitude == pytest.approx(0.1 * math.log(16) + 1)
    x = normal(0, 2, 5, 3, 14)
    y = rotate(x, array([[0, 1, 2, 3, 4]]), RoPE(scaling=YaRNScaling(16.0)))
    assert_close(np.linalg.norm(y, axis=-1), (0.1 * math.log(16) + 1) * np.linalg.norm(x, axis=-1))


def test_ntk_requires_two_pairs() -> None:
    with pytest.raises(ValueError, match=r"^rope.scaling NTKScaling: needs 4 rotated entries"):
        NTKScaling(2.0).frequencies(10_000.0, 2)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (LinearScaling, dict(factor=0.5)),
        (NTKScaling, dict(factor=0.5)),
        (YaRNScaling, dict(original_max_length=0)),
        (YaRNScaling, dict(beta_slow=32.0)),
        (Llama3Scaling, dict(low_freq_factor=0.0)),
    ],
)
def test_settings_are_checked(config: Any, fields: dict[str, Any]) -> None:
    assert_refused(config, fields)
