"""Performer: softmax attention estimated by random features (Choromanski et al. 2021)."""

import dataclasses
from typing import Any, ClassVar, get_args

import jax
import numpy as np
from flax import linen as nn

from transformer.checks import check_choice, check_least
from transformer.heads import HeadsConfig, join
from transformer.masks import Mask
from transformer.mixers import MIXERS, NOTHING, Abilities, Mixer, MixerOutput, Want
from transformer.positions import NoPosition, Rotary
from transformer.variants.features import FeatureKind, draw_directions, random_features
from transformer.variants.kernel_attention import MemorySums, attend_by_kernel
from transformer.variants.prefix_sums import Sums


@dataclasses.dataclass(frozen=True)
class PerformerConfig(HeadsConfig):
    """FAVOR+ (section 2): time and memory linear in T, for an error that falls as 1 / sqrt(M).

    Weights under exp(-40) of what the two tokens' largest features would give may come out larger;
    elsewhere features are as the formulas have them, with factors that cancel taken out.
    Trigonometric features have no such bound: where weights are small their sums come near zero, of
    either sign, and results are far off. They are there to be compared.
    """

    kind: ClassVar[str] = "performer"

    features: int = 128
    """M. More are nearer to softmax, at a cost that grows with them."""
    feature_map: FeatureKind = "positive"
    """Positive or trigonometric features, which estimate softmax, or ReLU, a kernel of its own."""
    orthogonal: bool = True
    """Whether random vectors stand at right angles, in blocks of H: a smaller error."""
    seed: int = 0
    """Of the random vectors, one set for all heads of a layer."""
    redraw: int = 0
    """Count up to draw others. The vectors are the mixer's `constants`, arguments of a call: who
    calls it may give new ones without compiling again."""
    position: NoPosition | Rotary = NoPosition()
    """What turns queries and keys before the features are made of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("performer.features", self.features, 1)
        check_choice("performer.feature_map", self.feature_map, get_args(FeatureKind))
        if self.feature_map == "trigonometric" and self.features % 2:
            raise ValueError(
                f"performer.features {self.features}: sines and cosines come in pairs; "
                "give an even number"
            )
        for name in ("seed", "redraw"):
            check_least(f"performer.{name}", getattr(self, name), 0)

    @property
    def directions(self) -> int:
        """How many random vectors M features take: sine and cosine share one."""
        return self.features // 2 if self.feature_map == "trigonometric" else self.features


class Performer(Mixer):
    """y = phi(q) (sum of phi(k) v) / phi(q) (sum of phi(k)), in one pass from left to right."""

    config: PerformerConfig

    @staticmethod
    def abilities(config: PerformerConfig) -> Abilities:
        return Abilities(weights=False)

    @staticmethod
    def constants(
        config: PerformerConfig, layer: int, width: int
    ) -> np.ndarray[Any, Any]:  # [M, H], or [M / 2, H] of trigonometric features
        """Random vectors: a function of (seed, layer, redraw)."""
        return draw_directions(
            config.directions,
            config.query_width(width),
            orthogonal=config.orthogonal,
            seed=(config.seed, layer, config.redraw),
        )

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Sums:
        config = self.config
        head = config.query_width(self.shared.width)
        return Sums.zeros(batch, config.key_heads, config.features, head)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemorySums:
        return MemorySums(self.init_cache(batch, length))

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        positions: jax.Array,  # [B or 1, T]
        mask: Mask,
        memory: jax.Array | None = None,  # [B, S, D]
        cache: Sums | MemorySums | None = None,
        keys: jax.Array | None = None,
        constants: Any = None,  # array [M or M / 2, H]; None: those of layer 0
        want: Want = NOTHING,
    ) -> MixerOutput:
        config, shared = self.config, self.shared
        if constants is None:  # called by itself: a stack gives each layer its own
            constants = self.constants(config, 0, shared.width)
        feature_map = random_features(config.feature_map, constants)
        given: Any = dict(positions=positions, mask=mask, memory=memory, cache=cache, want=want)
        y, cache = attend_by_kernel(self, x, feature_map, **given)
        return MixerOutput(join(self, y, config, shared), cache, {})


MIXERS[PerformerConfig.kind] = Performer
