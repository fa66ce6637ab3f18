"""Estimated bytes and messages between chips in one step, by mesh axis, from the layout alone.

`fsdp` gathers the sharded weights for each microbatch, forward and backward, and reduce-scatters
their gradients once (Rajbhandari et al. 2020, section 7). `tensor` all-reduces the activations of
each layer twice forward and twice backward (Shoeybi et al. 2019, section 3), once more with
recomputation. `context` passes keys and values around a ring, and their gradients on the way back
(Liu et al. 2023). `expert` sends tokens to their experts and back, forward and backward (Lepikhin
et al. 2021).
"""

from train.estimate.candidate import Candidate
from train.estimate.quantities import Quantities
from train.parallel.mesh import MESH_AXES
from transformer.attention.config import AttentionConfig
from transformer.layers.config import MoEConfig

GATHERS_PER_MICROBATCH = 2.25
"""Weight gathers per microbatch: forward, backward, and some twice, as in compiled programs."""


MATRICES_PER_LAYER = 6
"""Matrices of a layer; each is gathered and scattered by a collective of its own."""


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
