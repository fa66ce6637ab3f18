"""Time of a step: a roofline of compute, memory and links, and what runs reach of it.

Compute: the FLOPs that are executed (recomputation, masked scores where they are materialized, the
optimizer's own matmuls) at `Chip.attainable_fraction` of the peak. Memory: weights once per
microbatch and pass, optimizer state and gradients once, and the residuals of each layer, at
`ATTAINABLE_FRACTION` of the bandwidth. Links: the bytes of `link_traffic`, each mesh axis over the
links it is laid on, plus the latency of each message around its ring.

Communication of `data` and `fsdp` overlaps with compute; that of `tensor`, `context` and `expert`
does not. Offloaded activations overlap with compute; offloaded optimizer state moves layer by layer
at the end of the step and does not. Hence

    step = max(compute, memory, data + fsdp, offloaded activations)
         + tensor + context + expert + offloaded optimizer.

A CPU does all of it with the same cores, so there the parts add up.

The roofline is a bound: kernel launches, norms and stragglers cost nothing in it. Only measurements
tell how close a real trainer comes. So the same roofline is applied to the best published run of
each chip (`train/estimate/chips.py`), and the ratio of the two is the chip's `efficiency`:

    expected MFU = min(efficiency * bound of this plan, published MFU).

The ratio, because a step that is bound by memory or communication never reaches the MFU of a large
dense model. The minimum, because a plan should not promise more than a published run.
"""

import dataclasses
import math
from typing import NamedTuple, cast

from train.estimate.chips import (
    ATTAINABLE_FRACTION,
    CHIPS,
    CPU_EFFICIENCY,
    FALLBACK_CHIPS,
    PUBLISHED,
    Chip,
    PublishedRun,
)
from train.estimate.quantities import Candidate, Quantities
from train.estimate.target import Target
from train.parallel.mesh import MESH_AXES
from transformer.attention.full import AttentionConfig
from transformer.layers.moe import MoEConfig
from transformer.precision import DType

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
        """Return the roofline bound."""
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
    def sequential_seconds(self) -> float:
        """Return the time with nothing overlapped."""
        return (
            self.compute_seconds
            + self.memory_seconds
            + sum(self.link_seconds.values())
            + sum(self.host_seconds.values())
        )


def estimate_step_time(quantities: Quantities, candidate: Candidate, target: Target) -> StepTime:
    """Return the roofline of one candidate."""
    chip = target.chip
    dtype = cast(DType, quantities.experiment.model.precision.compute)  # resolved by now
    peak = chip.peak_flops_per_second(dtype)
    tokens_of_matmuls = (
        quantities.rows_per_chip(candidate.mesh)
        * quantities.sequence_length
        / candidate.mesh.tensor
    )
    rings = {axis: axis_ring(target, candidate, axis) for axis in MESH_AXES}
    return StepTime(
        compute_seconds=tokens_of_matmuls
        * _train_flops_per_token(quantities, candidate)
        / (peak * chip.attainable_fraction)
        + _optimizer_seconds(quantities, candidate, chip),
        memory_seconds=_memory_traffic(quantities, candidate)
        / (chip.memory_bandwidth * ATTAINABLE_FRACTION),
        link_seconds={
            axis: sent.bytes / rings[axis].bandwidth + sent.messages * rings[axis].round_latency
            for axis, sent in link_traffic(quantities, candidate).items()
        },
        model_flops=quantities.batch_size
        * quantities.sequence_length
        * quantities.training_flops.total(causal=True),
        peak_flops_per_second=peak * target.num_devices,
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


def _optimizer_seconds(quantities: Quantities, candidate: Candidate, chip: Chip) -> float:
    """Return seconds of the optimizer's own float32 matmuls on a chip's part of the weights."""
    mesh = candidate.mesh
    speed = chip.peak_flops_per_second("float32") * chip.attainable_fraction
    return quantities.optimizer_flops / (mesh.fsdp * mesh.tensor * mesh.expert) / speed


def _memory_traffic(quantities: Quantities, candidate: Candidate) -> float:
    """Return the bytes between a chip and its memory."""
    mesh = candidate.mesh
    state = quantities.state_bytes(mesh)
    passes = 3 if candidate.remat == "full" else 2
    residuals_per_row = quantities.residuals("none").bytes_per_chip(1, mesh.tensor)
    accesses = 3 if candidate.remat == "full" else 2  # written and read; written again by `full`
    update = 2 * (state.weights + state.optimizer + state.other) + 2 * state.gradients
    return (
        candidate.grad_accum_steps * passes * _gathered_weight_bytes(quantities, candidate)
        + accesses * quantities.rows_per_chip(candidate.mesh) * residuals_per_row
        + update
    )


def _host_traffic(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """Return the bytes to host memory and back, for `activations` and `optimizer`."""
    mesh = candidate.mesh
    traffic = {}
    if candidate.remat == "offload":
        rows = quantities.rows_per_chip(candidate.mesh)
        dots, full = (
            quantities.residuals(each).bytes_per_chip(rows, mesh.tensor)
            for each in ("dots", "full")
        )
        traffic["activations"] = 2 * (dots - full)
    if mesh.optimizer_placement == "host":
        traffic["optimizer"] = 2.0 * quantities.state_bytes(mesh).optimizer
    return traffic


def _gathered_weight_bytes(quantities: Quantities, candidate: Candidate) -> float:
    """Return the bytes of a chip's gathered weights in the compute dtype."""
    weights = quantities.layer_parameters + quantities.other_parameters
    return weights * quantities.compute_itemsize / (candidate.mesh.tensor * candidate.mesh.expert)


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
        bandwidth = chip.link_bandwidth / chip.torus_dimensions * len(filled) / sharing
        return Ring(bandwidth, chip.hop_latency * sum(filled) / 2)
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


class Traffic(NamedTuple):
    """What a chip sends along a mesh axis in a step."""

    bytes: float
    messages: float
    """Collectives, one after the other."""


def link_traffic(quantities: Quantities, candidate: Candidate) -> dict[str, Traffic]:
    """Return what each chip sends in a step, for mesh axes larger than 1.

    It follows from the layout alone. `fsdp` gathers the sharded weights for each microbatch,
    forward and backward, and reduce-scatters their gradients once (Rajbhandari et al. 2020, section
    7). `tensor` all-reduces the activations of each layer twice forward and twice backward (Shoeybi
    et al. 2019, section 3), once more with recomputation. `context` passes keys and values around a
    ring, and their gradients on the way back (Liu et al. 2023). `expert` sends tokens to their
    experts and back, forward and backward (Lepikhin et al. 2021).
    """
    mesh, microbatches = candidate.mesh, candidate.grad_accum_steps
    recomputed = 1 if candidate.remat != "none" else 0
    layers = quantities.num_layers
    layer_runs = layers * microbatches
    weights = _gathered_weight_bytes(quantities, candidate)
    side_tokens = quantities.rows_per_chip(candidate.mesh) * quantities.sequence_length
    tokens = side_tokens * quantities.sequences_per_example
    token_bytes = quantities.experiment.model.d_model * quantities.compute_itemsize
    keys_and_values = tokens * _kv_width(quantities) / mesh.tensor * quantities.compute_itemsize
    gathers = GATHERS_PER_MICROBATCH + 1
    # Of an array that travels around a ring, each chip sends all but its own part.
    others = {axis: 1 - 1 / getattr(mesh, axis) for axis in MESH_AXES}
    traffic = {
        # Gradients travel together, and an all-reduce sends them twice.
        "data": Traffic(microbatches * 2 * weights / mesh.fsdp * others["data"], 1),
        "fsdp": Traffic(
            microbatches * gathers * weights * others["fsdp"],
            layer_runs * MATRICES_PER_LAYER * gathers,
        ),
        "expert": Traffic(
            (4 + 2 * recomputed)
            * layers
            * _experts_per_token(quantities)
            * tokens
            * token_bytes
            * others["expert"],
            layer_runs * (4 + 2 * recomputed),
        ),
        "context": Traffic(
            (3 + recomputed) * layers * keys_and_values * (mesh.context - 1),
            layer_runs * (3 + recomputed) * (mesh.context - 1),
        ),
        # Each layer has the tokens of one side of an encoder-decoder.
        "tensor": Traffic(
            2 * (4 + recomputed) * layers * side_tokens * token_bytes * others["tensor"],
            layer_runs * (4 + recomputed),
        ),
    }
    return {axis: traffic[axis] for axis in MESH_AXES if getattr(mesh, axis) > 1}


def _kv_width(quantities: Quantities) -> float:
    """Return the width of the keys and values of a token, the mean of the layers."""
    model = quantities.experiment.model
    mixers = [block.mixer for block in model.layer_pattern]
    return sum(
        2 * (mixer.num_kv_heads or mixer.num_heads) * mixer.resolved_head_dim(model.d_model)
        for mixer in mixers
        if isinstance(mixer, AttentionConfig)
    ) / len(mixers)


def _experts_per_token(quantities: Quantities) -> float:
    """Return the experts that a token is sent to, the mean of the layers."""
    feed_forwards = [block.feed_forward for block in quantities.experiment.model.layer_pattern]
    return sum(
        feed_forward.num_experts_per_token
        for feed_forward in feed_forwards
        if isinstance(feed_forward, MoEConfig)
    ) / len(feed_forwards)


class ExpectedStep(NamedTuple):
    """Expected time and MFU of a step."""

    seconds: float
    mfu: float
    reason: str
    """Basis of the expectation."""
    published: PublishedRun | None = None
    """Best published run on this chip, or on the one that stands in for it."""


def expect_step(
    chip: Chip, bound_seconds: float, bound_mfu: float, measured_seconds: float | None = None
) -> ExpectedStep:
    """Return the expected time and MFU of a step with the roofline `bound_seconds`, `bound_mfu`.

    A measurement on the chip itself (`measured_seconds`) replaces the forecast.
    """
    own = PUBLISHED.get(chip.name)
    if measured_seconds is not None:
        mfu = bound_mfu * bound_seconds / measured_seconds
        return ExpectedStep(measured_seconds, mfu, "measured on this machine", own)
    if chip.platform == "cpu":
        reason = f"{CPU_EFFICIENCY:.0%} of the bound, the median of steps measured on CPUs"
        return ExpectedStep(bound_seconds / CPU_EFFICIENCY, bound_mfu * CPU_EFFICIENCY, reason)
    fallback = FALLBACK_CHIPS[chip.platform]
    run = own or PUBLISHED[fallback]
    # The ratio to the roofline carries over to other models; the published MFU is the upper limit.
    mfu = min(run.efficiency * bound_mfu, run.mfu_causal_scores)
    if own is None:
        reason = (
            f"as on {CHIPS[fallback].device_kind}: no MFU of a dense bfloat16 model published for "
            f"{chip.device_kind}"
        )
    elif mfu < run.efficiency * bound_mfu:
        reason = "no more than the best published run on this chip"
    else:
        reason = "as far from the bound as the best published run on this chip"
    seconds = bound_seconds * bound_mfu / mfu if mfu else bound_seconds
    return ExpectedStep(seconds, mfu, reason, run)
