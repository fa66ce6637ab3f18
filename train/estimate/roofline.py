"""The least time that a step can take: a roofline of products, memory and links.

Compute: the operations that are really done (what is computed again counts, masked scores too where
they are all computed, and the optimizer's own products), at `Chip.attainable_fraction` of the peak. Memory:
weights for each microbatch and pass, optimizer state and gradients once, and what each layer writes
and reads between products, at `ATTAINED` of the bandwidth. Links: the bytes of `attention_traffic`, each mesh
axis over the links that it lies on, and for each message the way round the ring. What `data` and
`fsdp` send can go on while the chip computes; what `tensor`, `context` and `expert` send is waited
for. What is offloaded of a forward pass goes to the host while the chip computes, and comes back
so; an optimizer's state with the host comes and goes layer by layer when nothing else is to be
done, and is waited for. So a step takes

    max(compute, memory, data + fsdp, offloaded) + tensor + context + expert + optimizer.

Everything at the same time is the least that it could take, one after the other the most. A
processor's cores do all of it themselves: there it is one after the other.
"""

import dataclasses
import math
from typing import NamedTuple

from train.estimate.candidate import Candidate
from train.estimate.chips import ATTAINABLE_FRACTION
from train.estimate.quantities import Quantities
from train.estimate.target import Target
from train.estimate.traffic import bytes_sent, collective_counts, tokens_per_chip
from train.parallel.mesh import MESH_AXES

OVERLAPPED_AXES = ("data", "fsdp")
"""Axes whose messages need not be waited for."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    compute_seconds: float
    memory_seconds: float
    link_seconds: dict[str, float]
    """By mesh axis."""
    model_flops: float
    """Of all chips together: forward and backward once, causal scores counted as causal."""
    peak_flops_per_second: float
    """Operations a second of all chips together, in the dtype of products."""
    host_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """To the memory of the host and back, by what."""
    overlaps: bool = True
    """Whether products, memory and messages can go on beside each other."""

    @property
    def step_seconds(self) -> float:
        """The least that the roofline allows: `train/estimate/published.py` says what to expect."""
        hidden = sum(self.link_seconds.get(axis, 0.0) for axis in OVERLAPPED_AXES)
        waited = sum(self.link_seconds.values()) - hidden
        parts = (
            self.compute_seconds,
            self.memory_seconds,
            hidden,
            self.host_seconds.get("activations", 0.0),
        )
        waited += self.host_seconds.get("optimizer", 0.0)
        return (max(parts) if self.overlaps else sum(parts)) + waited

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (Chowdhery et al. 2022) at the time of `step`: a bound."""
        return self.model_flops / (self.step_seconds * self.peak_flops_per_second)

    @property
    def overlapped_seconds(self) -> float:
        """If all went on at the same time."""
        moved = sum(self.link_seconds.values()), sum(self.host_seconds.values())
        return max(self.compute_seconds, self.memory_seconds, *moved)

    @property
    def sequential_seconds(self) -> float:
        """If nothing did."""
        return (
            self.compute_seconds
            + self.memory_seconds
            + sum(self.link_seconds.values())
            + sum(self.host_seconds.values())
        )


def estimate_step_time(quantities: Quantities, candidate: Candidate) -> StepTime:
    """The estimate for one candidate."""
    chip = quantities.target.chip
    tokens = quantities.batch_size * quantities.sequence_length
    each = (
        tokens_per_chip(quantities, candidate)
        / quantities.sequences_per_example
        / candidate.mesh.tensor
    )
    volumes, counts = bytes_sent(quantities, candidate), collective_counts(quantities, candidate)
    rings = {axis: axis_ring(quantities.target, candidate, axis) for axis in volumes}
    return StepTime(
        compute_seconds=each
        * _operations(quantities, candidate)
        / (quantities.peak_flops_per_second * chip.attainable_fraction)
        + _update(quantities, candidate),
        memory_seconds=_moved(quantities, candidate)
        / (chip.memory_bandwidth * ATTAINABLE_FRACTION),
        link_seconds={
            axis: size / rings[axis].bandwidth + counts[axis] * rings[axis].round_latency
            for axis, size in volumes.items()
        },
        model_flops=3 * tokens * quantities.token_flops.total(causal=True),
        peak_flops_per_second=quantities.peak_flops_per_second * quantities.target.num_chips,
        host_seconds={
            what: size / (chip.host_bandwidth * ATTAINABLE_FRACTION)
            for what, size in _fetched(quantities, candidate).items()
        },
        overlaps=chip.platform != "cpu",
    )


def _operations(quantities: Quantities, candidate: Candidate) -> float:
    """Of one token, forward and backward, with what is computed again."""
    flops = quantities.token_flops
    scores = flops.scores if quantities.computes_all_scores else flops.scores_causal
    again = {
        "none": 0.0,
        "dots": scores,
        "offload": scores,
        "full": flops.projections + flops.feed_forward + scores,
    }
    forward = flops.projections + flops.feed_forward + scores + flops.vocabulary
    return 3 * forward + again[candidate.remat]


def _update(quantities: Quantities, candidate: Candidate) -> float:
    """Seconds of the optimizer's own products: in float32, of a chip's part of the weights."""
    mesh = candidate.mesh
    chip = quantities.target.chip
    speed = chip.peak_flops_per_second("float32") * chip.attainable_fraction
    return quantities.optimizer_flops / (mesh.fsdp * mesh.tensor * mesh.expert) / speed


def _moved(quantities: Quantities, candidate: Candidate) -> float:
    """Bytes between a chip and its memory."""
    mesh = candidate.mesh
    state = quantities.state_bytes(mesh)
    passes = 3 if candidate.remat == "full" else 2
    weights = (
        quantities.layer_parameters + quantities.other_parameters
    ) * quantities.compute_itemsize
    a_pass = weights / (mesh.tensor * mesh.expert)
    between = quantities.residuals("none").bytes_per_chip(1, mesh.tensor)
    rows = tokens_per_chip(quantities, candidate) / (
        quantities.sequence_length * quantities.sequences_per_example
    )
    times = 3 if candidate.remat == "full" else 2  # written, and read; again where computed again
    updated = 2 * (state.weights + state.optimizer + state.other) + 2 * state.gradients
    return candidate.grad_accum_steps * passes * a_pass + times * rows * between + updated


def _fetched(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """Bytes to the memory of the host and back, by what."""
    mesh = candidate.mesh
    found = {}
    if candidate.remat == "offload":
        rows = tokens_per_chip(quantities, candidate) / (
            quantities.sequence_length * quantities.sequences_per_example
        )
        dots, full = (
            quantities.residuals(each).bytes_per_chip(rows, mesh.tensor)
            for each in ("dots", "full")
        )
        found["activations"] = 2 * (dots - full)
    if mesh.optimizer_placement == "host":
        found["optimizer"] = 2.0 * quantities.state_bytes(mesh).optimizer
    return found


class Ring(NamedTuple):
    """What a mesh axis lies on."""

    bandwidth: float
    """Bytes a second that a chip sends."""
    round_latency: float
    """Seconds once round."""


def axis_ring(target: Target, candidate: Candidate, axis: str) -> Ring:
    """Where an axis of a mesh lies on a target's links.

    The last axis of a mesh lies on the nearest chips. On a torus an axis has the links of as many
    dimensions as it fills, and messages go both ways round. GPUs of one host reach each other
    alike; a ring through several hosts goes through the network, with as many cards as it has GPUs
    in each host.
    """
    chip, parts = target.chip, getattr(candidate.mesh, axis)
    inner = math.prod(
        getattr(candidate.mesh, name) for name in MESH_AXES[MESH_AXES.index(axis) + 1 :]
    )
    if chip.torus_dimensions:
        filled = _filled(target.shape, inner, parts)
        return Ring(
            chip.link_bandwidth_per_dimension * len(filled), chip.hop_latency * sum(filled) / 2
        )
    if inner * parts <= chip.chips_per_host:
        return Ring(chip.link_bandwidth, chip.hop_latency)
    cards = max(1, chip.chips_per_host // inner)
    hosts = inner * parts / chip.chips_per_host
    return Ring(min(chip.link_bandwidth, chip.network_bandwidth * cards), chip.hop_latency * hosts)


def _filled(shape: tuple[int, ...], inner: int, parts: int) -> list[int]:
    """The dimensions of the torus that an axis fills, when `inner` chips within are taken."""
    left = [size for size in sorted(shape) if size > 1]
    while left and inner >= left[0]:
        inner //= left.pop(0)
    filled: list[int] = []
    while left and math.prod(filled) < parts:
        filled.append(left.pop(0))
    return filled or [parts]
