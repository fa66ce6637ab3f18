"""A mixer under test: its weights, its inputs, the assertions about it, and its oracle.

The oracle of a sparse mixer is dense softmax attention under the mixer's own pattern.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack, cast

import jax
import numpy as np
from flax.errors import ScopeParamShapeError
from jaxtyping import Array, Bool, Float, Int, Key

from transformer.attention.masks import Mask, MaskPattern, dense_mask
from transformer.attention.mixer import (
    MIXERS,
    Abilities,
    Mixer,
    MixerConfig,
    MixerInputs,
    MixerOutput,
    mixer_class,
    mixer_config_class,
)
from transformer.hardware import Hardware
from transformer.model_context import Initialization, ModelContext
from transformer.precision import Precision
from transformer.taps import Outputs
from transformer.validation import check_choice

BATCH_SIZE = 3

MEMORY_SEGMENT_LENGTHS = (7, 5, 4)
"""Tokens of the memory for the first packed document, for the second, and padding."""

TOLERANCE = 1e-5
"""Allowed difference, relative to max(1, largest expected magnitude)."""


class TrialOutput(NamedTuple):
    """A `MixerOutput` with `y` in NumPy, so that comparisons compile no program."""

    y: Float[np.ndarray, "B T D"]
    cache: Any
    aux: dict[str, jax.Array]


class InputFields(TypedDict, total=False):
    """Fields of `MixerInputs` that a call sets, and the segments of its mask."""

    positions: Int[np.ndarray, "#B T"] | None
    segments: Int[np.ndarray, "#B T"] | None
    mask: Mask
    memory: Float[np.ndarray, "B S D"] | None
    cache: Any
    dropout_rngs: Key[Array, "B"]
    outputs: Outputs


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

    def inputs(self, seed: int, length: int = 0) -> Float[np.ndarray, "B T D"]:
        shape = (BATCH_SIZE, length or self.length, self.mixer.context.d_model)
        return np.random.default_rng(seed).normal(size=shape).astype(np.float32)

    @property
    def reads_memory(self) -> bool:
        """Return True if the mixer reads a memory in addition to its own input."""
        return bool(self.mixer.config.reads_memory)

    @property
    def memory(self) -> Float[np.ndarray, "B S D"]:  # the same for all examples
        example = self.inputs(13, sum(MEMORY_SEGMENT_LENGTHS))[:1]
        return np.repeat(example, BATCH_SIZE, axis=0)

    @property
    def memory_segments(self) -> Int[np.ndarray, "1 S"]:
        return np.repeat([1, 2, 0], MEMORY_SEGMENT_LENGTHS)[None]

    def init_cache(self, length: int) -> Any:
        """Return an empty cache for `length` tokens, or for the memory."""
        if self.reads_memory:
            return self.mixer.init_memory_cache(BATCH_SIZE, sum(MEMORY_SEGMENT_LENGTHS))
        return self.mixer.init_cache(BATCH_SIZE, length)

    def mixer_inputs(self, length: int, **fields: Unpack[InputFields]) -> MixerInputs:
        """Return the inputs of a call; what is not given gets the values a model would pass."""
        positions: Any = fields.pop("positions", None)
        positions = np.arange(length)[None] if positions is None else positions
        segments: Any = fields.pop("segments", None)
        mask = Mask(self.pattern, positions=positions, segments=segments)
        inputs = MixerInputs(positions, mask, constants=self.constants)
        if self.reads_memory:
            key_segments = None if segments is None else self.memory_segments
            mask = mask.replace(pattern=MaskPattern(ordered=False), key_segments=key_segments)
            inputs = inputs.replace(mask=mask, memory=self.memory)
        return inputs.replace(**fields)

    def __call__(self, x: np.ndarray, **fields: Unpack[InputFields]) -> TrialOutput:
        """Run the mixer, compiled, on `mixer_inputs` with these fields."""
        inputs = self.mixer_inputs(x.shape[1], **fields)
        try:
            output = run_mixer(self.mixer, self.params, x, inputs)
        except ScopeParamShapeError as error:
            raise AssertionError(
                f"mixer {self.mixer.config.kind}: any_length: {str(error).partition(',')[0]} the "
                "shape depends on the number of tokens; give weights one shape, or declare "
                "any_length=False and refuse other lengths"
            ) from None
        return TrialOutput(np.asarray(output.y), output.cache, output.aux)

    def trace(self, x: np.ndarray, **fields: Unpack[InputFields]) -> None:
        """Trace a call without running it: unsupported inputs have to raise here."""
        inputs = self.mixer_inputs(x.shape[1], **fields)
        jax.eval_shape(functools.partial(run_mixer, self.mixer), self.params, x, inputs)

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
    check_choice("mixer", kind, sorted(MIXERS))
    return mixer_config_class(kind)()


def make_trial(
    config: MixerConfig,
    d_model: int,  # D
    length: int,  # T
    lengths: tuple[int, ...],
    hardware: Hardware,
) -> Trial:
    """Return a mixer with random weights, also where the initial value is 0: zeros hide errors."""
    # All weights are the noise added below, which comes from NumPy: the same on every version.
    initialization = Initialization(std=0.0, depth_scaled=False)
    context = ModelContext(d_model, 2, Precision(), initialization, hardware)
    mixer = mixer_class(config)(config, context, parent=None)
    trial = Trial(mixer, {}, mixer.constants(config, 0, d_model), length, lengths)
    inputs = trial.mixer_inputs(length)
    variables = jax.jit(lambda key, x: mixer.init(key, x, inputs))(
        jax.random.key(0), trial.inputs(0)
    )
    random = np.random.default_rng(1)

    def add_noise(leaf: jax.Array) -> np.ndarray:
        return np.asarray(leaf + 0.05 * random.normal(size=leaf.shape).astype(leaf.dtype))

    return dataclasses.replace(trial, params=jax.tree.map(add_noise, variables.get("params", {})))


class SelectiveMixer(Protocol):
    """Two methods that a mixer with its own sparsity pattern adds, to be tested.

    Its result has to equal softmax attention under `select` and the mask. Its output matrix is the
    parameter `output` [N, H of values, D], with `output_bias` [D] or without.
    """

    def project(self, x: jax.Array, inputs: MixerInputs) -> Any:
        """Return queries [B, T, N, H], keys and values [B, S, K, H], ready for the scores.

        Projected, rotated and normalized; more fields may follow these three. The forward pass
        calls it once. Linen lets only `__call__` declare weights, so `projections` captures the
        result of that call.
        """
        ...

    def select(
        self,
        heads: Any,  # result of `project`
        inputs: MixerInputs,
    ) -> Bool[Array, "B N T S"]:
        """Return True where the pattern, without the mask, shows the key to the query."""
        ...


def projections(mixer: Mixer, params: Any, x: Any, inputs: MixerInputs) -> Any:
    """Return the result of the mixer's `project` in a forward pass."""
    _, state = mixer.apply(
        {"params": params},
        x,
        inputs,
        capture_intermediates=lambda _, method: method == "project",
        mutable=["intermediates"],
    )
    (heads,) = state["intermediates"]["project"]
    return heads


def check_select(trial: Trial) -> None:
    """Check that the result equals dense softmax attention under `select` and the mask."""
    x, mixer = trial.inputs(11), cast(Any, trial.mixer)
    inputs = trial.mixer_inputs(trial.length)
    heads, mask = projections(mixer, trial.params, x, inputs), inputs.mask
    selected = np.asarray(mixer.select(heads, inputs))
    q, k, v = (np.asarray(array) for array in heads[:3])
    visible = selected & np.asarray(dense_mask(mask, trial.length, trial.length))[:, None]
    y = reference_softmax_attention(q, k, v, visible)
    expected = np.einsum("BTNH,NHD->BTD", y, trial.params["output"])
    expected = expected + np.asarray(trial.params.get("output_bias", 0.0))
    message = "the result is not softmax attention under `select` and the mask"
    trial.require_close(trial(x).y, expected, "select", message)


def reference_softmax_attention(
    q: Float[np.ndarray, "B T N H"],
    k: Float[np.ndarray, "B S K H"],
    v: Float[np.ndarray, "B S K Hv"],
    visible: Bool[np.ndarray, "#B #N T S"],
) -> Float[np.ndarray, "B T N Hv"]:
    """Return softmax(q k^T / sqrt(H) where visible) v in NumPy; zeros if nothing is visible."""
    group_size = q.shape[2] // k.shape[2]
    k, v = (np.repeat(array, group_size, axis=2) for array in (k, v))
    scores = np.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(q.shape[-1])
    # A row without a visible key is -inf throughout; subtracting its maximum would give NaN.
    scores = np.where(visible, scores, -np.inf)
    maximum = np.max(scores, axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(maximum), maximum, 0))
    total = weights.sum(-1, keepdims=True)
    y = np.einsum("BNTS,BSNH->BTNH", weights / np.where(total > 0, total, 1), v)
    return np.asarray(y)
