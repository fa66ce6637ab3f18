"""Lower bound of the step time: a roofline of compute, memory and links.

Compute: the FLOPs that are executed (recomputation, masked scores where they are materialized, the
optimizer's own matmuls) at `Chip.attainable_fraction` of the peak. Memory: weights once per
microbatch and pass, optimizer state and gradients once, and the residuals of each layer, at
`ATTAINABLE_FRACTION` of the bandwidth. Links: the bytes of `bytes_sent`, each mesh axis over the
links it is laid on, plus the latency of each message around its ring.

Communication of `data` and `fsdp` overlaps with compute; that of `tensor`, `context` and `expert`
does not. Offloaded activations overlap with compute; offloaded optimizer state moves layer by layer
at the end of the step and does not. Hence

    step = max(compute, memory, data + fsdp, offloaded activations)
         + tensor + context + expert + offloaded optimizer.

A CPU does all of it with the same cores, so there the parts add up.

Bytes and messages between chips follow from the layout alone. `fsdp` gathers the sharded weights
for each microbatch, forward and backward, and reduce-scatters their gradients once (Rajbhandari et
al. 2020, section 7). `tensor` all-reduces the activations of each layer twice forward and twice
backward (Shoeybi et al. 2019, section 3), once more with recomputation. `context` passes keys and
values around a ring, and their gradients on the way back (Liu et al. 2023). `expert` sends tokens
to their experts and back, forward and backward (Lepikhin et al. 2021).
"""

import dataclasses
import math
from typing import NamedTuple

from train.estimate.candidate import Candidate
from train.estimate.chips import ATTAINABLE_FRACTION
from train.estimate.quantities import Quantities
from train.estimate.target import Target
from train.parallel.mesh import MESH_AXES
from transformer.attention.full import AttentionConfig
from transformer.layers.moe import MoEConfig

OVERLAPPED_AXES = ("data", "fsdp")
"""Mesh axes whose communication overlaps with compute."""

GATHERS_PER_MICROBATCH = 2.25
"""Weight gathers per microbatch: forward, backward, and some twice, as in compiled programs."""

MATRICES_PER_LAYER = 6
"""Matrices of a layer; each is gathered and scattered by a collective of its own."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one step by resource."""

    compute_seconds: float
    memory_seconds: float
    link_seconds: dict[str, float]
    """Communication by mesh axis."""
    model_flops: float
    """Model FLOPs of all chips: forward and backward without recomputation, visible scores only."""
    peak_flops_per_second: float
    """Peak of all chips together, in the compute dtype."""
    host_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Transfers to host memory and back: `activations`, `optimizer`."""
    overlaps: bool = True
    """True if compute, memory and communication overlap."""

    @property
    def step_seconds(self) -> float:
        """Return the roofline bound; `train/estimate/expected_time.py` gives the expected time."""
        # XLA's scheduler hides the weight gathers and gradient sums of `data` and `fsdp` behind the
        # matmuls of other layers. The activations of `tensor`, `context` and `expert` are the
        # input of the next matmul.
        hidden = sum(self.link_seconds.get(axis, 0.0) for axis in OVERLAPPED_AXES)
        waited = sum(self.link_seconds.values()) - hidden
        concurrent = (
            self.compute_seconds,
            self.memory_seconds,
            hidden,
            self.host_seconds.get("activations", 0.0),
        )
        waited += self.host_seconds.get("optimizer", 0.0)
        return (max(concurrent) if self.overlaps else sum(concurrent)) + waited

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization (Chowdhery et al. 2022) at the bound."""
        return self.model_flops / (self.step_seconds * self.peak_flops_per_second)

    @property
    def overlapped_seconds(self) -> float:
        """Return the time with everything overlapped."""
        transfers = sum(self.link_seconds.values()), sum(self.host_seconds.values())
        return max(self.compute_seconds, self.memory_seconds, *transfers)

    @property
    def sequential_seconds(self) -> float:
        """Return the time with nothing overlapped."""
        return (
            self.compute_seconds
            + self.memory_seconds
            + sum(self.link_seconds.values())
            + sum(self.host_seconds.values())
        )


def estimate_step_time(quantities: Quantities, candidate: Candidate) -> StepTime:
    """Return the roofline of one candidate."""
    chip = quantities.target.chip
    tokens = quantities.batch_size * quantities.sequence_length
    tokens_of_matmuls = (
        tokens_per_chip(quantities, candidate)
        / quantities.sequences_per_example
        / candidate.mesh.tensor
    )
    volumes, counts = bytes_sent(quantities, candidate), collective_counts(quantities, candidate)
    rings = {axis: axis_ring(quantities.target, candidate, axis) for axis in volumes}
    return StepTime(
        compute_seconds=tokens_of_matmuls
        * _train_flops_per_token(quantities, candidate)
        / (quantities.peak_flops_per_second * chip.attainable_fraction)
        + _optimizer_seconds(quantities, candidate),
        memory_seconds=_memory_traffic(quantities, candidate)
        / (chip.memory_bandwidth * ATTAINABLE_FRACTION),
        link_seconds={
            axis: size / rings[axis].bandwidth + counts[axis] * rings[axis].round_latency
            for axis, size in volumes.items()
        },
        model_flops=tokens * quantities.training_flops.total(causal=True),
        peak_flops_per_second=quantities.peak_flops_per_second * quantities.target.num_devices,
        host_seconds={
            what: size / (chip.host_bandwidth * ATTAINABLE_FRACTION)
            for what, size in _host_traffic(quantities, candidate).items()
        },
        overlaps=chip.platform != "cpu",
    )


def _train_flops_per_token(quantities: Quantities, candidate: Candidate) -> float:
    """Return FLOPs of one token, forward and backward, recomputation included."""
    flops = quantities.token_flops
    scores = flops.scores if quantities.computes_all_scores else flops.scores_causal
    # FLOPs of one more forward pass, as far as the policy discards it. `dots` saves the outputs of
    # weight matmuls, so only scores are recomputed.
    recomputed = {
        "none": 0.0,
        "dots": scores,
        "offload": scores,
        "full": flops.projections + flops.feed_forward + scores,
    }
    total = quantities.training_flops.total(causal=not quantities.computes_all_scores)
    return total + recomputed[candidate.remat]


def _optimizer_seconds(quantities: Quantities, candidate: Candidate) -> float:
    """Return seconds of the optimizer's own float32 matmuls on a chip's part of the weights."""
    mesh = candidate.mesh
    chip = quantities.target.chip
    speed = chip.peak_flops_per_second("float32") * chip.attainable_fraction
    return quantities.optimizer_flops / (mesh.fsdp * mesh.tensor * mesh.expert) / speed


def _memory_traffic(quantities: Quantities, candidate: Candidate) -> float:
    """Return the bytes between a chip and its memory."""
    mesh = candidate.mesh
    state = quantities.state_bytes(mesh)
    passes = 3 if candidate.remat == "full" else 2
    weights = (
        quantities.layer_parameters + quantities.other_parameters
    ) * quantities.compute_itemsize
    weights_per_pass = weights / (mesh.tensor * mesh.expert)
    residuals_per_row = quantities.residuals("none").bytes_per_chip(1, mesh.tensor)
    rows = _rows_per_chip(quantities, candidate)
    accesses = 3 if candidate.remat == "full" else 2  # written and read; written again by `full`
    update = 2 * (state.weights + state.optimizer + state.other) + 2 * state.gradients
    return (
        candidate.grad_accum_steps * passes * weights_per_pass
        + accesses * rows * residuals_per_row
        + update
    )


def _rows_per_chip(quantities: Quantities, candidate: Candidate) -> float:
    """Return the examples that one chip processes in a step, over all microbatches."""
    return tokens_per_chip(quantities, candidate) / (
        quantities.sequence_length * quantities.sequences_per_example
    )


def _host_traffic(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """Return the bytes to host memory and back, for `activations` and `optimizer`."""
    mesh = candidate.mesh
    traffic = {}
    if candidate.remat == "offload":
        rows = _rows_per_chip(quantities, candidate)
        dots, full = (
            quantities.residuals(each).bytes_per_chip(rows, mesh.tensor)
            for each in ("dots", "full")
        )
        traffic["activations"] = 2 * (dots - full)
    if mesh.optimizer_placement == "host":
        traffic["optimizer"] = 2.0 * quantities.state_bytes(mesh).optimizer
    return traffic


class Ring(NamedTuple):
    """Links under a mesh axis."""

    bandwidth: float
    """Bytes per second that a chip sends."""
    round_latency: float
    """Seconds of one trip around the ring."""


def axis_ring(target: Target, candidate: Candidate, axis: str) -> Ring:
    """Return the links under an axis of a mesh.

    The last axis of a mesh is laid on the nearest chips. On a torus an axis has the links of all
    dimensions that it fills, and messages travel both ways around. GPUs of one host are directly
    connected; a ring over several hosts uses the network, with one network card per GPU of the ring
    in each host.
    """
    chip, parts = target.chip, getattr(candidate.mesh, axis)
    inner = math.prod(
        getattr(candidate.mesh, name) for name in MESH_AXES[MESH_AXES.index(axis) + 1 :]
    )
    if chip.torus_dimensions:
        # Rings of the two devices of a chip share its links, unless one ring has both.
        sharing = math.gcd(inner, chip.devices_per_chip)
        on_chip = math.gcd(parts, chip.devices_per_chip // sharing)
        # Both ways around: a message crosses at most half of each filled dimension.
        filled = _filled_dimensions(target.shape, inner // sharing, parts // on_chip)
        return Ring(
            chip.link_bandwidth_per_dimension * len(filled) / sharing,
            chip.hop_latency * sum(filled) / 2,
        )
    if inner * parts <= chip.chips_per_host:
        return Ring(chip.link_bandwidth, chip.hop_latency)
    # A ring has chips_per_host // inner GPUs in each host, each with a network card of its own.
    network_cards = max(1, chip.chips_per_host // inner)
    hosts = inner * parts / chip.chips_per_host
    return Ring(
        min(chip.link_bandwidth, chip.network_bandwidth * network_cards), chip.hop_latency * hosts
    )


def _filled_dimensions(shape: tuple[int, ...], inner: int, parts: int) -> list[int]:
    """Return the torus dimensions that an axis of size `parts` fills.

    The `inner` chips of the axes after it occupy the smallest dimensions.
    """
    free = [size for size in sorted(shape) if size > 1]
    while free and inner >= free[0]:
        inner //= free.pop(0)
    filled: list[int] = []
    while free and math.prod(filled) < parts:
        filled.append(free.pop(0))
    return filled or [parts]


def bytes_sent(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """Return the bytes that each chip sends in a step, for mesh axes larger than 1."""
    mesh = candidate.mesh
    counts = {
        "data": _data_bytes(quantities, candidate),
        "fsdp": _fsdp_bytes(quantities, candidate),
        "expert": _expert_bytes(quantities, candidate),
        "context": _context_bytes(quantities, candidate),
        "tensor": _tensor_bytes(quantities, candidate),
    }
    return {axis: counts[axis] for axis in MESH_AXES if getattr(mesh, axis) > 1}


def collective_counts(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """Return the sequential collectives per chip and step, for mesh axes larger than 1."""
    recomputed = 1 if candidate.remat != "none" else 0
    layers = quantities.num_layers * candidate.grad_accum_steps
    counts = {
        "data": 1.0,  # gradients travel together
        "fsdp": layers * MATRICES_PER_LAYER * (GATHERS_PER_MICROBATCH + 1),
        "expert": layers * (4.0 + 2 * recomputed),
        "context": layers * (3.0 + recomputed) * (candidate.mesh.context - 1),
        "tensor": layers * (4.0 + recomputed),
    }
    return {axis: counts[axis] for axis in MESH_AXES if getattr(candidate.mesh, axis) > 1}


def tokens_per_chip(quantities: Quantities, candidate: Candidate) -> float:
    """Return the tokens of one chip in a step, over all microbatches."""
    mesh = candidate.mesh
    parts = mesh.data * mesh.fsdp * mesh.expert * mesh.context
    return (
        quantities.batch_size
        * quantities.sequence_length
        * quantities.sequences_per_example
        / parts
    )


def _gathered_weight_bytes(quantities: Quantities, candidate: Candidate) -> float:
    """Return the bytes of a chip's gathered weights in the compute dtype."""
    num_shards = candidate.mesh.tensor * candidate.mesh.expert
    return (
        (quantities.layer_parameters + quantities.other_parameters)
        / num_shards
        * quantities.compute_itemsize
    )


def _ring_fraction(parts: int) -> float:
    """Return the fraction of an array that each chip of a ring sends."""
    return (parts - 1) / parts


def _fsdp_bytes(quantities: Quantities, candidate: Candidate) -> float:
    gathered = _gathered_weight_bytes(quantities, candidate) * _ring_fraction(candidate.mesh.fsdp)
    return candidate.grad_accum_steps * gathered * (GATHERS_PER_MICROBATCH + 1)


def _data_bytes(quantities: Quantities, candidate: Candidate) -> float:
    gradients = _gathered_weight_bytes(quantities, candidate) / candidate.mesh.fsdp
    return candidate.grad_accum_steps * 2 * gradients * _ring_fraction(candidate.mesh.data)


def _tensor_bytes(quantities: Quantities, candidate: Candidate) -> float:
    times = 5 if candidate.remat != "none" else 4
    activations = tokens_per_chip(quantities, candidate) * _token_bytes(quantities)
    layers_per_token = quantities.num_layers / quantities.sequences_per_example
    return 2 * times * layers_per_token * activations * _ring_fraction(candidate.mesh.tensor)


def _context_bytes(quantities: Quantities, candidate: Candidate) -> float:
    """Return bytes of keys and values forward, and again with their gradients backward."""
    width = 0
    for block in quantities.experiment.model.layer_pattern:
        if isinstance(block.mixer, AttentionConfig):
            head_dim = block.mixer.resolved_head_dim(quantities.experiment.model.d_model)
            width += 2 * (block.mixer.num_kv_heads or block.mixer.num_heads) * head_dim
    mean_width = width / len(quantities.experiment.model.layer_pattern) / candidate.mesh.tensor
    bytes_per_hop = (
        tokens_per_chip(quantities, candidate) * mean_width * quantities.compute_itemsize
    )
    recomputed = 1 if candidate.remat != "none" else 0
    return (3 + recomputed) * quantities.num_layers * bytes_per_hop * (candidate.mesh.context - 1)


def _expert_bytes(quantities: Quantities, candidate: Candidate) -> float:
    experts_per_token = [
        block.feed_forward.num_experts_per_token
        for block in quantities.experiment.model.layer_pattern
        if isinstance(block.feed_forward, MoEConfig)
    ]
    mean_experts = sum(experts_per_token) / len(quantities.experiment.model.layer_pattern)
    recomputed = 1 if candidate.remat != "none" else 0
    activations = tokens_per_chip(quantities, candidate) * _token_bytes(quantities)
    return (
        (4 + 2 * recomputed)
        * quantities.num_layers
        * mean_experts
        * activations
        * _ring_fraction(candidate.mesh.expert)
    )


def _token_bytes(quantities: Quantities) -> int:
    """Return the bytes of one token's hidden state."""
    return quantities.experiment.model.d_model * quantities.compute_itemsize
