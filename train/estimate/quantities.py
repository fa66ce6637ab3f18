"""Counts of an experiment that the estimates share, computed once for all candidates."""

import dataclasses
import functools
import math
from typing import cast

import jax.numpy as jnp

from train.engines.lora import make_lora_layout
from train.estimate.batch_shapes import max_batch_shape
from train.estimate.state_and_residuals import (
    Residuals,
    StateBytes,
    StateShapes,
    layer_backend,
    trace_residuals,
)
from train.estimate.target import Target
from train.experiment import Experiment
from train.optim.muon import Muon, muon_dimension_numbers
from train.parallel.mesh import MeshConfig
from transformer.flops import TokenFlops, count_token_flops, count_training_flops
from transformer.models.stack import RematPolicy
from transformer.parameter_counts import ParameterLeaf, abstract_parameters, layer_mixers
from transformer.precision import DType


def count_optimizer_flops(experiment: Experiment, leaves: list[ParameterLeaf]) -> float:
    """Return the FLOPs of the optimizer's own matmuls in one step; only Muon has any."""
    optimizer = experiment.optimizer
    if not isinstance(optimizer, Muon):
        return 0.0
    once = sum(
        _newton_schulz_flops(leaf)
        for leaf in leaves
        if muon_dimension_numbers(leaf.axes) is not None
    )
    return float(optimizer.ns_steps * once)


def _newton_schulz_flops(leaf: ParameterLeaf) -> int:
    """Return the FLOPs of one Newton-Schulz iteration for a stack of m x n matrices, m <= n.

    The iteration is A = X X', B = b A + c A A, X <- a X + B X (Jordan et al. 2024).
    """
    stack = math.prod(leaf.shape[: len(leaf.axes.stack)])
    m, n = sorted((leaf.fan_in, leaf.size // stack // leaf.fan_in))
    return stack * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)


FULL_SCORE_BACKENDS = ("reference",)
"""Attention backends that write all scores to memory, masked ones included."""


@dataclasses.dataclass(frozen=True, eq=False)
class Quantities:
    """Counts of one experiment on one target."""

    experiment: Experiment
    target: Target
    batch_size: int
    """Examples of a batch."""
    sequence_length: int
    """Tokens of an example, T."""
    compute_itemsize: int
    """Bytes of an element in the compute dtype."""
    layer_parameters: int
    """Parameters of all layers, all experts included."""
    other_parameters: int
    """Parameters outside the layers: embedding, output and the like."""
    largest_layer_parameters: int
    """Parameters of the largest layer."""
    token_flops: TokenFlops
    """FLOPs of one token's forward pass."""
    training_flops: TokenFlops
    """FLOPs of one token's forward and backward pass."""
    optimizer_flops: float
    """FLOPs of the optimizer's own matmuls, per step."""
    state_shapes: StateShapes

    @classmethod
    def from_experiment(cls, experiment: Experiment, target: Target) -> "Quantities":
        """Count an experiment whose sizes are resolved."""
        from train.assembly import make_task

        states = StateShapes.from_experiment(experiment)
        model, config = states.model, experiment.model
        rows, length = max_batch_shape(experiment)
        parameters = abstract_parameters(model)
        leaves = list(parameters.leaves())
        lora = make_lora_layout(experiment.lora, parameters.axes)
        fraction = states.predicted_fraction
        token_flops = count_token_flops(model, length, fraction, lora)
        training_flops = count_training_flops(model, length, fraction, lora)
        if make_task(experiment).needs_base_weights:
            training_flops = training_flops.plus(count_token_flops(model, length, fraction))
        inside = [leaf for leaf in leaves if leaf.path_in_side[0] == "layers"]
        every = sum(leaf.size for leaf in leaves)
        layers = sum(leaf.size for leaf in inside)
        return cls(
            experiment=experiment,
            target=target,
            batch_size=rows,
            sequence_length=length,
            compute_itemsize=jnp.dtype(config.precision.compute).itemsize,
            layer_parameters=layers,
            other_parameters=every - layers,
            largest_layer_parameters=_largest(inside),
            token_flops=token_flops,
            training_flops=training_flops,
            optimizer_flops=count_optimizer_flops(experiment, leaves),
            state_shapes=states,
        )

    @property
    def peak_flops_per_second(self) -> float:
        """Return the peak of one chip in the compute dtype."""
        compute = cast(DType, self.experiment.model.precision.compute)  # resolved by now
        return self.target.chip.peak_flops_per_second(compute)

    @property
    def num_layers(self) -> int:
        """Return the number of layers, encoder and decoder together."""
        config = self.experiment.model
        return config.num_layers + (config.encoder.num_layers if config.encoder is not None else 0)

    @property
    def sequences_per_example(self) -> int:
        """Return the sequences of T tokens per example: 2 for an encoder-decoder."""
        return 2 if self.experiment.model.encoder is not None else 1

    @functools.cached_property
    def computes_all_scores(self) -> bool:
        """Return True if some layer's attention materializes all T x S scores."""
        layers = layer_mixers(self.experiment.model)
        backends = (layer_backend(self.experiment, self.target.hardware, layer) for layer in layers)
        return any(backend in FULL_SCORE_BACKENDS for backend in backends)

    def state_bytes(self, mesh: MeshConfig) -> StateBytes:
        """Return a chip's part of the state.

        Raises UsageError for a mesh that does not divide the model.
        """
        return self._states(mesh)

    # Caches live on the instance: `functools.cache` on a method would keep every instance alive.

    @functools.cached_property
    def _states(self) -> "functools._lru_cache_wrapper[StateBytes]":
        return functools.cache(self.state_shapes.bytes_per_chip)

    def residuals(self, remat: RematPolicy) -> Residuals:
        """Return the residuals under a rematerialization policy."""
        return self._residuals_by_policy(remat)

    @functools.cached_property
    def _residuals_by_policy(self) -> "functools._lru_cache_wrapper[Residuals]":
        return functools.cache(
            functools.partial(trace_residuals, self.experiment, self.target.hardware)
        )


def _largest(leaves: list[ParameterLeaf]) -> int:
    """Return the parameters of the largest layer.

    Each place of the layer pattern is a stack of equal layers: its parameters are [layers, ...].
    """
    places: dict[tuple[str, ...], int] = {}
    for leaf in leaves:
        side = leaf.path[: len(leaf.path) - len(leaf.path_in_side) + 2]
        places[side] = places.get(side, 0) + leaf.size // leaf.shape[0]
    return max(places.values(), default=0)
