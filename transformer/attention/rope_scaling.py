"""Scaling of rotary frequencies, for contexts longer than those of training. One class per rule.

Each rule has two members:

- `frequencies(theta, width)`, the frequency of each pair of entries;
- `amplitude`, a factor of the cosines and sines, so of queries and keys each.

The classes are settings: importing this module loads neither JAX nor NumPy.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from transformer.validation import check_at_least, check_choice, check_field_types

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax
    import numpy as np

    from transformer.attention.position_config import RoPE

Frequencies: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
"""Radians per position of each pair [R / 2], known at compile time. float64, as an error of a
frequency is multiplied by the position."""


def unscaled_frequencies(theta: float, width: int) -> Frequencies:  # [R / 2]
    """Return theta^(-2i/R) for a width R (Su et al. 2021, section 3.2.2)."""
    import numpy as np

    exponents = np.arange(0, width, 2, dtype=np.float64) / width
    return np.float64(theta) ** -exponents


@dataclasses.dataclass(frozen=True)
class NoScaling:
    """No scaling: the context is at most that of training."""

    amplitude: ClassVar[float] = 1.0

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        """Return the scaled frequency of each pair, in radians per position."""
        return unscaled_frequencies(theta, width)


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Linear interpolation: position m becomes m / factor (Chen et al. 2023)."""

    factor: float = 4.0
    """Ratio of the new context length to that of training."""
    amplitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_at_least("linear_scaling.factor", self.factor, 1)

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        """Return the scaled frequency of each pair, in radians per position."""
        return unscaled_frequencies(theta, width) / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rule: interpolate slow pairs and keep fast ones.

    A pair is fast if it makes many turns within the context of training. The rule is
    `apply_scaling` of the published code: NTK-by-parts (Peng et al. 2023, definition 2) with other
    bounds.
    """

    factor: float = 8.0
    """Divisor of the frequencies of slow pairs."""
    low_freq_factor: float = 1.0
    """Pairs with fewer turns than this are slow."""
    high_freq_factor: float = 4.0
    """Pairs with more turns than this are fast. In between, both frequencies are mixed."""
    original_max_length: int = 8192
    """Context length of training, in tokens."""
    amplitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_field_types(self, "llama3_scaling")
        check_at_least("llama3_scaling.factor", self.factor, 1)
        check_at_least("llama3_scaling.original_max_length", self.original_max_length, 1)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"llama3_scaling.low_freq_factor {self.low_freq_factor}: give more than 0 and less "
                f"than high_freq_factor, {self.high_freq_factor}"
            )

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        """Return the scaled frequency of each pair, in radians per position."""
        import numpy as np

        plain = unscaled_frequencies(theta, width)
        turns = self.original_max_length * plain / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        unscaled = np.clip((turns - low) / (high - low), 0, 1)  # fraction
        return unscaled * plain + (1 - unscaled) * plain / self.factor


@dataclasses.dataclass(frozen=True)
class NTKScaling:
    """NTK-aware interpolation: a larger base, theta * factor^(R / (R - 2)).

    The fastest pair keeps its frequency and the slowest becomes `factor` times slower (bloc97 2023;
    Peng et al. 2023, definition 1).
    """

    factor: float = 4.0
    """Ratio of the new context length to that of training."""
    amplitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_at_least("ntk_scaling.factor", self.factor, 1)

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
class YaRNScaling:
    """YaRN: keep fast pairs, interpolate slow ones, sharpen scores (Peng et al. 2023, section 3.4).

    Pairs in between are mixed by a linear ramp over the index of the pair, with bounds rounded to
    integers, as in the authors' code and the models trained with it. The paper's own ramp (section
    3.2) is linear in the turns of a pair.
    """

    factor: float = 4.0
    """s, ratio of the new context length to that of training."""
    original_max_length: int = 4096
    """L, context length of training, in tokens."""
    beta_fast: float = 32.0
    """beta: pairs with more turns within L keep their frequency."""
    beta_slow: float = 1.0
    """alpha: pairs with fewer turns within L are interpolated."""
    attention_factor: float = 0.0
    """sqrt(1/t), a factor of queries and of keys. 0: 0.1 ln(s) + 1."""
    round_bounds: bool = True
    """Round the ramp's bounds to integers. gpt-oss does not."""

    def __post_init__(self) -> None:
        check_field_types(self, "yarn_scaling")
        check_at_least("yarn_scaling.factor", self.factor, 1)
        check_at_least("yarn_scaling.original_max_length", self.original_max_length, 1)
        check_at_least("yarn_scaling.attention_factor", self.attention_factor, 0)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"yarn_scaling.beta_slow {self.beta_slow}: give more than 0 and less than "
                f"beta_fast, {self.beta_fast}"
            )

    @property
    def amplitude(self) -> float:
        """Factor of queries and of keys."""
        return self.attention_factor or 0.1 * math.log(self.factor) + 1

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        """Return the scaled frequency of each pair, in radians per position."""
        import numpy as np

        plain = unscaled_frequencies(theta, width)
        first, last = (
            self._pair_with_turns(turns, theta, width) for turns in (self.beta_fast, self.beta_slow)
        )
        if self.round_bounds:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        pairs = np.arange(width // 2)
        interpolated = np.clip((pairs - first) / max(last - first, 1e-3), 0, 1)
        return (1 - interpolated) * plain + interpolated * plain / self.factor

    def _pair_with_turns(self, turns: float, theta: float, width: int) -> float:
        """Solve L theta^(-2i/R) = 2 pi turns for i."""
        length = self.original_max_length
        return width * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))


LongRoPEFactors = Literal["by_length", "short", "long"]


@dataclasses.dataclass(frozen=True)
class LongRoPEScaling:
    """LongRoPE: a divisor for each pair, found by search (Ding et al. 2024, section 3).

    There are two sets of divisors, for inputs up to the context length of training and for longer
    ones (Abdin et al. 2024, Phi-3, section 2).
    """

    short_factors: tuple[float, ...] = ()
    """Divisor of each of the R / 2 frequencies, in inputs up to `original_max_length`."""
    long_factors: tuple[float, ...] = ()
    """Divisors in longer inputs."""
    original_max_length: int = 4096
    """Context length of training, in tokens."""
    amplitude: float = 1.0
    """Factor of queries and of keys. In Phi-3 sqrt(1 + ln(s) / ln(original_max_length)), where s is
    the ratio of the new context length to that of training."""
    factors: LongRoPEFactors = "by_length"
    """Divisors to use. `by_length`: as the last position of a row says, which cannot work once
    keys are cached: caches longer than `original_max_length` need `long`."""

    def __post_init__(self) -> None:
        check_field_types(self, "long_rope_scaling")
        check_at_least("long_rope_scaling.original_max_length", self.original_max_length, 1)
        check_choice("long_rope_scaling.factors", self.factors, get_args(LongRoPEFactors))
        if len(self.short_factors) != len(self.long_factors):
            raise ValueError(
                f"long_rope_scaling.long_factors: has {len(self.long_factors)} numbers, and "
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
                    f"long_rope_scaling.{name} {min(values)}: is not positive; give numbers above 0"
                )

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        """Return the frequencies of long inputs if `factors` is long, else those of short ones."""
        import numpy as np

        factors = self.long_factors if self.factors == "long" else self.short_factors
        if len(factors) != width // 2:
            raise ValueError(
                f"long_rope_scaling: has {len(factors)} factors and a head {width // 2} rotated "
                "pairs; give one for each pair"
            )
        return unscaled_frequencies(theta, width) / np.asarray(factors, np.float64)


RopeScaling = NoScaling | LinearScaling | NTKScaling | YaRNScaling | Llama3Scaling | LongRoPEScaling
"""Any of the rules."""


def long_rope_angles(
    positions: jax.Array,  # [B, T]
    rotary_dim: int,  # R
    config: RoPE,
    angles_of: Callable[[jax.Array, int, RoPE], jax.Array],  # for one set of factors
) -> jax.Array:  # [B, T, R / 2] float32
    """Return angles by the short factors, or by the long ones in rows longer than training.

    A row's last position decides for all of it: the score of a query and a key depends on their
    distance alone only if both are rotated by the same frequencies.
    """
    import jax.numpy as jnp

    scaling = config.scaling
    assert isinstance(scaling, LongRoPEScaling)  # checked by the caller
    is_long = jnp.max(positions, axis=-1)[:, None, None] >= scaling.original_max_length
    rules = (
        dataclasses.replace(config, scaling=dataclasses.replace(scaling, factors=factors))
        for factors in ("long", "short")
    )
    long, short = (angles_of(positions, rotary_dim, rule) for rule in rules)
    return jnp.where(is_long, long, short)
