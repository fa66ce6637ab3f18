"""A mixer under test: its weights, its inputs and the assertions about it."""

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
"""Tokens of the memory for the first packed document, for the second, and padding."""

TOLERANCE = 1e-5
"""Allowed difference, relative to max(1, largest expected magnitude)."""


class TrialOutput(NamedTuple):
    """A `MixerOutput` with `y` in NumPy, so that comparisons compile no program."""

    y: Array  # [B, T, D]
    cache: Any
    aux: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Trial:
    """A mixer with weights and the lengths of its test inputs."""

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
        """Causal if supported, as every other ability has to hold under a causal mask too."""
        return MaskPattern(causal=self.abilities.causal)

    def inputs(self, seed: int, length: int = 0) -> Array:  # [B, T, D]
        shape = (BATCH_SIZE, length or self.length, self.mixer.context.d_model)
        return np.random.default_rng(seed).normal(size=shape).astype(np.float32)

    @property
    def reads_memory(self) -> bool:
        """Return True if the mixer reads a memory in addition to its own input."""
        return bool(self.mixer.config.reads_memory)

    @property
    def memory(self) -> Array:  # [B, S, D] the same for all examples
        example = self.inputs(13, sum(MEMORY_SEGMENT_LENGTHS))[:1]
        return np.repeat(example, BATCH_SIZE, axis=0)

    @property
    def memory_segments(self) -> Array:  # [1, S]
        return np.repeat([1, 2, 0], MEMORY_SEGMENT_LENGTHS)[None]

    def init_cache(self, length: int) -> Any:
        """Return an empty cache for `length` tokens, or for the memory."""
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
        """Return the inputs of a call; what is not given gets the values a model would pass."""
        positions = np.arange(length)[None] if positions is None else positions
        mask = Mask(self.pattern, positions=cast(Any, positions), segments=segments)
        inputs = MixerInputs(cast(Any, positions), mask, constants=self.constants)
        if self.reads_memory:
            key_segments = None if segments is None else cast(Any, self.memory_segments)
            mask = mask.replace(pattern=MaskPattern(ordered=False), key_segments=key_segments)
            inputs = inputs.replace(mask=mask, memory=self.memory)
        return inputs.replace(**given)

    def __call__(self, x: Array, **given: Any) -> TrialOutput:
        """Run the mixer, compiled; `given` are arguments of `mixer_inputs`."""
        output = run_mixer(self.mixer, self.params, x, self.mixer_inputs(x.shape[1], **given))
        return TrialOutput(np.asarray(output.y), output.cache, output.aux)

    def trace(self, x: Array, **given: Any) -> None:
        """Trace a call without running it: unsupported inputs have to raise here."""
        traced = functools.partial(run_mixer, self.mixer)
        jax.eval_shape(traced, self.params, x, self.mixer_inputs(x.shape[1], **given))

    def require(self, holds: Any, ability: str, message: str) -> None:
        """Raise AssertionError that names the mixer and the ability, unless `holds`."""
        if not bool(holds):
            raise AssertionError(f"mixer {self.mixer.config.kind}: {ability}: {message}")

    def require_close(self, actual: Any, expected: Any, ability: str, message: str) -> None:
        """Require a difference of at most TOLERANCE * max(1, largest expected magnitude)."""
        difference = np.max(np.abs(np.asarray(actual) - np.asarray(expected)), initial=0)
        limit = TOLERANCE * max(1.0, np.max(np.abs(expected), initial=0))
        self.require(difference <= limit, ability, f"{message} (by {difference:.2g})")


@functools.partial(jax.jit, static_argnames="mixer")
def run_mixer(mixer: Mixer, params: Any, x: Any, inputs: MixerInputs) -> MixerOutput:
    """Apply the mixer, compiled once for each mixer and shape of the inputs."""
    return cast(MixerOutput, mixer.apply({"params": params}, x, inputs))


def default_config(kind: str) -> MixerConfig:
    """Return the default configuration of a mixer in MIXERS."""
    if kind not in MIXERS:
        raise ValueError(f"mixer {kind}: is not known; give one of {', '.join(sorted(MIXERS))}")
    config_class = inspect.get_annotations(MIXERS[kind], eval_str=True)["config"]
    return cast(MixerConfig, config_class())


def make_trial(
    config: MixerConfig,
    d_model: int,  # D
    length: int,  # T
    lengths: tuple[int, ...],
    hardware: Hardware,
) -> Trial:
    """Return a mixer with random weights, also where the initial value is 0: zeros hide errors."""
    initialization = Initialization(std=0.0, depth_scaled=False)
    context = ModelContext(d_model, 2, Precision(), initialization, hardware)
    mixer = mixer_class(config)(config, context, parent=None)
    trial = Trial(mixer, {}, mixer.constants(config, 0, d_model), length, lengths)
    inputs = trial.mixer_inputs(length)
    boxed = jax.jit(lambda key, x: mixer.init(key, x, inputs))(jax.random.key(0), trial.inputs(0))
    random = np.random.default_rng(1)

    def add_noise(leaf: jax.Array) -> Array:
        return np.asarray(leaf + 0.05 * random.normal(size=leaf.shape).astype(leaf.dtype))

    return dataclasses.replace(
        trial, params=jax.tree.map(add_noise, meta.unbox(boxed).get("params", {}))
    )
