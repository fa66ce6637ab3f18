"""Optimizers that treat each weight alone: SGD, Adam, AdamW and Lion."""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from train.optim.optimizer import (
    Optimizer,
    add_weight_decay,
    scale_hidden_matrices,
    tree_where,
)
from transformer.validation import Fraction, Mark, NonNegativeFloat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd(Optimizer):
    """Stochastic gradient descent, with momentum (Polyak 1964; Sutskever et al. 2013).

    m <- momentum * m + gradient
    direction = m, or with Nesterov's momentum: gradient + momentum * m
    """

    kind: ClassVar[str] = "sgd"

    momentum: Annotated[Fraction, Mark.SWITCHES_STATE] = 0.9
    """Decay rate of the accumulated gradients. 0: plain SGD, without optimizer state."""
    nesterov: bool = False
    """Use Nesterov's momentum."""
    l2: NonNegativeFloat = 0.0
    """L2 penalty: this multiple of each matrix is added to its gradient."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        if not self.momentum:
            return add_weight_decay(self.l2, axes)
        momentum = optax.trace(self.momentum, self.nesterov)
        return optax.chain(add_weight_decay(self.l2, axes), momentum)


def scale_by_adam(
    beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformationExtraArgs:
    """Return `optax.scale_by_adam`, with `accept_update`.

    The moments are selected before the directions are derived from them. Selected afterwards, XLA
    computes the new moments twice, for the state and within the update of the parameters. The
    second computation reads the old moments, which the first has overwritten (their buffers are
    donated): XLA keeps a copy of both, twice the memory of the parameters.
    """
    adam = optax.scale_by_adam(b1=beta1, b2=beta2, eps=epsilon)

    def update(
        grads: Any,
        state: optax.ScaleByAdamState,
        params: Any = None,
        *,
        accept_update: jax.Array | bool = True,
        **_: Any,
    ) -> tuple[Any, optax.ScaleByAdamState]:
        _, updated = adam.update(grads, state, params)
        selected = tree_where(accept_update, updated, state)
        # The count of this update even if it is rejected: of update 0, the correction is 1 / 0.
        mean = optax.tree.bias_correction(selected.mu, beta1, updated.count)
        square = optax.tree.bias_correction(selected.nu, beta2, updated.count)
        directions = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mean, square)
        return directions, selected

    return optax.GradientTransformationExtraArgs(adam.init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1).

    Mean of the gradients over the root of the mean of their squares.
    """

    kind: ClassVar[str] = "adam"
    handles_rejection: ClassVar[bool] = True

    beta1: Fraction = 0.9
    """Decay rate of the mean of the gradients."""
    beta2: Fraction = 0.95
    """Decay rate of the mean of their squares. The paper has 0.999; a lower value adapts faster and
    suits the noisy gradients of large models."""
    epsilon: NonNegativeFloat = 1e-8
    """Added to the root in the denominator."""
    l2: NonNegativeFloat = 0.0
    """L2 penalty: this multiple of each matrix is added to its gradient, so that Adam's denominator
    divides it too. `adamw` has decoupled weight decay instead."""
    matrix_lr_factor: NonNegativeFloat = 1.0
    """Factor of the learning rate of hidden matrices: see `adamw`."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        adam = scale_by_adam(self.beta1, self.beta2, self.epsilon)
        scale = scale_hidden_matrices(self.matrix_lr_factor, axes)
        return optax.chain(add_weight_decay(self.l2, axes), adam, *scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    kind: ClassVar[str] = "adamw"
    handles_rejection: ClassVar[bool] = True

    beta1: Fraction = 0.9
    """Decay rate of the mean of the gradients."""
    beta2: Fraction = 0.95
    """Decay rate of the mean of their squares."""
    epsilon: NonNegativeFloat = 1e-8
    """Added to the root in the denominator."""
    weight_decay: NonNegativeFloat = 0.1
    """Each step subtracts learning_rate * weight_decay of every matrix."""
    matrix_lr_factor: NonNegativeFloat = 1.0
    """Factor of the learning rate of hidden matrices: all but tables of tokens and positions. muP
    (Yang et al. 2022, table 8): the width at which the learning rate was tuned over D. The weight
    decay does not have it."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        adam = scale_by_adam(self.beta1, self.beta2, self.epsilon)
        scale = scale_hidden_matrices(self.matrix_lr_factor, axes)
        return optax.chain(adam, *scale, add_weight_decay(self.weight_decay, axes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Lion (Chen et al. 2023, program 1): the sign of a mean of gradients.

        direction = sign(beta1 * m + (1 - beta1) * gradient) + weight_decay * parameter
        m <- beta2 * m + (1 - beta2) * gradient

    It has half of Adam's state. All entries of an update have the magnitude of the learning rate,
    so that it wants a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger
    by the same factor (section 5).
    """

    kind: ClassVar[str] = "lion"

    beta1: Fraction = 0.9
    """Weight of the stored mean, against the new gradient, in the direction."""
    beta2: Fraction = 0.99
    """Decay rate of the stored mean."""
    weight_decay: NonNegativeFloat = 0.1
    """Each step subtracts learning_rate * weight_decay of every matrix."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        lion = optax.scale_by_lion(b1=self.beta1, b2=self.beta2)
        return optax.chain(lion, add_weight_decay(self.weight_decay, axes))
