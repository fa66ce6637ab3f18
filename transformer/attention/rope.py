"""Rotary position embedding (Su et al. 2021), and scaling of its frequencies for longer contexts.

Each rule of scaling has two members:

- `frequencies(theta, width)`, the frequency of each pair of entries;
- `amplitude`, a factor of the cosines and sines, so of queries and keys each.
"""

import dataclasses
import functools
import math
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from transformer.layers.angles import (
    Frequencies,
    fixed_point_turns,
    unscaled_frequencies,
    wrapped_product,
)
from transformer.validation import (
    Bounds,
    NonNegativeFloat,
    PositiveInt,
    Settings,
)

Stretch = Annotated[float, Bounds(1)]
"""Ratio of a new context length to that of training."""


@dataclasses.dataclass(frozen=True)
class NoScaling:
    """No scaling: the context is at most that of training."""

    amplitude: ClassVar[float] = 1.0

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        """Return the scaled frequency of each pair, in radians per position."""
        return unscaled_frequencies(theta, width)


@dataclasses.dataclass(frozen=True)
class LinearScaling(Settings):
    """Linear interpolation: position m becomes m / factor (Chen et al. 2023)."""

    factor: Stretch = 4.0
    """Ratio of the new context length to that of training."""
    amplitude: ClassVar[float] = 1.0

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        """Return the scaled frequency of each pair, in radians per position."""
        return unscaled_frequencies(theta, width) / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(Settings):
    """Llama 3.1's rule: interpolate slow pairs and keep fast ones.

    A pair is fast if it makes many turns within the context of training. The rule is
    `apply_scaling` of the published code: NTK-by-parts (Peng et al. 2023, definition 2) with other
    bounds.
    """

    factor: Stretch = 8.0
    """Divisor of the frequencies of slow pairs."""
    low_freq_factor: float = 1.0
    """Pairs with fewer turns than this are slow."""
    high_freq_factor: float = 4.0
    """Pairs with more turns than this are fast. In between, both frequencies are mixed."""
    original_max_length: PositiveInt = 8192
    """Context length of training, in tokens."""
    amplitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"Llama3Scaling.low_freq_factor {self.low_freq_factor}: give more than 0 and less "
                f"than high_freq_factor, {self.high_freq_factor}"
            )

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        """Return the scaled frequency of each pair, in radians per position."""
        plain = unscaled_frequencies(theta, width)
        turns = self.original_max_length * plain / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        unscaled = np.clip((turns - low) / (high - low), 0, 1)  # fraction
        return unscaled * plain + (1 - unscaled) * plain / self.factor


@dataclasses.dataclass(frozen=True)
class NTKScaling(Settings):
    """NTK-aware interpolation: a larger base, theta * factor^(R / (R - 2)).

    The fastest pair keeps its frequency and the slowest becomes `factor` times slower (bloc97 2023;
    Peng et al. 2023, definition 1).
    """

    factor: Stretch = 4.0
    """Ratio of the new context length to that of training."""
    amplitude: ClassVar[float] = 1.0

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        """Return the scaled frequency of each pair, in radians per position."""
        # A single pair would be the fastest and the slowest at once.
        if width < 4:
            raise ValueError(
                f"rope.scaling NTKScaling: needs 4 rotated entries or more, not {width}; "
                "give wider heads, or LinearScaling"
            )
        return unscaled_frequencies(theta * self.factor ** (width / (width - 2)), width)


@dataclasses.dataclass(frozen=True)
class YaRNScaling(Settings):
    """YaRN: keep fast pairs, interpolate slow ones, sharpen scores (Peng et al. 2023, section 3.4).

    Pairs in between are mixed by a linear ramp over the index of the pair, with bounds rounded to
    integers, as in the authors' code and the models trained with it. The paper's own ramp (section
    3.2) is linear in the turns of a pair.
    """

    factor: Stretch = 4.0
    """s, ratio of the new context length to that of training."""
    original_max_length: PositiveInt = 4096
    """L, context length of training, in tokens."""
    beta_fast: float = 32.0
    """beta: pairs with more turns within L keep their frequency."""
    beta_slow: float = 1.0
    """alpha: pairs with fewer turns within L are interpolated."""
    attention_factor: NonNegativeFloat = 0.0
    """sqrt(1/t), a factor of queries and of keys. 0: 0.1 ln(s) + 1, or as `mscale` says."""
    mscale: NonNegativeFloat = 0.0
    """m: with `mscale_all_dim` M, the factor is (0.1 m ln(s) + 1) / (0.1 M ln(s) + 1), unless
    `attention_factor` gives it (DeepSeek-V2). 0: no such rule."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """M: in latent attention all scores, also of entries that are not rotated, have the factor
    (0.1 M ln(s) + 1)^2. 0: no factor."""
    round_bounds: bool = True
    """Round the ramp's bounds to integers. gpt-oss does not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"YaRNScaling.beta_slow {self.beta_slow}: give more than 0 and less than "
                f"beta_fast, {self.beta_fast}"
            )
        if self.mscale and not self.mscale_all_dim:
            raise ValueError(
                f"YaRNScaling.mscale {self.mscale}: has an effect only beside mscale_all_dim; give "
                "both, or attention_factor"
            )

    @property
    def amplitude(self) -> float:
        """Factor of queries and of keys."""
        if self.attention_factor:
            return self.attention_factor
        if self.mscale:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def score_factor(self) -> float:
        """Factor of all scores of latent attention."""
        return self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        """Return the scaled frequency of each pair, in radians per position."""
        plain = unscaled_frequencies(theta, width)
        ramp_start = self._pair_with_turns(self.beta_fast, theta, width)
        ramp_end = self._pair_with_turns(self.beta_slow, theta, width)
        if self.round_bounds:
            ramp_start = math.floor(ramp_start)
            ramp_end = math.ceil(ramp_end)
        ramp_start = max(ramp_start, 0)
        ramp_end = min(ramp_end, width - 1)
        pairs = np.arange(width // 2)
        interpolated = np.clip((pairs - ramp_start) / max(ramp_end - ramp_start, 1e-3), 0, 1)
        return (1 - interpolated) * plain + interpolated * plain / self.factor

    def _pair_with_turns(self, turns: float, theta: float, width: int) -> float:
        """Solve L theta^(-2i/R) = 2 pi turns for i."""
        length = self.original_max_length
        return width * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))


LongRoPEFactors = Literal["by_length", "short", "long"]


@dataclasses.dataclass(frozen=True)
class LongRoPEScaling(Settings):
    """LongRoPE: a divisor for each pair, found by search (Ding et al. 2024, section 3).

    There are two sets of divisors, for inputs up to the context length of training and for longer
    ones (Abdin et al. 2024, Phi-3, section 2).
    """

    short_factors: tuple[float, ...] = ()
    """Divisor of each of the R / 2 frequencies, in inputs up to `original_max_length`."""
    long_factors: tuple[float, ...] = ()
    """Divisors in longer inputs."""
    original_max_length: PositiveInt = 4096
    """Context length of training, in tokens."""
    amplitude: float = 1.0
    """Factor of queries and of keys. In Phi-3 sqrt(1 + ln(s) / ln(original_max_length)), where s is
    the ratio of the new context length to that of training."""
    factors: LongRoPEFactors = "by_length"
    """Divisors to use. `by_length`: as the last position of a row says, which cannot work once
    keys are cached: caches longer than `original_max_length` need `long`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.short_factors) != len(self.long_factors):
            raise ValueError(
                f"LongRoPEScaling.long_factors: has {len(self.long_factors)} numbers, and "
                f"short_factors has {len(self.short_factors)}; give one in each for each rotated "
                "pair"
            )
        for name, values in (
            ("short_factors", self.short_factors),
            ("long_factors", self.long_factors),
            ("amplitude", (self.amplitude,)),
        ):
            if any(not value > 0 for value in values):
                raise ValueError(
                    f"LongRoPEScaling.{name} {min(values)}: is not positive; give numbers above 0"
                )

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        """Return the frequencies of long inputs if `factors` is long, else those of short ones."""
        factors = self.long_factors if self.factors == "long" else self.short_factors
        if len(factors) != width // 2:
            raise ValueError(
                f"LongRoPEScaling: has {len(factors)} factors and a head {width // 2} rotated "
                "pairs; give one for each pair"
            )
        return unscaled_frequencies(theta, width) / np.asarray(factors, np.float64)


RopeScaling = NoScaling | LinearScaling | NTKScaling | YaRNScaling | Llama3Scaling | LongRoPEScaling
"""Any of the rules."""


RopeLayout = Literal["halves", "interleaved"]


@dataclasses.dataclass(frozen=True)
class RoPE(Settings):
    """Rotary position embedding of queries and keys (Su et al. 2021, section 3.2)."""

    theta: Annotated[float, Bounds(above=1)] = 10_000.0
    """Base of the wavelengths, which range from 2 pi to 2 pi * theta positions."""
    fraction: Annotated[float, Bounds(maximum=1, above=0)] = 1.0
    """Fraction of the head width that is rotated, counted from its start."""
    layout: RopeLayout = "halves"
    """Entries that form a pair: `halves` (i, i + R/2), as in Llama's published weights;
    `interleaved` (2i, 2i + 1), as in the paper."""
    scaling: RopeScaling = NoScaling()
    """Frequency scaling for contexts longer than those of training."""

    def rotary_dim(self, head_dim: int) -> int:
        """Return R, the even number of entries of a head that are rotated."""
        return int(head_dim * self.fraction) // 2 * 2


def apply_rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "#B T"],
    config: RoPE,
) -> Float[Array, "B T N H"]:
    """Rotate each pair (a, b) of x by its angle: (a cos - b sin, a sin + b cos)."""
    rotary_dim = config.rotary_dim(x.shape[-1])
    angles = rope_angles(positions, rotary_dim, config)[:, :, None, :]
    # In float32 until here: in bfloat16 an angle near pi is off by up to 0.008 radians.
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    amplitude = config.scaling.amplitude
    if amplitude != 1:  # YaRN: scales queries and keys, so the scores by its square
        cos, sin = cos * amplitude, sin * amplitude
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    # The published weights decide: layouts differ by a permutation of the head's entries.
    if config.layout == "halves":
        a, b = jnp.split(rotated, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        pairs = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
        rotated = pairs.reshape(rotated.shape)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def rope_angles(
    positions: Int[Array, "#B T"],
    rotary_dim: int,  # R
    config: RoPE,
) -> Float32[Array, "#B T half_R"]:  # from -pi to pi
    """Return position * theta^(-2i/R) without whole turns; `config.scaling` may change it."""
    scaling = config.scaling
    if not isinstance(scaling, LongRoPEScaling) or scaling.factors != "by_length":
        return wrapped_product(positions, *_rope_turns(config, rotary_dim))
    # A row's last position decides for all of it: the score of a query and a key depends on their
    # distance alone only if both are rotated by the same frequencies.
    is_long = jnp.max(positions, axis=-1)[:, None, None] >= scaling.original_max_length
    long = dataclasses.replace(config, scaling=dataclasses.replace(scaling, factors="long"))
    short = dataclasses.replace(config, scaling=dataclasses.replace(scaling, factors="short"))
    return jnp.where(
        is_long,
        rope_angles(positions, rotary_dim, long),
        rope_angles(positions, rotary_dim, short),
    )


@functools.cache
def _rope_turns(config: RoPE, rotary_dim: int) -> tuple[np.ndarray, np.ndarray]:
    return fixed_point_turns(config.scaling.frequencies(config.theta, rotary_dim))
