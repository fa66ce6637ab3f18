"""Which forms of attention a step takes on its target.

One way of training an experiment on a target: what a search goes through.

Every way of cutting a step for a target, ranked by the estimates.

`fit --mesh auto`: the mesh that a plan for the devices that are here would take.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from train.config.resolve import resolve_precision
from train.errors import UsageError
from train.estimate.batch_shapes import max_batch_shape, resolve_sizes
from train.estimate.footprint import Footprint, estimate_footprint
from train.estimate.quantities import Quantities
from train.estimate.roofline import StepTime, estimate_step_time
from train.estimate.target import Target
from train.experiment import Experiment
from train.parallel.mesh import MESH_AXES, MeshConfig
from transformer.attention.config import AttentionConfig, Backend
from transformer.config import BlockConfig, RematPolicy
from transformer.hardware import Hardware
from transformer.layers.config import MoEConfig
from transformer.parameter_counts import LayerMixer

HARDWARE_KERNELS = ("cudnn", "splash")
"""Forms that only their own hardware, or its libraries, can trace."""


def layer_backend(experiment: Experiment, hardware: Hardware, layer: LayerMixer) -> Backend | None:
    """The form of a layer's attention; None of other mixers."""
    length = max_batch_shape(experiment)[1]
    choice = layer.backend_choice(
        experiment.model, length, hardware=hardware, segments=experiment.has_segments
    )
    return None if choice is None else choice.backend


def replace_kernels(experiment: Experiment, hardware: Hardware) -> Experiment:
    """The experiment with tiles in place of kernels: both keep the same for the backward pass."""
    model = experiment.model

    def replaced(block: BlockConfig) -> BlockConfig:
        layer = LayerMixer(block.mixer, model.causal, cross=False)
        if layer_backend(experiment, hardware, layer) not in HARDWARE_KERNELS:
            return block
        mixer: Any = block.mixer
        return dataclasses.replace(block, mixer=dataclasses.replace(mixer, form="blockwise"))

    pattern = tuple(replaced(block) for block in model.layer_pattern)
    return dataclasses.replace(experiment, model=dataclasses.replace(model, layer_pattern=pattern))


SEARCHED_REMAT: tuple[RematPolicy, ...] = ("none", "dots", "full")
"""Those that a search tries, beside the experiment's own."""


class Candidate(NamedTuple):
    """What can be chosen without changing what is learnt."""

    mesh: MeshConfig
    remat: RematPolicy
    grad_accum_steps: int

    @classmethod
    def from_experiment(cls, experiment: Experiment, devices: int) -> "Candidate":
        """The experiment as it is; -1 in its mesh becomes a number."""
        sizes: Any = experiment.mesh.axis_sizes(devices)
        mesh = dataclasses.replace(experiment.mesh, **sizes)
        return cls(mesh, experiment.model.remat, experiment.grad_accum_steps)

    def apply_to(self, experiment: Experiment) -> Experiment:
        """The experiment, trained this way."""
        model = dataclasses.replace(experiment.model, remat=self.remat)
        return dataclasses.replace(
            experiment, model=model, mesh=self.mesh, grad_accum_steps=self.grad_accum_steps
        )

    def flags(self) -> str:
        """What to give `fit`."""
        sizes = mesh_sizes(self.mesh)
        given = [f"--mesh.{name} {size}" for name, size in sizes.items() if size > 1]
        if self.mesh.data == 1:  # by default it takes all devices
            given.insert(0, "--mesh.data 1")
        if self.mesh.optimizer_placement != "device":
            given.append(f"--mesh.optimizer {self.mesh.optimizer_placement}")
        return " ".join(
            [*given, f"--accumulate {self.grad_accum_steps}", f"--model.remat {self.remat}"]
        )

    def mesh_text(self) -> str:
        """`fsdp 128 x tensor 8`."""
        sizes = mesh_sizes(self.mesh)
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return " x ".join(parts) or "one chip"


def mesh_sizes(mesh: MeshConfig) -> dict[str, int]:
    """The size of each axis."""
    return {axis: getattr(mesh, axis) for axis in MESH_AXES}


MIN_CONTEXT_PARALLEL_LENGTH = 8192
"""Tokens from which on it is tried to cut sequences."""


MEMORY_MARGIN = 0.05
"""Share of a chip's memory that is left free: the estimate is none too exact."""


class RankedCandidate(NamedTuple):
    """A candidate with its estimates."""

    candidate: Candidate
    estimate_footprint: Footprint
    time: StepTime
    fits: bool

    @property
    def sort_key(self) -> tuple[bool, float, float, int]:
        """What fits first: the fastest of it, and of those alike the one with least to overlap.

        Of what does not fit the smallest.
        """
        time, size = self.time, self.estimate_footprint.total
        return (
            (False, time.step_seconds, time.sequential_seconds, size)
            if self.fits
            else (True, size, 0.0, 0)
        )


def search_candidates(quantities: Quantities) -> list[RankedCandidate]:
    """All candidates that divide, the best first. Raises UsageError if none does."""
    found, problems = [], []
    asked = quantities.experiment.model.remat
    policies = SEARCHED_REMAT if asked in SEARCHED_REMAT else (*SEARCHED_REMAT, asked)
    for mesh in candidate_meshes(quantities):
        try:
            quantities.state_bytes(mesh)
        except UsageError as error:
            problems.append(str(error))
            continue
        for remat in policies:
            for accumulate in _microbatches(quantities, mesh):
                found.append(rank_candidate(quantities, Candidate(mesh, remat, accumulate)))
    if not found:
        setting, rows = quantities.experiment.row_multiple
        why = problems[0] if problems else f"{setting} {rows}: has too few rows to cut"
        raise UsageError(f"target {quantities.target.name}: no mesh divides the model ({why})")
    return sorted(found, key=lambda each: each.sort_key)


def rank_candidate(quantities: Quantities, candidate: Candidate) -> RankedCandidate:
    """One candidate with its estimates. Raises UsageError if its mesh does not divide the model."""
    size = estimate_footprint(quantities, candidate)
    fits = size.total <= quantities.target.memory_bytes * (1 - MEMORY_MARGIN)
    return RankedCandidate(candidate, size, estimate_step_time(quantities, candidate), fits)


def candidate_meshes(quantities: Quantities) -> Iterator[MeshConfig]:
    """Every mesh over all chips of the target that divides the batch and the heads."""
    count = quantities.target.num_chips
    for tensor in _divisors(count):
        for context in _contexts(quantities, count // tensor):
            for expert in _experts(quantities, count // tensor // context):
                rest = count // (tensor * context * expert)
                for fsdp in _divisors(rest):
                    yield dataclasses.replace(
                        quantities.experiment.mesh,
                        data=rest // fsdp,
                        fsdp=fsdp,
                        tensor=tensor,
                        context=context,
                        expert=expert,
                    )


def _contexts(quantities: Quantities, most: int) -> list[int]:
    """How sequences may be cut: long ones, where attention can go round a ring."""
    model = quantities.experiment.model
    rings = all(isinstance(block.mixer, AttentionConfig) for block in model.layer_pattern)
    if (
        quantities.sequence_length < MIN_CONTEXT_PARALLEL_LENGTH
        or not rings
        or model.encoder is not None
    ):
        return [1]
    return [size for size in _divisors(most) if quantities.sequence_length % (2 * size) == 0]


def _experts(quantities: Quantities, most: int) -> list[int]:
    counts = [
        block.feed_forward.num_experts
        for block in quantities.experiment.model.layer_pattern
        if isinstance(block.feed_forward, MoEConfig)
    ]
    return [size for size in _divisors(most) if all(count % size == 0 for count in counts or [1])]


def _microbatches(quantities: Quantities, mesh: MeshConfig) -> list[int]:
    """Numbers of microbatches: those that leave every chip whole rows."""
    _, rows = quantities.experiment.row_multiple
    parts = mesh.data * mesh.fsdp * mesh.expert
    if rows % parts:
        return []
    return [count for count in _divisors(rows // parts) if _accumulates(quantities, count)]


def _accumulates(quantities: Quantities, count: int) -> bool:
    """Whether the experiment may be trained in so many microbatches."""
    try:
        dataclasses.replace(quantities.experiment, grad_accum_steps=count)
    except ValueError:
        return False
    except UsageError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def with_best_mesh(experiment: Experiment, target: Target) -> tuple[Experiment, Candidate]:
    """The experiment on the fastest mesh that fits with its own other settings.

    If none does, rematerialisation and microbatches are chosen too. Raises UsageError if no mesh
    divides the model.
    """
    quantities = Quantities.from_experiment(
        resolve_precision(resolve_sizes(experiment)[0], target.hardware), target
    )
    best = _best(experiment, search_candidates(quantities))
    return dataclasses.replace(
        experiment,
        mesh=best.candidate.mesh,
        grad_accum_steps=best.candidate.grad_accum_steps,
        model=dataclasses.replace(experiment.model, remat=best.candidate.remat),
    ), best.candidate


def _best(experiment: Experiment, every: list[RankedCandidate]) -> RankedCandidate:
    own = (experiment.model.remat, experiment.grad_accum_steps)
    as_asked = [each for each in every if each.candidate[1:] == own and each.fits]
    return (as_asked or every)[0]
