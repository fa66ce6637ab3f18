"""The plug point: whatever moves information between the tokens of a sequence.

Every attention variant, and every recurrent or convolutional layer, is a mixer: one file, one
configuration, one entry in `MIXERS`.

What a mixer without attention cannot do, refused in one line while the program is traced.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax import struct

from transformer.attention.config import MixerConfig
from transformer.attention.masks import Mask
from transformer.context import ModelContext
from transformer.registry import MIXERS

Outputs = frozenset[str]
"""Names of extra outputs to return in `aux`: `weights`, `entropy`, `losses`. Static under jit."""


NO_OUTPUTS: Outputs = frozenset()


class MixerInputs(struct.PyTreeNode):
    """Inputs of a mixer besides the hidden states."""

    positions: jax.Array
    """[B or 1, T] int32 position of each token; with a cache, -1 marks padding behind a row."""
    mask: Mask
    """Which keys each query may see."""
    memory: jax.Array | None = None
    """[B, S, D] output of an encoder: makes it cross attention. None: self-attention."""
    cache: Any = None
    """Cache of this layer, from `init_cache` or `init_memory_cache`. None: no decoding."""
    dropout_rngs: jax.Array | None = None
    """[B] random keys, one for each example. None: no dropout."""
    constants: Any = None
    """Non-trainable values of this layer, from `Mixer.constants`."""
    outputs: Outputs = struct.field(pytree_node=False, default=NO_OUTPUTS)
    """Names of the extra outputs to return."""


class MixerOutput(NamedTuple):
    """Result of a mixer."""

    y: jax.Array  # [B, T, D]
    cache: Any  # the input's cache with the new tokens added; None without one
    aux: dict[str, Any]  # the requested extra outputs: weights, entropies, auxiliary losses


class ScoreFlops(NamedTuple):
    """FLOPs of one token in one layer that involve no weights.

    Products of queries, keys and values, and of features and buckets made of them; a multiplication
    and an addition are two operations.
    """

    full: int  # without a causal mask
    causal: int


@dataclasses.dataclass(frozen=True)
class Abilities:
    """What a mixer can do. `transformer.testing.contract.check_mixer` holds it to each."""

    causal: bool = True
    """Obeys a causal mask."""
    cached: bool = True
    """Decodes token by token from a cache, equal to the full pass."""
    segments: bool = True
    """Keeps packed documents apart, and padding out."""
    cross: bool = True
    """Looks at `memory` in place of its own input."""
    any_length: bool = True
    """Takes any T, not only those that its configuration was made for."""
    weights: bool = True
    """Can return its attention weights."""


class Mixer(nn.Module, abc.ABC):
    """The interface. `config` is the mixer's own part, `shared` what the whole model agrees on."""

    config: Any
    context: ModelContext

    @staticmethod
    @abc.abstractmethod
    def abilities(config: Any) -> Abilities:
        """What a mixer of this configuration can do."""

    @staticmethod
    @abc.abstractmethod
    def constants(config: Any, layer: int, width: int) -> Any:
        """Values of one layer that are no weights (random blocks, features, rotations), or None.

        Alike in shape for all layers, so that they stack.
        """

    @staticmethod
    def score_flops(config: Any, width: int, length: int) -> ScoreFlops | None:
        """FLOPs per token without weights in sequences of `length`; None: reported as uncounted."""
        return None

    @abc.abstractmethod
    def init_cache(self, batch: int, length: int) -> Any:
        """An empty cache for `batch` examples of up to `length` tokens."""

    def init_memory_cache(self, batch: int, length: int) -> Any:
        """An empty cache for a memory of `length` tokens.

        Of cross attention, or of a mixer that reads the memory beside its own input. The first call
        that is given it, together with the memory, fills it; later ones need the memory no more.
        """
        raise ValueError(f"mixer {self.config.kind}: keeps no memory for decoding; choose another")

    @abc.abstractmethod
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        inputs: MixerInputs,
    ) -> MixerOutput: ...


def mixer_class(config: MixerConfig) -> type[Mixer]:
    """The module that a configuration is for. Raises ValueError for a kind that is not known."""
    if config.kind not in MIXERS:
        raise ValueError(
            f"mixer {config.kind}: is not known; give one of {', '.join(sorted(MIXERS))}, "
            "or add yours to transformer.MIXERS"
        )
    return MIXERS[config.kind]


def reject_memory(kind: str, memory: Any) -> None:
    """Raises ValueError if there is a memory: the mixer knows its own input alone."""
    if memory is not None:
        raise ValueError(
            f"mixer {kind}: reads its own input alone, no memory; use a mixer of attention, or one "
            "whose configuration says reads_memory"
        )


def reject_weights(kind: str, outputs: Outputs) -> None:
    """Raises ValueError if attention weights are requested."""
    if "weights" in outputs:
        raise ValueError(
            f"mixer {kind}: has no attention weights; leave `weights` out of `outputs`"
        )


def reject_mask_patterns(kind: str, mask: Mask) -> None:
    """Raises ValueError for a mask that is more than causal, segments and lengths."""
    pattern = mask.pattern
    asked = {
        "a window": pattern.window,
        "a prefix": pattern.prefix or mask.prefix_lengths is not None,
        "global positions": mask.global_positions is not None,
        "an array of what is allowed": mask.allowed is not None,
        "a mask given pair by pair": mask.allowed is not None,
        "an order of tokens other than their positions'": not pattern.ordered,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"mixer {kind}: cannot obey {what}; use a mixer of attention")
