"""Optimizers by name: directions of descent, to be multiplied by the learning rate.

Weight decay is decoupled (Loshchilov and Hutter 2019) and acts on matrices alone: which weights
are matrices is told by the names of their axes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax
from optax import contrib

from transformer.weights import Axes


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """What turns gradients into updates."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the momentum of the layers' matrices (Jordan et al. 2024), and leaves
    embeddings, biases and gains to Adam, with Nesterov's momentum too and without decay."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled: each step takes learning rate * weight_decay of a matrix away."""
    clip: float = 1.0
    """Largest global norm of the gradients; beyond it they are scaled down. 0: no limit."""

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} {getattr(self, name)}: give a share in [0, 1)")
        for name in ("weight_decay", "clip"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name} {getattr(self, name)}: is negative")


def make_optimizer(
    config: OptimizerConfig,
    axes: Any,  # a tree of `Axes` like that of the parameters
) -> optax.GradientTransformation:
    """Gradients -> directions: update = -learning rate * direction. Clipping is the step's."""
    return BUILDERS[config.kind](config, axes)


def _adamw(config: OptimizerConfig, axes: Any) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=matrices(axes)),
    )


def _muon(config: OptimizerConfig, axes: Any) -> optax.GradientTransformation:
    """Muon on the layers' matrices, each orthogonalised on its own however they are stacked.

    Updates are scaled to the size of AdamW's (Liu et al. 2025, section 2.2): one rate serves both.
    """
    muon = contrib.muon(
        learning_rate=1.0,
        beta=0.95,
        weight_decay=config.weight_decay,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        eps=config.epsilon,
        muon_weight_dimension_numbers=jax.tree.map(_sides, axes, is_leaf=_is_axes),
        consistent_rms=0.2,
    )
    return optax.chain(muon, optax.scale(-1.0))


def _sides(axes: Axes) -> contrib.MuonDimensionNumbers | None:
    """Which axes are a matrix's rows and columns; None for what Muon leaves alone."""
    if not axes.is_matrix or "vocab" in axes.names or "positions" in axes.names:
        return None
    start, middle = len(axes.stack), len(axes.stack) + len(axes.inputs)
    return contrib.MuonDimensionNumbers(
        reduction_axis=tuple(range(start, middle)),
        output_axis=tuple(range(middle, len(axes.names))),
    )


BUILDERS: dict[str, Callable[[OptimizerConfig, Any], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "muon": _muon,
}


def matrices(axes: Any) -> Any:
    """A tree of booleans: which parameters are linear maps."""
    return jax.tree.map(lambda leaf: leaf.is_matrix, axes, is_leaf=_is_axes)


def _is_axes(leaf: Any) -> bool:
    return isinstance(leaf, Axes)
