"""Memory of training by precision and optimizer, beside the textbook's bytes a parameter."""

import dataclasses
from typing import TYPE_CHECKING, Any

from train.describe.memory import Memory, optimizer_state, training_memory

if TYPE_CHECKING:
    from transformer.model import Model

WEIGHTS = {"float32": 4, "bfloat16": 6}
"""The textbook's bytes a parameter, by policy: weights alone, or with a copy in 16 bits."""

GRADIENTS = 4

OPTIMIZERS = {"adamw": 8, "adamw8bit": 2, "sgd": 4}
"""SGD with momentum. Without the scales of 8-bit blocks."""


@dataclasses.dataclass(frozen=True)
class Combination:
    """A model trained in one precision by one optimizer."""

    precision: str
    optimizer: str
    memory: Memory

    @property
    def textbook(self) -> tuple[int, int, int]:
        """Bytes a parameter of weights, gradients and the optimizer's state."""
        return WEIGHTS[self.precision], GRADIENTS, OPTIMIZERS[self.optimizer]

    @property
    def here(self) -> tuple[int, int, int]:
        """The same in all, as this trainer has it."""
        memory = self.memory
        return memory.weights + memory.compute_copy, memory.gradients, memory.optimizer


@dataclasses.dataclass(frozen=True)
class EightBits:
    """Bytes of 8-bit AdamW's state."""

    codes: int
    scales: int
    """A float32 for each block of 256 numbers, of each of two moments."""
    small: int
    """Moments in 32 bits, of parameters with fewer than 4,096 numbers in a layer."""


def combinations(model: "Model", **shape: Any) -> tuple[Combination, ...]:
    """Every one of the textbook; `shape` is what else `training_memory` asks for."""
    from train.optimizers import OPTIMIZERS as KINDS
    from transformer.precision import Precision

    found = []
    for precision in WEIGHTS:
        config = dataclasses.replace(model.config, precision=Precision.named(precision))
        other = dataclasses.replace(model, config=config)
        for kind in OPTIMIZERS:
            memory = training_memory(other, KINDS[kind](), **shape)
            found.append(Combination(precision, kind, memory))
    return tuple(found)


def eight_bits(model: "Model") -> EightBits:
    """What 8-bit AdamW keeps of a model, by tracing how it starts."""
    import jax
    import jax.numpy as jnp

    from train.optimizers import AdamW8bit

    codes = scales = small = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(optimizer_state(model, AdamW8bit())):
        size = leaf.size * leaf.dtype.itemsize
        if leaf.dtype == jnp.uint8:
            codes += size
        elif any(getattr(entry, "name", "") == "scales" for entry in path):
            scales += size
        elif leaf.shape:
            small += size
    return EightBits(codes, scales, small)
