"""What of an experiment the estimates are made from, counted once for all candidates."""

import dataclasses
import functools

import jax.numpy as jnp

from train.describe.shape import window
from train.experiment import Experiment
from train.plan.forms import form_of
from train.plan.kept import Kept, kept
from train.plan.state_bytes import StateBytes, StateShapes
from train.plan.target import Target
from train.plan.update import update_flops
from train.sharding import MeshConfig
from transformer.config import Remat
from transformer.costs import Flops, count_flops
from transformer.sizes import Leaf, abstract, layer_mixers

SCORED = ("reference",)
"""Forms of attention that write all scores to memory, the masked ones too."""


@dataclasses.dataclass(frozen=True, eq=False)
class Quantities:
    """Of one experiment on one target."""

    experiment: Experiment
    target: Target
    rows: int
    """Examples of a batch."""
    length: int
    """T."""
    item: int
    """Bytes of a number in products."""
    layer_weights: int
    """Numbers of all layers that every token meets, experts included."""
    other_weights: int
    """Of the embedding, the output and the like."""
    largest_layer: int
    """Numbers of the largest layer."""
    flops: Flops
    """Of one token, forward."""
    update: float
    """Operations of the optimizer's own products, of one step."""
    states: StateShapes

    @classmethod
    def of(cls, experiment: Experiment, target: Target) -> "Quantities":
        states = StateShapes.of(experiment)
        model, config = states.model, experiment.model
        rows, length = window(experiment)
        leaves = list(abstract(model).leaves())
        inside = [leaf for leaf in leaves if leaf.inner[0] == "layers"]
        every = sum(leaf.size for leaf in leaves)
        layers = sum(leaf.size for leaf in inside)
        return cls(
            experiment=experiment,
            target=target,
            rows=rows,
            length=length,
            item=jnp.dtype(config.precision.compute).itemsize,
            layer_weights=layers,
            other_weights=every - layers,
            largest_layer=_largest(inside),
            flops=count_flops(model, length, states.told),
            update=update_flops(experiment, leaves),
            states=states,
        )

    @property
    def peak(self) -> float:
        """Operations a second of a chip, in the dtype of products."""
        return self.target.chip.peak(self.experiment.model.precision.compute)

    @property
    def layers(self) -> int:
        """Of both sides of an encoder-decoder."""
        config = self.experiment.model
        return config.layers + (config.encoder.layers if config.encoder is not None else 0)

    @property
    def sides(self) -> int:
        """How many rows of T tokens an example has: two of an encoder-decoder."""
        return 2 if self.experiment.model.encoder is not None else 1

    @functools.cached_property
    def scored(self) -> bool:
        """Whether some layer's attention computes all T x S scores and writes them down."""
        layers = layer_mixers(self.experiment.model)
        forms = (form_of(self.experiment, self.target.hardware, layer) for layer in layers)
        return any(form in SCORED for form in forms)

    def state(self, mesh: MeshConfig) -> StateBytes:
        """A chip's part of the state. Raises UsageError for a mesh that does not divide."""
        return self._states(mesh)

    @functools.cached_property
    def _states(self) -> "functools._lru_cache_wrapper[StateBytes]":
        return functools.cache(self.states.on)

    def kept(self, remat: Remat) -> Kept:
        """What differentiation keeps, for one row."""
        return self._kept(remat)

    @functools.cached_property
    def _kept(self) -> "functools._lru_cache_wrapper[Kept]":
        return functools.cache(functools.partial(kept, self.experiment, self.target.hardware))


def _largest(leaves: list[Leaf]) -> int:
    """Numbers of the largest layer: each place of the pattern is a stack of layers alike."""
    places: dict[tuple[str, ...], int] = {}
    for leaf in leaves:
        side = leaf.path[: len(leaf.path) - len(leaf.inner) + 2]
        places[side] = places.get(side, 0) + leaf.size // leaf.shape[0]
    return max(places.values(), default=0)
