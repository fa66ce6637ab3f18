"""The least time that a step can take: a roofline of products, memory and links.

Compute: the operations that are really done (what is computed again counts, masked scores too where
they are all computed, and the optimizer's own products), at `Chip.attained` of the peak. Memory:
weights for each microbatch and pass, optimizer state and gradients once, and what each layer writes
and reads between products, at `ATTAINED` of the bandwidth. Links: the bytes of `traffic`, each mesh
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

from train.plan.candidate import Candidate
from train.plan.chips import ATTAINED
from train.plan.quantities import Quantities
from train.plan.target import Target
from train.plan.traffic import local_tokens, messages, sent
from train.sharding.mesh import AXES

HIDDEN = ("data", "fsdp")
"""Axes whose messages need not be waited for."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    compute: float
    memory: float
    links: dict[str, float]
    """By mesh axis."""
    model_flops: float
    """Of all chips together: forward and backward once, causal scores counted as causal."""
    peak: float
    """Operations a second of all chips together, in the dtype of products."""
    host: dict[str, float] = dataclasses.field(default_factory=dict)
    """To the memory of the host and back, by what."""
    beside: bool = True
    """Whether products, memory and messages can go on beside each other."""

    @property
    def step(self) -> float:
        """The least that the roofline allows: `train/plan/published.py` says what to expect."""
        hidden = sum(self.links.get(axis, 0.0) for axis in HIDDEN)
        waited = sum(self.links.values()) - hidden
        parts = (self.compute, self.memory, hidden, self.host.get("activations", 0.0))
        waited += self.host.get("optimizer", 0.0)
        return (max(parts) if self.beside else sum(parts)) + waited

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (Chowdhery et al. 2022) at the time of `step`: a bound."""
        return self.model_flops / (self.step * self.peak)

    @property
    def overlapped(self) -> float:
        """If all went on at the same time."""
        moved = sum(self.links.values()), sum(self.host.values())
        return max(self.compute, self.memory, *moved)

    @property
    def in_turn(self) -> float:
        """If nothing did."""
        return self.compute + self.memory + sum(self.links.values()) + sum(self.host.values())


def step_time(quantities: Quantities, candidate: Candidate) -> StepTime:
    """The estimate for one candidate."""
    chip = quantities.target.chip
    tokens = quantities.rows * quantities.length
    each = local_tokens(quantities, candidate) / quantities.sides / candidate.mesh.tensor
    volumes, counts = sent(quantities, candidate), messages(quantities, candidate)
    rings = {axis: ring(quantities.target, candidate, axis) for axis in volumes}
    return StepTime(
        compute=each * _operations(quantities, candidate) / (quantities.peak * chip.attained)
        + _update(quantities, candidate),
        memory=_moved(quantities, candidate) / (chip.bandwidth * ATTAINED),
        links={
            axis: size / rings[axis].bandwidth + counts[axis] * rings[axis].latency
            for axis, size in volumes.items()
        },
        model_flops=3 * tokens * quantities.flops.total(causal=True),
        peak=quantities.peak * quantities.target.count,
        host={
            what: size / (chip.host * ATTAINED)
            for what, size in _fetched(quantities, candidate).items()
        },
        beside=chip.platform != "cpu",
    )


def _operations(quantities: Quantities, candidate: Candidate) -> float:
    """Of one token, forward and backward, with what is computed again."""
    flops = quantities.flops
    scores = flops.scores if quantities.scored else flops.scores_causal
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
    speed = chip.peak("float32") * chip.attained
    return quantities.update / (mesh.fsdp * mesh.tensor * mesh.expert) / speed


def _moved(quantities: Quantities, candidate: Candidate) -> float:
    """Bytes between a chip and its memory."""
    mesh = candidate.mesh
    state = quantities.state(mesh)
    passes = 3 if candidate.remat == "full" else 2
    weights = (quantities.layer_weights + quantities.other_weights) * quantities.item
    a_pass = weights / (mesh.tensor * mesh.expert)
    between = quantities.kept("none").of(1, mesh.tensor)
    rows = local_tokens(quantities, candidate) / (quantities.length * quantities.sides)
    times = 3 if candidate.remat == "full" else 2  # written, and read; again where computed again
    updated = 2 * (state.weights + state.optimizer + state.other) + 2 * state.gradients
    return candidate.accumulate * passes * a_pass + times * rows * between + updated


def _fetched(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """Bytes to the memory of the host and back, by what."""
    mesh = candidate.mesh
    found = {}
    if candidate.remat == "offload":
        rows = local_tokens(quantities, candidate) / (quantities.length * quantities.sides)
        dots, full = (quantities.kept(each).of(rows, mesh.tensor) for each in ("dots", "full"))
        found["activations"] = 2 * (dots - full)
    if mesh.optimizer == "host":
        found["optimizer"] = 2.0 * quantities.state(mesh).optimizer
    return found


class Ring(NamedTuple):
    """What a mesh axis lies on."""

    bandwidth: float
    """Bytes a second that a chip sends."""
    latency: float
    """Seconds once round."""


def ring(target: Target, candidate: Candidate, axis: str) -> Ring:
    """Where an axis of a mesh lies on a target's links.

    The last axis of a mesh lies on the nearest chips. On a torus an axis has the links of as many
    dimensions as it fills, and messages go both ways round. GPUs of one host reach each other
    alike; a ring through several hosts goes through the network, with as many cards as it has GPUs
    in each host.
    """
    chip, parts = target.chip, getattr(candidate.mesh, axis)
    inner = math.prod(getattr(candidate.mesh, name) for name in AXES[AXES.index(axis) + 1 :])
    if chip.dimensions:
        filled = _filled(target.shape, inner, parts)
        return Ring(chip.link * len(filled), chip.latency * sum(filled) / 2)
    if inner * parts <= chip.per_host:
        return Ring(chip.links, chip.latency)
    cards = max(1, chip.per_host // inner)
    hosts = inner * parts / chip.per_host
    return Ring(min(chip.links, chip.network * cards), chip.latency * hosts)


def _filled(shape: tuple[int, ...], inner: int, parts: int) -> list[int]:
    """The dimensions of the torus that an axis fills, when `inner` chips within are taken."""
    left = [size for size in sorted(shape) if size > 1]
    while left and inner >= left[0]:
        inner //= left.pop(0)
    filled: list[int] = []
    while left and math.prod(filled) < parts:
        filled.append(left.pop(0))
    return filled or [parts]
