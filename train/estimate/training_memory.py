"""Training memory by item, for `describe`: all devices together, and the textbook's formula.

Weights, gradients and optimizer state follow from shapes and are exact. Activations are an estimate
from the textbook's formula, corrected for rematerialization and for attention backends that do not
store scores. The letters B, T, L, D, N, V are those of the project's axis alphabet.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from train.engines.lora import LoRAConfig

if TYPE_CHECKING:
    from train.optim.optimizer import Optimizer
    from transformer.models.model import Model
    from transformer.parameter_counts import LayerMixer


NO_LORA = LoRAConfig()
"""All parameters are trained."""

RECOMPUTING_BACKENDS = ("blockwise", "cudnn", "splash", "ring")
"""Attention backends that recompute scores in the backward pass instead of storing them."""


@dataclasses.dataclass(frozen=True)
class ActivationMemory:
    """Activations of one batch (or microbatch), over all devices."""

    bytes: int
    """Estimate for this model's rematerialization policy and attention backend."""
    textbook_elements: int
    """L B T (14 D + T N): every intermediate result of every layer, scores included."""
    textbook_bytes: int
    """The textbook's elements in the compute dtype."""
    sixteen_bit_bytes: int
    """L (34 B T D + 5 B N T^2): 16-bit training with dropout (Korthikanti et al. 2022, section
    4.1)."""


def estimate_activations(
    model: "Model", batch_size: int, sequence_length: int, *, segments: bool = False
) -> ActivationMemory:
    """Estimate the activations of `batch_size` sequences of `sequence_length` tokens.

    Cross attention adds the attention share of a layer to its layer: 6 of 14 vectors of width D, 13
    of 34 bytes, and its scores.
    """
    import jax.numpy as jnp

    from transformer.attention.full import AttentionConfig
    from transformer.parameter_counts import layer_mixers

    config, tokens = model.config, batch_size * sequence_length
    textbook, saved_by_layer, sixteen_bit = 0, [], 0
    for layer in layer_mixers(config):
        mixer = layer.mixer
        # Vectors of width D that a layer saves per token: 6 in attention, 8 in the feed-forward. In
        # 16-bit bytes with dropout masks: 13 of 34 (Korthikanti et al. 2022, section 4.1).
        vectors, sixteen = (6, 13) if layer.cross else (14, 34)
        scores = sequence_length * (mixer.num_heads if isinstance(mixer, AttentionConfig) else 0)
        saved_scores = sequence_length * _heads_with_saved_scores(
            model, layer, sequence_length, segments
        )
        textbook += tokens * (vectors * config.d_model + scores)
        saved_by_layer.append(tokens * (vectors * config.d_model + saved_scores))
        sixteen_bit += tokens * (sixteen * config.d_model + 5 * scores)
    itemsize = jnp.dtype(config.precision.compute).itemsize
    return ActivationMemory(
        bytes=itemsize * _saved_elements(model, saved_by_layer, tokens),
        textbook_elements=textbook,
        textbook_bytes=itemsize * textbook,
        sixteen_bit_bytes=sixteen_bit,
    )


def _saved_elements(model: "Model", saved_by_layer: list[int], tokens: int) -> int:
    """Return the elements saved for the backward pass, over all layers.

    Args:
      model: The model.
      saved_by_layer: Elements that each layer saves without rematerialization.
      tokens: Tokens of the batch, B T.
    """
    from transformer.parameter_counts import abstract_parameters

    config = model.config
    if config.remat == "none":
        return sum(saved_by_layer)
    encoder = config.encoder.num_layers if config.encoder is not None else 0
    inputs = (config.num_layers + encoder) * config.d_model
    matmul_outputs = sum(
        leaf.size // leaf.fan_in
        for leaf in abstract_parameters(model).leaves()
        if leaf.path_in_side[0] == "layers"
        and leaf.axes.is_matrix
        and "experts" not in leaf.axes.stack
    )
    # With rematerialization each layer saves its input (`dots`: and its matmul outputs), and one
    # layer at a time has all of its activations while it is recomputed.
    per_token = inputs + matmul_outputs if config.remat == "dots" else inputs
    return tokens * per_token + max(saved_by_layer)


def _heads_with_saved_scores(
    model: "Model", layer: "LayerMixer", length: int, segments: bool
) -> int:
    """Return N, or 0 for layers that never materialize all scores at once."""
    from transformer.attention.full import AttentionConfig

    choice = layer.backend_choice(model.config, length, hardware=model.hardware, segments=segments)
    if choice is None or choice.backend in RECOMPUTING_BACKENDS:
        return 0
    assert isinstance(layer.mixer, AttentionConfig)
    return layer.mixer.num_heads


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training step by item, over all devices."""

    weights: int
    """Weights as stored, vocabulary padding included."""
    compute_copy: int
    """Weights cast to the compute dtype; 0 if that is the storage dtype."""
    gradients: int
    """Gradients in float32; two copies while microbatches accumulate."""
    optimizer: int
    """Optimizer state, exactly as the optimizer initializes it."""
    activations: ActivationMemory
    """Estimate of the activations."""
    logits: int
    """Logits of one chunk of the loss and their gradient, in float32."""
    textbook_logits: int
    """2 B T V elements in float32: logits of the whole batch and their gradient."""
    ema: int = 0
    """Exponential moving average of the weights in float32; 0 if none is stored."""

    @property
    def total(self) -> int:
        return self.state + self.compute_copy + self.gradients + self.working_set

    @property
    def state(self) -> int:
        """Bytes that persist between steps."""
        return self.weights + self.optimizer + self.ema

    @property
    def working_set(self) -> int:
        """Bytes that depend on the batch."""
        return self.activations.bytes + self.logits


def estimate_training_memory(
    model: "Model",
    optimizer: "Optimizer",
    *,
    batch_size: int,
    sequence_length: int,
    grad_accum_steps: int = 1,
    segments: bool = False,
    ema: bool = False,
    predicted_fraction: float | None = None,
    lora: LoRAConfig = NO_LORA,
) -> TrainingMemory:
    """Estimate the memory of a training step.

    Args:
      model: The model.
      optimizer: The optimizer.
      batch_size: Sequences of a step, over all microbatches.
      sequence_length: Tokens of a sequence, T.
      grad_accum_steps: Microbatches of a step.
      segments: True if sequences hold several documents or padding.
      ema: True if an exponential moving average of the weights is stored.
      predicted_fraction: Fraction of tokens that have a prediction target; None: the model's own.
      lora: Settings of LoRA, which trains fewer parameters than the model has.
    """
    import jax
    import jax.numpy as jnp

    from transformer.chunked_cross_entropy import choose_num_chunks
    from transformer.parameter_counts import abstract_parameters, count_parameters

    config = model.config
    count = trained = count_parameters(model).allocated
    adapter = 0  # entries of A and B
    if lora.rank:
        shapes = jax.tree.leaves(trainable_shapes(model, lora)[0])
        trained = sum(leaf.size for leaf in shapes)
        adapter = count_adapter_entries(model, lora)
    itemsize = jnp.dtype(config.precision.compute).itemsize
    rows = batch_size // grad_accum_steps
    targets = round(
        sequence_length
        * (model.predicted_fraction if predicted_fraction is None else predicted_fraction)
    )
    chunks = (
        choose_num_chunks(rows, targets, config.padded_vocab_size, model.hardware) if targets else 1
    )
    # The fused cross entropy computes logits in chunks of the sequence; only one chunk exists.
    chunk = rows * -(-targets // chunks)
    return TrainingMemory(
        weights=sum(leaf.num_bytes for leaf in abstract_parameters(model).leaves())
        + 4 * adapter,  # A and B are float32
        compute_copy=0
        if config.precision.compute == config.precision.parameters
        else (count + adapter) * itemsize,
        gradients=4 * trained * (1 if grad_accum_steps == 1 else 2),
        optimizer=optimizer_state_bytes(model, optimizer, lora),
        activations=estimate_activations(model, rows, sequence_length, segments=segments),
        logits=2 * 4 * chunk * config.padded_vocab_size,
        textbook_logits=2 * 4 * rows * targets * config.vocab_size,
        ema=4 * trained if ema else 0,
    )


def trainable_shapes(model: "Model", lora: LoRAConfig = NO_LORA) -> Any:
    """Return (shapes, axes) of the parameters that are trained."""
    import jax

    from train.engines.lora import make_lora_layout
    from transformer.parameter_counts import abstract_parameters

    shapes, axes = abstract_parameters(model)
    layout = make_lora_layout(lora, axes)
    if layout is None:
        return shapes, axes
    return jax.eval_shape(layout.init, jax.random.key(0), shapes), layout.trainable_axes()


def count_adapter_entries(model: "Model", lora: LoRAConfig) -> int:
    """Return the number of entries of A and B."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(trainable_shapes(model, lora)[0])
    return sum(leaf.size for path, leaf in leaves if path[-1].key in ("lora_a", "lora_b"))


def optimizer_state_bytes(
    model: "Model", optimizer: "Optimizer", lora: LoRAConfig = NO_LORA
) -> int:
    """Return the size of the optimizer's state."""
    import jax

    leaves = jax.tree.leaves(optimizer_state_shapes(model, optimizer, lora))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@functools.lru_cache(maxsize=16)
def optimizer_state_shapes(
    model: "Model", optimizer: "Optimizer", lora: LoRAConfig = NO_LORA
) -> Any:
    """Return the shapes of the optimizer's state for float32 gradients, by abstract evaluation."""
    import jax
    import jax.numpy as jnp

    shapes, axes = trainable_shapes(model, lora)
    gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), shapes)
    return jax.eval_shape(optimizer.make(axes).init, gradients)


TEXTBOOK_WEIGHT_BYTES = {"float32": 4, "bfloat16": 6}
"""Textbook bytes per parameter by precision policy: weights, with a 16-bit copy for `bfloat16`."""


TEXTBOOK_GRADIENT_BYTES = 4
"""Textbook bytes per parameter of a float32 gradient."""


TEXTBOOK_OPTIMIZER_BYTES = {"adamw": 8, "adamw8bit": 2, "sgd": 4}
"""Textbook bytes per parameter of optimizer state; SGD has momentum, 8-bit blocks have no scales.
"""


@dataclasses.dataclass(frozen=True)
class MemoryVariant:
    """Training memory with one precision policy and one optimizer."""

    precision: str
    optimizer: str
    memory: TrainingMemory

    @property
    def textbook_bytes_per_parameter(self) -> tuple[int, int, int]:
        """Return textbook bytes per parameter of weights, gradients and optimizer state."""
        return (
            TEXTBOOK_WEIGHT_BYTES[self.precision],
            TEXTBOOK_GRADIENT_BYTES,
            TEXTBOOK_OPTIMIZER_BYTES[self.optimizer],
        )

    @property
    def state_bytes(self) -> tuple[int, int, int]:
        """Return total bytes of weights, gradients and optimizer state in this trainer."""
        memory = self.memory
        return memory.weights + memory.compute_copy, memory.gradients, memory.optimizer


@dataclasses.dataclass(frozen=True)
class EightBitStateBytes:
    """State of 8-bit AdamW by component, in bytes."""

    codes: int
    """8-bit codes of both moments."""
    scales: int
    """One float32 scale per block of 256 elements, for each of the two moments."""
    unquantized: int
    """float32 moments of parameters with fewer than 4,096 elements per layer."""


def estimate_memory_variants(model: "Model", **shape: Any) -> tuple[MemoryVariant, ...]:
    """Return every precision and optimizer of the textbook's table.

    `shape` holds the keyword arguments of `estimate_training_memory`.
    """
    from train.optim.optimizer_registry import OPTIMIZERS
    from transformer.precision import Precision

    variants = []
    for precision in TEXTBOOK_WEIGHT_BYTES:
        config = dataclasses.replace(model.config, precision=Precision.parse(precision))
        other = dataclasses.replace(model, config=config)
        for kind in TEXTBOOK_OPTIMIZER_BYTES:
            memory = estimate_training_memory(other, OPTIMIZERS[kind](), **shape)
            variants.append(MemoryVariant(precision, kind, memory))
    return tuple(variants)


def count_eight_bit_state(model: "Model", lora: LoRAConfig = NO_LORA) -> EightBitStateBytes:
    """Return the state of 8-bit AdamW for what is trained of a model, by abstract evaluation."""
    import jax
    import jax.numpy as jnp

    from train.optim.adamw_8bit import AdamW8bit

    codes = scales = unquantized = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        optimizer_state_shapes(model, AdamW8bit(), lora)
    ):
        size = leaf.size * leaf.dtype.itemsize
        if leaf.dtype == jnp.uint8:
            codes += size
        elif any(getattr(entry, "name", "") == "scales" for entry in path):
            scales += size
        elif leaf.shape:
            unquantized += size
    return EightBitStateBytes(codes, scales, unquantized)
