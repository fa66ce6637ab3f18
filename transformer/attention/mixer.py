"""The mixer interface: layers that move information between the tokens of a sequence.

Every attention variant, and every recurrent or convolutional layer, is a mixer: one file, one
configuration, one entry in `MIXERS`.
"""

import abc
import contextlib
import dataclasses
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar, get_type_hints

import jax
from flax import linen as nn
from flax import struct
from flax.errors import InvalidRngError
from jaxtyping import Array, Float, Int, Key

from transformer.attention.masks import Mask
from transformer.model_context import ModelContext
from transformer.registration import check_kind_is_free, check_registration
from transformer.taps import NO_OUTPUTS, Outputs, Taps
from transformer.validation import Settings


@dataclasses.dataclass(frozen=True)
class MixerConfig(Settings):
    """Base class of the settings of every mixer."""

    kind: ClassVar[str]
    """Name of the mixer in `MIXERS`."""
    reads_memory: ClassVar[bool] = False
    """The mixer attends to the memory in addition to its own input (a recurrent decoder with
    attention inside). It takes the mixer's place in a block and is called with `memory`;
    `mask.segments` describes its own input and `mask.key_segments` the memory."""
    depends_on_row_index: ClassVar[bool] = False
    """The pattern depends on a token's index in its row, not only on its position in its document.
    Packed documents stay separate, but a packed document differs from the same document alone."""

    @property
    def ignores_padding(self) -> bool:
        """Whether rows of one document may be padded although the mixer lacks `segments`."""
        return False

    def check_d_model(self, d_model: int) -> None:
        """Raise ValueError if a model of width `d_model` cannot use this mixer."""


class MixerInputs(struct.PyTreeNode):
    """Inputs of a mixer besides the hidden states."""

    positions: Int[Array, "#B T"]
    """[B or 1, T] int32 position of each token; with a cache, -1 marks padding behind a row."""
    mask: Mask
    """Visible keys of each query."""
    memory: Float[Array, "B S D"] | None = None
    """[B, S, D] output of an encoder: makes it cross attention. None: self-attention."""
    cache: Any = None
    """Cache of this layer, from `init_cache` or `init_memory_cache`. None: no decoding."""
    dropout_rngs: Key[Array, "B"] | None = None
    """[B] random keys, one for each example. None: no dropout."""
    shared_bias: Float[Array, "buckets N"] | None = None
    """[buckets, N] table of relative positions that all layers share. None: there is none."""
    constants: Any = None
    """Non-trainable values of this layer, from `Mixer.constants`."""
    taps: Taps | None = None
    """Intermediate values to return or to replace (`transformer.inspection`). None: neither."""
    outputs: Outputs = struct.field(pytree_node=False, default=NO_OUTPUTS)
    """Names of the extra outputs to return."""


class MixerOutput(NamedTuple):
    """Result of a mixer."""

    y: Float[Array, "B T D"]
    cache: Any  # the input's cache with the new tokens added; None without one
    aux: dict[str, Any]  # the requested extra outputs: weights, entropies, auxiliary losses


class ScoreFlops(NamedTuple):
    """FLOPs per token and layer of products between activations: scores, values, features.

    A multiplication and an addition are two operations.
    """

    full: int  # without a causal mask
    causal: int


@dataclasses.dataclass(frozen=True)
class Abilities:
    """Features that a mixer supports; `transformer.testing.contract.check_mixer` tests each.

    A model refuses a memory, weights and segments for a mixer without the ability. What it lacks of
    the others a mixer refuses itself, by a ValueError.
    """

    causal: bool = True
    """Obey a causal mask."""
    cached: bool = True
    """Decode token by token from a cache, with the results of the full pass."""
    segments: bool = True
    """Separate packed documents and ignore padding. Without it a model refuses rows with either."""
    cross: bool = True
    """Read keys and values from `memory` instead of the mixer's own input."""
    any_length: bool = True
    """Accept any T, not only the one of the configuration."""
    weights: bool = True
    """Return the attention weights on request."""


class Mixer(nn.Module, abc.ABC):
    """Interface of a mixer."""

    config: Any
    """Settings of this mixer."""
    context: ModelContext
    """Settings of the whole model."""

    values: ClassVar[Mapping[str, str]] = {}
    """Values that the mixer shows to `inputs.taps` (name -> shape and meaning)."""

    @staticmethod
    @abc.abstractmethod
    def abilities(config: Any) -> Abilities:
        """Return the features that a mixer of this configuration supports."""

    @staticmethod
    def constants(config: Any, layer: int, width: int) -> Any:
        """Return non-trainable values of one layer (random blocks, features, rotations), or None.

        They have the same shapes in all layers, so that they can be stacked.
        """
        return None

    @staticmethod
    def score_flops(config: Any, width: int, length: int) -> ScoreFlops | None:
        """Return FLOPs per token that involve no weights, in inputs of `length` tokens.

        None: `describe` reports that they are not counted.
        """
        return None

    @abc.abstractmethod
    def init_cache(self, batch: int, length: int) -> Any:
        """Return an empty cache for `batch` examples of up to `length` tokens.

        `transformer.attention.cache` states the interface of caches and their dtypes.
        """

    def init_memory_cache(self, batch: int, length: int) -> Any:
        """Return an empty cache for a memory of `length` tokens.

        For cross attention, and for mixers that read a memory in addition to their own input. The
        first call gets the memory and fills the cache; later calls need only the cache.
        """
        raise ValueError(
            f"mixer {self.config.kind}: cannot cache a memory (an encoder's output); choose "
            "another mixer"
        )

    @abc.abstractmethod
    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: MixerInputs,
    ) -> MixerOutput:
        """Mix information between tokens."""


class MixerError(ValueError):
    """A mixer does not support its inputs, or its code is wrong. The message names the mixer."""


MIXERS: dict[str, type[Mixer]] = {}
"""All mixers by kind, filled by `register_mixer`; `del MIXERS["mine"]` removes yours."""

MixerClass = TypeVar("MixerClass", bound=type[Mixer])
"""Type variable: a mixer class, which a decorator returns as it is."""


def register_mixer(mixer: MixerClass) -> MixerClass:
    """Register a mixer under the `kind` of its configuration. A class decorator.

    Example::

        @register_mixer
        class Sharp(Mixer):
            config: SharpConfig

    Raises:
      ValueError: The mixer has no configuration class or lacks a method, or its kind belongs to
        another mixer.
    """
    config = get_type_hints(mixer).get("config")
    if not isinstance(config, type) or not issubclass(config, MixerConfig):
        raise ValueError(
            f"mixer {mixer.__qualname__}: has no configuration class; annotate `config` with a "
            "frozen dataclass derived from MixerConfig"
        )
    if missing := sorted(getattr(mixer, "__abstractmethods__", ())):
        raise ValueError(
            f"mixer {mixer.__qualname__}: does not define {', '.join(missing)}; define "
            f"{'it' if len(missing) == 1 else 'them'}, as docs/attention.md shows"
        )
    kind = getattr(config, "kind", None)
    check_registration("mixer", kind, config)
    check_kind_is_free("mixer", config.kind, mixer, MIXERS.get(config.kind))
    MIXERS[config.kind] = mixer
    return mixer


def mixer_config_class(kind: str) -> type[MixerConfig]:
    """Return the class of a mixer's settings: the annotation of its field `config`."""
    config_class: type[MixerConfig] = get_type_hints(MIXERS[kind])["config"]
    return config_class


def mixer_class(config: MixerConfig) -> type[Mixer]:
    """Return the mixer class of a configuration.

    Raises:
      ValueError: The kind is not in `MIXERS`.
    """
    if config.kind not in MIXERS:
        raise ValueError(
            f"mixer {config.kind}: is not known; give one of {', '.join(sorted(MIXERS))}, "
            "or register yours with transformer.register_mixer"
        )
    return MIXERS[config.kind]


def check_abilities(mixer: Mixer, inputs: MixerInputs) -> None:
    """Raise MixerError if the inputs need a memory, weights or segments, and the mixer lacks them.

    What a mixer with `causal`, `cached` or `any_length` False cannot do, it refuses itself.
    """
    config, mask = mixer.config, inputs.mask
    kind = config.kind
    with explain_mixer_errors(config):
        abilities = mixer.abilities(config)
    if inputs.memory is not None and not abilities.cross:
        raise MixerError(
            f"mixer {kind}: cannot read a memory (an encoder's output); use an attention mixer, or "
            "one whose config sets reads_memory"
        )
    if "weights" in inputs.outputs and not abilities.weights:
        raise MixerError(
            f"mixer {kind}: has no attention weights; leave `weights` out of `outputs`"
        )
    ignores_padding = mask.single_document and config.ignores_padding
    if mask.segments is not None and not (abilities.segments or ignores_padding):
        raise MixerError(
            f"mixer {kind}: would mix the documents of a row, or padding with text, as it lacks "
            "the ability `segments`; set data.document_masking to False, or choose another mixer"
        )


def reject_mask_patterns(kind: str, mask: Mask) -> None:
    """Raise ValueError if a mask contains more than causality, segments and lengths."""
    pattern = mask.pattern
    requested = {
        "a window": pattern.window,
        "a prefix": pattern.prefix or mask.prefix_lengths is not None,
        "global positions": mask.global_positions is not None,
        "an array of allowed pairs": mask.allowed is not None,
        "tokens that are not in the order of their positions": not pattern.ordered,
    }
    for feature, is_requested in requested.items():
        if is_requested:
            raise ValueError(
                f"mixer {kind}: does not support {feature}; use an attention mixer, such as full"
            )


def apply_mixer(mixer: Mixer, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
    """Call a mixer of a block; check its inputs, and what it returns.

    Raises:
      MixerError: The mixer does not support the inputs, raises an error, or returns no
        `MixerOutput` with y like x.
    """
    config = mixer.config
    check_abilities(mixer, inputs)
    with explain_mixer_errors(config):
        output: Any = mixer(x, inputs)
    if not isinstance(output, MixerOutput):
        raise MixerError(
            f"mixer {config.kind}: returns {type(output).__name__}; give MixerOutput(y, cache, "
            "aux), y as x"
        )
    # A result [B, T, 1] would be broadcast over the residual stream.
    shape = getattr(output.y, "shape", None)
    if shape != x.shape:
        raise MixerError(
            f"mixer {config.kind}: returns y of shape {shape} for x of shape {x.shape}; give "
            "MixerOutput(y, cache, aux), y as x"
        )
    # A wider dtype would widen it.
    if output.y.dtype != x.dtype:
        raise MixerError(
            f"mixer {config.kind}: returns y in {output.y.dtype} for x in {x.dtype}; give the "
            "layers of Flax in it dtype=x.dtype, or return y.astype(x.dtype)"
        )
    if not isinstance(output.aux, dict):
        raise MixerError(f"mixer {config.kind}: returns aux that is no dict; give {{}} for none")
    return output


@contextlib.contextmanager
def explain_mixer_errors(config: MixerConfig) -> Iterator[None]:
    """Turn errors of a mixer's own code into a `MixerError` of one line with their place."""
    mixer = mixer_class(config)
    try:
        yield
    except (MixerError, InvalidRngError):
        raise
    except Exception as error:
        kind, text = config.kind, " ".join(str(error).split())
        if isinstance(error, ValueError) and text.startswith(f"mixer {kind}:"):
            raise MixerError(text) from error
        if mixer.__module__.startswith("transformer."):
            raise  # ours: its errors name their cause
        place = mixer.__module__
        for frame, line in traceback.walk_tb(error.__traceback__):  # the innermost is the last
            if frame.f_globals.get("__name__") == mixer.__module__:
                place = f"line {line} of {frame.f_code.co_filename}"
        raise MixerError(
            f"mixer {kind}: raises {type(error).__name__} ({place}): {text[:300]}; correct its code"
        ) from error
