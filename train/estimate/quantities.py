"""What an experiment leaves for its data to say, as far as it can be known beforehand.

Products that an optimizer makes of its own: those of Muon, once a step whatever the batch.

What of an experiment the estimates are made from, counted once for all candidates.
"""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.experiment import Experiment
import functools
import math

import jax.numpy as jnp

from train.estimate.attention_backends import layer_backend
from train.estimate.batch_shapes import max_batch_shape
from train.estimate.residuals import Residuals, trace_residuals
from train.estimate.state_bytes import StateBytes, StateShapes
from train.estimate.target import Target
from train.experiment import Experiment
from train.optim.muon import Muon, muon_dimension_numbers
from train.parallel.mesh import MeshConfig
from transformer.config import RematPolicy
from transformer.costs import TokenFlops, count_token_flops
from transformer.parameter_counts import ParameterLeaf, abstract_parameters, layer_mixers


def count_optimizer_flops(experiment: Experiment, leaves: list[ParameterLeaf]) -> float:
    """Operations of one step, of all parameters."""
    optimizer = experiment.optimizer
    if not isinstance(optimizer, Muon):
        return 0.0
    once = sum(
        _orthogonalised(leaf) for leaf in leaves if muon_dimension_numbers(leaf.axes) is not None
    )
    return float(optimizer.ns_steps * once)


def _orthogonalised(leaf: ParameterLeaf) -> int:
    """Operations of an iteration for a stack of matrices, m rows of n, the longer side last.

    It is A = X X', B = b A + c A A, X <- a X + B X (Jordan et al. 2024).
    """
    stack = math.prod(leaf.shape[: len(leaf.axes.stack)])
    m, n = sorted((leaf.fan_in, leaf.size // stack // leaf.fan_in))
    return stack * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)


FULL_SCORE_BACKENDS = ("reference",)
"""Forms of attention that write all scores to memory, the masked ones too."""


@dataclasses.dataclass(frozen=True, eq=False)
class Quantities:
    """Of one experiment on one target."""

    experiment: Experiment
    target: Target
    batch_size: int
    """Examples of a batch."""
    sequence_length: int
    """T."""
    compute_itemsize: int
    """Bytes of a number in products."""
    layer_parameters: int
    """Numbers of all layers that every token meets, experts included."""
    other_parameters: int
    """Of the embedding, the output and the like."""
    largest_layer_parameters: int
    """Numbers of the largest layer."""
    token_flops: TokenFlops
    """Of one token, forward."""
    optimizer_flops: float
    """Operations of the optimizer's own products, of one step."""
    state_shapes: StateShapes

    @classmethod
    def from_experiment(cls, experiment: Experiment, target: Target) -> "Quantities":
        states = StateShapes.from_experiment(experiment)
        model, config = states.model, experiment.model
        rows, length = max_batch_shape(experiment)
        leaves = list(abstract_parameters(model).leaves())
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
            token_flops=count_token_flops(model, length, states.predicted_fraction),
            optimizer_flops=count_optimizer_flops(experiment, leaves),
            state_shapes=states,
        )

    @property
    def peak_flops_per_second(self) -> float:
        """Operations a second of a chip, in the dtype of products."""
        return self.target.chip.peak_flops_per_second(self.experiment.model.precision.compute)

    @property
    def num_layers(self) -> int:
        """Of both sides of an encoder-decoder."""
        config = self.experiment.model
        return config.num_layers + (config.encoder.num_layers if config.encoder is not None else 0)

    @property
    def sequences_per_example(self) -> int:
        """How many rows of T tokens an example has: two of an encoder-decoder."""
        return 2 if self.experiment.model.encoder is not None else 1

    @functools.cached_property
    def computes_all_scores(self) -> bool:
        """Whether some layer's attention computes all T x S scores and writes them down."""
        layers = layer_mixers(self.experiment.model)
        forms = (layer_backend(self.experiment, self.target.hardware, layer) for layer in layers)
        return any(form in FULL_SCORE_BACKENDS for form in forms)

    def state_bytes(self, mesh: MeshConfig) -> StateBytes:
        """A chip's part of the state. Raises UsageError for a mesh that does not divide."""
        return self._states(mesh)

    @functools.cached_property
    def _states(self) -> "functools._lru_cache_wrapper[StateBytes]":
        return functools.cache(self.state_shapes.bytes_per_chip)

    def residuals(self, remat: RematPolicy) -> Residuals:
        """What differentiation keeps, for one row."""
        return self._kept(remat)

    @functools.cached_property
    def _kept(self) -> "functools._lru_cache_wrapper[Residuals]":
        return functools.cache(
            functools.partial(trace_residuals, self.experiment, self.target.hardware)
        )


def _largest(leaves: list[ParameterLeaf]) -> int:
    """Numbers of the largest layer: each place of the pattern is a stack of layers alike."""
    places: dict[tuple[str, ...], int] = {}
    for leaf in leaves:
        side = leaf.path[: len(leaf.path) - len(leaf.path_in_side) + 2]
        places[side] = places.get(side, 0) + leaf.size // leaf.shape[0]
    return max(places.values(), default=0)
