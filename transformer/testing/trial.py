"""A mixer on trial: its weights, what it is fed, and how a failure is told."""

import dataclasses
import functools
import inspect
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax.core import meta

from transformer.attention.base import Abilities, Mixer, MixerInputs, MixerOutput, mixer_class
from transformer.attention.config import MixerConfig
from transformer.attention.masks import Mask, MaskPattern
from transformer.config import Initialization
from transformer.context import ModelContext
from transformer.hardware import Hardware
from transformer.precision import Precision
from transformer.registry import MIXERS

Array = np.ndarray[Any, Any]


BATCH_SIZE = 3


MEMORY_SEGMENT_LENGTHS = (7, 5, 4)
"""Of the memory: what belongs to the first document of a pack, to the second, and padding."""


TOLERANCE = 1e-5


class TrialOutput(NamedTuple):
    """A `MixerOutput` whose result is compared in NumPy, without a program for each comparison."""

    y: Array  # [B, T, D]
    cache: Any
    aux: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One mixer with weights, and the lengths of the inputs that it is tried on."""

    mixer: Mixer
    params: Any
    constants: Any
    length: int  # T of most checks
    lengths: tuple[int, ...]  # others

    @property
    def abilities(self) -> Abilities:
        return self.mixer.abilities(self.mixer.config)

    @property
    def pattern(self) -> MaskPattern:
        """Causal if the mixer can be: every ability has to hold together with this one."""
        return MaskPattern(causal=self.abilities.causal)

    def inputs(self, seed: int, length: int = 0) -> Array:  # [B, T, D]
        shape = (BATCH_SIZE, length or self.length, self.mixer.context.d_model)
        return np.random.default_rng(seed).normal(size=shape).astype(np.float32)

    @property
    def reads_memory(self) -> bool:
        """Whether the mixer looks at a memory beside its own input: then each call has one."""
        return bool(self.mixer.config.reads_memory)

    @property
    def memory(self) -> Array:  # [B, S, D] the same for all examples
        one = self.inputs(13, sum(MEMORY_SEGMENT_LENGTHS))[:1]
        return np.repeat(one, BATCH_SIZE, axis=0)

    @property
    def memory_segments(self) -> Array:  # [1, S]
        return np.repeat([1, 2, 0], MEMORY_SEGMENT_LENGTHS)[None]

    def init_cache(self, length: int) -> Any:
        """An empty cache for `length` tokens, and for the memory if there is one."""
        if self.reads_memory:
            return self.mixer.init_memory_cache(BATCH_SIZE, sum(MEMORY_SEGMENT_LENGTHS))
        return self.mixer.init_cache(BATCH_SIZE, length)

    def mixer_inputs(
        self,
        length: int,
        *,
        positions: Array | None = None,
        segments: Any = None,
        **given: Any,
    ) -> MixerInputs:
        """Inputs of a call, with what is not given filled in as a model would."""
        positions = np.arange(length)[None] if positions is None else positions
        mask = Mask(self.pattern, positions=cast(Any, positions), segments=segments)
        inputs = MixerInputs(cast(Any, positions), mask, constants=self.constants)
        if self.reads_memory:
            theirs = None if segments is None else cast(Any, self.memory_segments)
            mask = mask.replace(pattern=MaskPattern(ordered=False), key_segments=theirs)
            inputs = inputs.replace(mask=mask, memory=self.memory)
        return inputs.replace(**given)

    def __call__(self, x: Array, **given: Any) -> TrialOutput:
        """Runs the mixer, compiled; `given` is as in `mixer_inputs`."""
        output = run_mixer(self.mixer, self.params, x, self.mixer_inputs(x.shape[1], **given))
        return TrialOutput(np.asarray(output.y), output.cache, output.aux)

    def trace(self, x: Array, **given: Any) -> None:
        """As a call, without computing anything: this is where refusals have to happen."""
        traced = functools.partial(run_mixer, self.mixer)
        jax.eval_shape(traced, self.params, x, self.mixer_inputs(x.shape[1], **given))

    def require(self, holds: Any, ability: str, message: str) -> None:
        """Raises AssertionError, naming mixer and ability, unless `holds`."""
        if not bool(holds):
            raise AssertionError(f"mixer {self.mixer.config.kind}: {ability}: {message}")

    def require_close(self, actual: Any, expected: Any, ability: str, message: str) -> None:
        """Requires a difference of no more than 1e-5 * max(1, the largest magnitude expected)."""
        difference = np.max(np.abs(np.asarray(actual) - np.asarray(expected)), initial=0)
        limit = TOLERANCE * max(1.0, np.max(np.abs(expected), initial=0))
        self.require(difference <= limit, ability, f"{message} (by {difference:.2g})")


@functools.partial(jax.jit, static_argnames="mixer")
def run_mixer(mixer: Mixer, params: Any, x: Any, inputs: MixerInputs) -> MixerOutput:
    """`apply`, compiled once for each mixer and shape of the inputs."""
    return cast(MixerOutput, mixer.apply({"params": params}, x, inputs))


def default_config(kind: str) -> MixerConfig:
    """The configuration of a mixer of MIXERS as its defaults have it."""
    if kind not in MIXERS:
        raise ValueError(f"mixer {kind}: is not known; give one of {', '.join(sorted(MIXERS))}")
    make = inspect.get_annotations(MIXERS[kind], eval_str=True)["config"]
    return cast(MixerConfig, make())


def make_trial(
    config: MixerConfig,
    d_model: int,  # D
    length: int,  # T
    lengths: tuple[int, ...],
    hardware: Hardware,
) -> Trial:
    """The mixer with random weights, also where weights start at zero: zeros hide errors."""
    start = Initialization(std=0.0, depth_scaled=False)
    shared = ModelContext(d_model, 2, Precision(), start, hardware)
    mixer = mixer_class(config)(config, shared, parent=None)
    trial = Trial(mixer, {}, mixer.constants(config, 0, d_model), length, lengths)
    inputs = trial.mixer_inputs(length)
    boxed = jax.jit(lambda key, x: mixer.init(key, x, inputs))(jax.random.key(0), trial.inputs(0))
    random = np.random.default_rng(1)

    def shaken(leaf: jax.Array) -> Array:
        return np.asarray(leaf + 0.05 * random.normal(size=leaf.shape).astype(leaf.dtype))

    return dataclasses.replace(
        trial, params=jax.tree.map(shaken, meta.unbox(boxed).get("params", {}))
    )
