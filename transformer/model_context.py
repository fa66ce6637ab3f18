"""Values that all modules of one model share."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
from flax import linen as nn
from jax.sharding import Mesh, PartitionSpec

from transformer.hardware import Hardware
from transformer.precision import AUTO, Precision
from transformer.validation import NonNegativeFloat, Settings

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
"""(random key, shape, dtype) -> initial values, as in `jax.nn.initializers`."""


@dataclasses.dataclass(frozen=True)
class Initialization(Settings):
    """Initial values of weights: normal, with a fixed standard deviation or by fan-in."""

    std: NonNegativeFloat = 0.02
    """Standard deviation of every matrix. 0: 1/sqrt(fan-in), which suits any width."""
    embedding_std: NonNegativeFloat = 0.02
    """Standard deviation of token and position embeddings."""
    depth_scaled: bool = True
    """Divide the standard deviation of matrices that write to the residual stream by sqrt(2 L), as
    GPT-2 does."""

    def matrix_initializer(
        self, inputs: Mapping[str, int], *, num_residual_layers: int = 0
    ) -> Initializer:
        """Return the initializer of a matrix.

        Args:
          inputs: Sizes of the axes that the matrix sums over; their product is the fan-in.
          num_residual_layers: L if the result is added to the residual stream, else 0.
        """
        std = self.std or 1 / math.sqrt(math.prod(inputs.values()))
        if self.depth_scaled and num_residual_layers:
            std /= math.sqrt(2 * num_residual_layers)
        return nn.initializers.normal(std)

    def embedding_initializer(self) -> Initializer:
        """Return the initializer of an embedding table."""
        return nn.initializers.normal(self.embedding_std)


class ActivationConstraint(Protocol):
    """Sharding of activations by logical axis names. Implementations are hashable values."""

    @property
    def mesh(self) -> Mesh | None:
        """Device mesh; None on a single device."""

    def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """Return x constrained to be sharded along these axes; uneven axes stay unsharded."""

    def num_shards(self, axis: str) -> int:
        """Return the number of shards of a logical axis."""

    def partition_spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """Return the mesh axes that shard an array of this shape, for `jax.shard_map`."""


@dataclasses.dataclass(frozen=True)
class _Unconstrained:
    """No constraints: the compiler chooses the layout of activations."""

    mesh: None = None

    def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        return x

    def num_shards(self, axis: str) -> int:
        return 1

    def partition_spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        return PartitionSpec()


unconstrained = _Unconstrained()


def replicate(constrain: ActivationConstraint, arrays: Any) -> Any:
    """Return a tree of arrays whole on every device, so that each host can read them."""
    return jax.tree.map(lambda x: constrain(x, (None,) * x.ndim), arrays)


def has_explicit_axes(leaf: Any) -> bool:
    """Return True for an array on a mesh with explicit axes."""
    return isinstance(leaf, jax.Array) and bool(jax.typeof(leaf).sharding.mesh.explicit_axes)


@dataclasses.dataclass(frozen=True)
class ModelContext:
    """Settings passed from a model to all its modules, beside each module's own configuration."""

    d_model: int  # D
    num_layers: int  # L
    precision: Precision
    initialization: Initialization
    hardware: Hardware
    constrain: ActivationConstraint = unconstrained
    share_layers: bool = False  # one set of weights for all layers at a place of the pattern

    def __post_init__(self) -> None:
        if self.precision.compute == AUTO:
            raise ValueError(
                "precision auto: is resolved by the trainer for its hardware; give a model "
                "config.precision.resolve(hardware), or a policy by name such as bfloat16"
            )

    @property
    def flatten_tokens(self) -> bool:
        """True if matrix products take [B, T, D] as [B T, D].

        For the gradient of a 3-D product, XLA's CPU compiler transposes copies, at twice the cost.
        Not if T is sharded: merging B and T would gather T first.
        """
        return self.hardware.platform == "cpu" and self.constrain.num_shards("length") == 1
