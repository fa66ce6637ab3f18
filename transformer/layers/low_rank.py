"""A matrix with a low-rank update, as LoRA trains it (Hu et al. 2021)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from transformer.layers.quantized import QuantizedWeight, dequantize_weight


class LowRankWeight(struct.PyTreeNode):
    """A matrix with a trainable low-rank update: W + s A B (section 4.1).

    `apply_matrix` and the experts of a mixture of experts compute x W + s (x A) B: two thin
    products, and no copy of W. The gradient of W is never needed, so a training step that
    differentiates A and B alone does not compute it. All leaves have the stack axes of W (layers,
    experts).
    """

    base: Float[Array, "..."] | QuantizedWeight  # [*stack, *inputs, *outputs]
    a: Float[Array, "..."]  # [*stack, *inputs, rank]
    b: Float[Array, "..."]  # [*stack, rank, *outputs]
    scale: float = struct.field(pytree_node=False)  # s

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of W."""
        shape: tuple[int, ...] = self.base.shape
        return shape

    @property
    def dtype(self) -> Any:
        """Dtype of W."""
        return self.base.dtype

    def astype(self, dtype: Any) -> "LowRankWeight":
        """Return the weight with all three matrices in a dtype."""
        a, b = self.a.astype(dtype), self.b.astype(dtype)
        return LowRankWeight(self.base.astype(dtype), a, b, self.scale)

    def merge(self) -> jax.Array:
        """Return W + s A B, added in float32, in the dtype of W."""
        stack = self.a.ndim + self.b.ndim - len(self.shape) - 2  # number of stack axes
        lead = self.shape[:stack]
        rank, rows = self.a.shape[-1], math.prod(self.a.shape[stack:-1])
        a = self.a.astype(jnp.float32).reshape(*lead, rows, rank)
        b = self.b.astype(jnp.float32).reshape(*lead, rank, -1)
        # "highest": a TPU, or a GPU with TF32, would round the inputs of the product.
        update = jnp.matmul(a, b, precision="highest").reshape(self.shape)
        base = dequantize_weight(self.base.astype(jnp.float32))
        return (base + self.scale * update).astype(self.dtype)


def merge_weight(weight: Any) -> Any:
    """Return a `LowRankWeight` or `QuantizedWeight` as one matrix, and others as they are."""
    return weight.merge() if isinstance(weight, LowRankWeight) else dequantize_weight(weight)


def merge_weights(params: Any) -> Any:
    """Return parameters with arrays alone: low-rank updates merged, codes dequantized."""
    return jax.tree.map(merge_weight, params, is_leaf=stands_for_matrix)


def stands_for_matrix(leaf: Any) -> bool:
    """Return True for a weight that is no array: the `is_leaf` of trees of parameters."""
    return isinstance(leaf, LowRankWeight | QuantizedWeight)
