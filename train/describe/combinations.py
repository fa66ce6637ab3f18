"""Memory of training by precision and optimizer, beside the textbook's bytes a parameter."""

import dataclasses
from typing import TYPE_CHECKING, Any

from train.describe.memory import TrainingMemory, estimate_training_memory, optimizer_state_shapes

if TYPE_CHECKING:
    from transformer.model import Model

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
    from train.optimizers import OPTIMIZERS as KINDS
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

    from train.optimizers import AdamW8bit

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
