"""What a chip has of the state of a run, exactly, for any mesh, without a device.

What chips send each other in a step, by mesh axis: an estimate from the layout alone.

Weights that `fsdp` has cut are gathered for each microbatch, once forward and once backward, and
their gradients are summed and scattered once (Rajbhandari et al. 2020, section 7). Along `tensor`
each layer sums its activations twice forward and twice backward (Shoeybi et al. 2019, section 3),
and once more where the layer is computed again. Along `context` keys and values go round a ring,
with their gradients on the way back (Liu et al. 2023). Along `expert` tokens travel to their
experts and back, in both directions of differentiation (Lepikhin et al. 2021).
"""

from train.estimate.candidate import Candidate
from train.estimate.quantities import Quantities
from train.parallel.mesh import MESH_AXES
from transformer.attention.config import AttentionConfig
from transformer.layers.config import MoEConfig

GATHERS_PER_MICROBATCH = 2.25
"""Times that weights are gathered in a microbatch: forward, backward, and some of them twice, as
the compiler's programs have it."""


MATRICES_PER_LAYER = 6
"""Of a layer: each is gathered and scattered by itself."""


def bytes_sent(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """Bytes that each chip sends in a step, by mesh axis; axes of one chip are left out."""
    mesh = candidate.mesh
    counts = {
        "data": _data(quantities, candidate),
        "fsdp": _fsdp(quantities, candidate),
        "expert": _expert(quantities, candidate),
        "context": _context(quantities, candidate),
        "tensor": _tensor(quantities, candidate),
    }
    return {axis: counts[axis] for axis in MESH_AXES if getattr(mesh, axis) > 1}


def collective_counts(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """How many collectives a chip takes part in, one after the other, by mesh axis."""
    again = 1 if candidate.remat != "none" else 0
    layers = quantities.num_layers * candidate.grad_accum_steps
    counts = {
        "data": 1.0,  # gradients travel together
        "fsdp": layers * MATRICES_PER_LAYER * (GATHERS_PER_MICROBATCH + 1),
        "expert": layers * (4.0 + 2 * again),
        "context": layers * (3.0 + again) * (candidate.mesh.context - 1),
        "tensor": layers * (4.0 + again),
    }
    return {axis: counts[axis] for axis in MESH_AXES if getattr(candidate.mesh, axis) > 1}


def tokens_per_chip(quantities: Quantities, candidate: Candidate) -> float:
    """Tokens of a chip in one step, of all its microbatches."""
    mesh = candidate.mesh
    parts = mesh.data * mesh.fsdp * mesh.expert * mesh.context
    return (
        quantities.batch_size
        * quantities.sequence_length
        * quantities.sequences_per_example
        / parts
    )


def _weights(quantities: Quantities, candidate: Candidate) -> float:
    """Bytes of the weights that a chip works with, gathered, in the dtype of products."""
    cut = candidate.mesh.tensor * candidate.mesh.expert
    return (
        (quantities.layer_parameters + quantities.other_parameters)
        / cut
        * quantities.compute_itemsize
    )


def _around(parts: int) -> float:
    """Share of an array that a ring of so many sends."""
    return (parts - 1) / parts


def _fsdp(quantities: Quantities, candidate: Candidate) -> float:
    whole = _weights(quantities, candidate) * _around(candidate.mesh.fsdp)
    return candidate.grad_accum_steps * whole * (GATHERS_PER_MICROBATCH + 1)


def _data(quantities: Quantities, candidate: Candidate) -> float:
    gradients = _weights(quantities, candidate) / candidate.mesh.fsdp
    return candidate.grad_accum_steps * 2 * gradients * _around(candidate.mesh.data)


def _tensor(quantities: Quantities, candidate: Candidate) -> float:
    times = 5 if candidate.remat != "none" else 4
    activations = tokens_per_chip(quantities, candidate) * _width(quantities)
    a_side = quantities.num_layers / quantities.sequences_per_example
    return 2 * times * a_side * activations * _around(candidate.mesh.tensor)


def _context(quantities: Quantities, candidate: Candidate) -> float:
    """Keys and values forward, and again with their gradients backward."""
    heads = 0
    for block in quantities.experiment.model.layer_pattern:
        if isinstance(block.mixer, AttentionConfig):
            width = block.mixer.resolved_head_dim(quantities.experiment.model.d_model)
            heads += 2 * (block.mixer.num_kv_heads or block.mixer.num_heads) * width
    shared = heads / len(quantities.experiment.model.layer_pattern) / candidate.mesh.tensor
    a_hop = tokens_per_chip(quantities, candidate) * shared * quantities.compute_itemsize
    again = 1 if candidate.remat != "none" else 0
    return (3 + again) * quantities.num_layers * a_hop * (candidate.mesh.context - 1)


def _expert(quantities: Quantities, candidate: Candidate) -> float:
    chosen = [
        block.feed_forward.num_experts_per_token
        for block in quantities.experiment.model.layer_pattern
        if isinstance(block.feed_forward, MoEConfig)
    ]
    share = sum(chosen) / len(quantities.experiment.model.layer_pattern)
    again = 1 if candidate.remat != "none" else 0
    activations = tokens_per_chip(quantities, candidate) * _width(quantities)
    return (
        (4 + 2 * again)
        * quantities.num_layers
        * share
        * activations
        * _around(candidate.mesh.expert)
    )


def _width(quantities: Quantities) -> int:
    """Bytes of one token between layers."""
    return quantities.experiment.model.d_model * quantities.compute_itemsize
