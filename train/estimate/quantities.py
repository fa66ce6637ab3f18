"""What an experiment leaves for its data to say, as far as it can be known beforehand.

Products that an optimizer makes of its own: those of Muon, once a step whatever the batch.

What of an experiment the estimates are made from, counted once for all candidates.
"""

import dataclasses
from typing import TYPE_CHECKING

from train.data.example_configs import BitextDataConfig
from train.errors import UserError
from train.tasks.config import Classification, Tagging

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from train.experiment import Experiment
import functools
import math

import jax.numpy as jnp

from train.estimate.footprint import Residuals, trace_residuals
from train.estimate.search import layer_backend
from train.estimate.target import Target
from train.estimate.traffic import StateBytes, StateShapes
from train.experiment import Experiment
from train.optim.muon import Muon, muon_dimension_numbers
from train.parallel.mesh import MeshConfig
from transformer.config import RematPolicy
from transformer.costs import TokenFlops, count_token_flops
from transformer.parameter_counts import ParameterLeaf, abstract_parameters, layer_mixers


def max_batch_shape(experiment: "Experiment") -> tuple[int, int]:
    """The examples of a batch, and the tokens of each: the most that there may be."""
    data = experiment.data
    if isinstance(data, BitextDataConfig) and data.batch_tokens:
        room = min(data.batch_tokens // data.max_length, experiment.batch_size or data.batch_tokens)
        return max(1, room // data.batch_size_multiple) * data.batch_size_multiple, data.max_length
    length: int = getattr(data, "sequence_length", 0) or getattr(data, "max_length", 1)
    return experiment.batch_size, length


def sharded_batch_shapes(
    experiment: "Experiment", mesh: "Mesh"
) -> "dict[str, jax.ShapeDtypeStruct]":
    """What a step is given, by shapes, laid over a mesh.

    Raises UsageError if the mesh cannot cut it.
    """
    import jax

    from train.parallel.sharding import logical_to_sharding

    def laid(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = logical_to_sharding(mesh, ("batch", "length")[: leaf.ndim], leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    rows, _ = max_batch_shape(experiment)
    return {name: laid(leaf) for name, leaf in unsharded_batch_shapes(experiment, rows).items()}


def unsharded_batch_shapes(
    experiment: "Experiment", rows: int
) -> "dict[str, jax.ShapeDtypeStruct]":
    """So many rows of a batch, by shapes: all that any task's batches have."""
    import jax
    import numpy as np

    text = (rows, max_batch_shape(experiment)[1])
    target = (rows,) if isinstance(experiment.task, Classification) else text
    names = ("tokens", "segments", "positions", "source", "source_segments")
    shapes = dict.fromkeys(names, (text, np.int32)) | {
        "targets": (target, np.int32),
        "weights": (target, np.float32),
        "examples": ((rows,), np.uint32),
    }
    return {name: jax.ShapeDtypeStruct(*each) for name, each in shapes.items()}


def resolve_sizes(experiment: "Experiment") -> tuple["Experiment", tuple[str, ...]]:
    """The experiment with its V and its number of classes, and what was assumed to know them."""
    tokenizer, task = experiment.data.tokenizer, experiment.task
    counts_classes = isinstance(task, Classification | Tagging) and not task.num_labels
    if counts_classes or (not experiment.model.vocab_size and tokenizer.kind == "character"):
        return _read(experiment), ()
    if experiment.model.vocab_size:
        return experiment, ()
    if tokenizer.kind in ("byte", "file"):
        from train.data.tokenizer_training import train_tokenizer

        return _of(experiment, train_tokenizer(tokenizer, ()).vocab_size), ()
    most = tokenizer.vocab_size
    note = f"the {tokenizer.kind} tokenizer is taken to learn all of its {most:,} tokens"
    return _of(experiment, most), (note,)


def _of(experiment: "Experiment", words: int) -> "Experiment":
    model = dataclasses.replace(experiment.model, vocab_size=words)
    return dataclasses.replace(experiment, model=model)


def _read(experiment: "Experiment") -> "Experiment":
    """As the data make it: they are read."""
    from train.tasks.registry import make_task

    try:
        task = make_task(experiment)
        return task.resolve_experiment(task.prepare_corpus())
    except UserError as error:
        known = "--task.classes and " if hasattr(experiment.task, "classes") else ""
        raise UserError(
            f"{error}; or give {known}--model.vocab-size, and no text is needed"
        ) from error


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
