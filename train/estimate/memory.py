"""What the forward pass keeps for the backward pass: an estimate, beside the textbook's.

What training keeps in memory, item by item, over all devices together.

Memory of training by precision and optimizer, beside the textbook's bytes a parameter.
"""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer.models.base import Model
    from transformer.parameter_counts import LayerMixer
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.optim.registry import OptimizerConfig
    from transformer.models.base import Model
if TYPE_CHECKING:
    from transformer.models.base import Model

RECOMPUTING_BACKENDS = ("blockwise", "cudnn", "splash", "ring")
"""Forms of attention that compute scores again in the backward pass."""


@dataclasses.dataclass(frozen=True)
class ActivationMemory:
    """Of one batch (or microbatch), over all devices together."""

    bytes: int
    """With this model's rematerialisation and form of attention."""
    textbook_elements: int
    """L B T (14 D + T N): the intermediate results of every layer, scores included."""
    textbook_bytes: int
    """The same in the dtype that the model computes in."""
    sixteen_bit_bytes: int
    """L (34 B T D + 5 B N T^2), for 16-bit training with dropout (Korthikanti et al. 2022,
    section 4.1)."""


def estimate_activations(
    model: "Model", batch_size: int, sequence_length: int, *, segments: bool = False
) -> ActivationMemory:
    """For `batch_size` windows of `sequence_length` tokens; `segments` says that documents are kept apart.

    Cross attention adds to its layer the part of a layer that attention is: 6 of 14 vectors of
    width D, 13 of 34 bytes, and its scores.
    """
    import jax.numpy as jnp

    from transformer.attention.config import AttentionConfig
    from transformer.parameter_counts import layer_mixers

    config, tokens = model.config, batch_size * sequence_length
    textbook, kept, sixteen_bit = 0, [], 0
    for layer in layer_mixers(config):
        mixer = layer.mixer
        vectors, sixteen = (6, 13) if layer.cross else (14, 34)
        scores = sequence_length * (mixer.num_heads if isinstance(mixer, AttentionConfig) else 0)
        held = sequence_length * _kept_heads(model, layer, sequence_length, segments)
        textbook += tokens * (vectors * config.d_model + scores)
        kept.append(tokens * (vectors * config.d_model + held))
        sixteen_bit += tokens * (sixteen * config.d_model + 5 * scores)
    item = jnp.dtype(config.precision.compute).itemsize
    return ActivationMemory(
        bytes=item * _elements(model, kept, tokens),
        textbook_elements=textbook,
        textbook_bytes=item * textbook,
        sixteen_bit_bytes=sixteen_bit,
    )


def _elements(model: "Model", layers: list[int], tokens: int) -> int:
    """What is kept of all layers, given what each has when nothing is computed again."""
    from transformer.parameter_counts import abstract_parameters

    config = model.config
    if config.remat == "none":
        return sum(layers)
    encoder = config.encoder.num_layers if config.encoder is not None else 0
    inputs = (config.num_layers + encoder) * config.d_model
    products = sum(
        leaf.size // leaf.fan_in
        for leaf in abstract_parameters(model).leaves()
        if leaf.path_in_side[0] == "layers"
        and leaf.axes.is_matrix
        and "experts" not in leaf.axes.stack
    )
    a_token = inputs + products if config.remat == "dots" else inputs
    return tokens * a_token + max(layers)


def _kept_heads(model: "Model", layer: "LayerMixer", length: int, segments: bool) -> int:
    """N, or 0 where the scores of a layer never exist all at once."""
    from transformer.attention.config import AttentionConfig

    choice = layer.backend_choice(model.config, length, hardware=model.hardware, segments=segments)
    if choice is None or choice.backend in RECOMPUTING_BACKENDS:
        return 0
    assert isinstance(layer.mixer, AttentionConfig)
    return layer.mixer.num_heads


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """Bytes, over all devices together."""

    weights: int
    """As they are stored, the padding of the vocabulary included."""
    compute_copy: int
    """Weights cast to the dtype of products, where that is another."""
    gradients: int
    """In float32, whatever the weights are; twice when microbatches are added up."""
    optimizer: int
    """Moments, exactly as the optimizer makes them."""
    activations: ActivationMemory
    """An estimate."""
    logits: int
    """Of one chunk of the loss, with their gradient, in float32."""
    textbook_logits: int
    """2 B T V elements in float32: what logits of the whole batch would take."""
    ema: int = 0
    """The moving average of the weights, in float32, if one is kept."""

    @property
    def total(self) -> int:
        return self.state + self.compute_copy + self.gradients + self.working_set

    @property
    def state(self) -> int:
        """What is there between steps."""
        return self.weights + self.optimizer + self.ema

    @property
    def working_set(self) -> int:
        """What a batch takes."""
        return self.activations.bytes + self.logits


def estimate_training_memory(
    model: "Model",
    optimizer: "OptimizerConfig",
    *,
    batch_size: int,
    sequence_length: int,
    grad_accum_steps: int = 1,
    segments: bool = False,
    ema: bool = False,
    predicted_fraction: float | None = None,
) -> TrainingMemory:
    """What a training step holds; `batch_size` counts the windows of all microbatches.

    `predicted_fraction` is the share of the tokens of which a word is told; None: the model's own.
    """
    import jax.numpy as jnp

    from transformer.losses import choose_num_chunks
    from transformer.parameter_counts import abstract_parameters, count_parameters

    config = model.config
    count = count_parameters(model).allocated
    item = jnp.dtype(config.precision.compute).itemsize
    rows = batch_size // grad_accum_steps
    words = round(
        sequence_length
        * (model.predicted_fraction if predicted_fraction is None else predicted_fraction)
    )
    chunks = (
        choose_num_chunks(rows, words, config.padded_vocab_size, model.hardware) if words else 1
    )
    chunk = rows * -(-words // chunks)
    return TrainingMemory(
        weights=sum(leaf.num_bytes for leaf in abstract_parameters(model).leaves()),
        compute_copy=0 if config.precision.compute == config.precision.parameters else count * item,
        gradients=4 * count * (1 if grad_accum_steps == 1 else 2),
        optimizer=optimizer_state_bytes(model, optimizer),
        activations=estimate_activations(model, rows, sequence_length, segments=segments),
        logits=2 * 4 * chunk * config.padded_vocab_size,
        textbook_logits=2 * 4 * rows * words * config.vocab_size,
        ema=4 * count if ema else 0,
    )


def optimizer_state_bytes(model: "Model", optimizer: "OptimizerConfig") -> int:
    """Size of the optimizer's state."""
    import jax

    leaves = jax.tree.leaves(optimizer_state_shapes(model, optimizer))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@functools.lru_cache(maxsize=16)
def optimizer_state_shapes(model: "Model", optimizer: "OptimizerConfig") -> Any:
    """Shapes of the optimizer's state for float32 gradients, by tracing how it starts."""
    import jax
    import jax.numpy as jnp

    from train.optim.registry import make_optimizer
    from transformer.parameter_counts import abstract_parameters

    shapes, axes = abstract_parameters(model)
    wide = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), shapes)
    return jax.eval_shape(make_optimizer(optimizer, axes).init, wide)


TEXTBOOK_WEIGHT_BYTES = {"float32": 4, "bfloat16": 6}
"""The textbook's bytes a parameter, by policy: weights alone, or with a copy in 16 bits."""


TEXTBOOK_GRADIENT_BYTES = 4


TEXTBOOK_OPTIMIZER_BYTES = {"adamw": 8, "adamw8bit": 2, "sgd": 4}
"""SGD with momentum. Without the scales of 8-bit blocks."""


@dataclasses.dataclass(frozen=True)
class MemoryVariant:
    """A model trained in one precision by one optimizer."""

    precision: str
    optimizer: str
    memory: TrainingMemory

    @property
    def textbook_bytes_per_parameter(self) -> tuple[int, int, int]:
        """Bytes a parameter of weights, gradients and the optimizer's state."""
        return (
            TEXTBOOK_WEIGHT_BYTES[self.precision],
            TEXTBOOK_GRADIENT_BYTES,
            TEXTBOOK_OPTIMIZER_BYTES[self.optimizer],
        )

    @property
    def state_bytes(self) -> tuple[int, int, int]:
        """The same in all, as this trainer has it."""
        memory = self.memory
        return memory.weights + memory.compute_copy, memory.gradients, memory.optimizer


@dataclasses.dataclass(frozen=True)
class EightBitStateBytes:
    """Bytes of 8-bit AdamW's state."""

    codes: int
    scales: int
    """A float32 for each block of 256 numbers, of each of two moments."""
    unquantized: int
    """Moments in 32 bits, of parameters with fewer than 4,096 numbers in a layer."""


def estimate_memory_variants(model: "Model", **shape: Any) -> tuple[MemoryVariant, ...]:
    """Every one of the textbook; `shape` is what else `training_memory` asks for."""
    from train.optim.registry import OPTIMIZERS as KINDS
    from transformer.precision import Precision

    found = []
    for precision in TEXTBOOK_WEIGHT_BYTES:
        config = dataclasses.replace(model.config, precision=Precision.parse(precision))
        other = dataclasses.replace(model, config=config)
        for kind in TEXTBOOK_OPTIMIZER_BYTES:
            memory = estimate_training_memory(other, KINDS[kind](), **shape)
            found.append(MemoryVariant(precision, kind, memory))
    return tuple(found)


def count_eight_bit_state(model: "Model") -> EightBitStateBytes:
    """What 8-bit AdamW keeps of a model, by tracing how it starts."""
    import jax
    import jax.numpy as jnp

    from train.optim.adamw_8bit import AdamW8bit

    codes = scales = small = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        optimizer_state_shapes(model, AdamW8bit())
    ):
        size = leaf.size * leaf.dtype.itemsize
        if leaf.dtype == jnp.uint8:
            codes += size
        elif any(getattr(entry, "name", "") == "scales" for entry in path):
            scales += size
        elif leaf.shape:
            small += size
    return EightBitStateBytes(codes, scales, small)
