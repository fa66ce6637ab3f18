"""What chips send each other in a step, by mesh axis: an estimate from the layout alone.

Weights that `fsdp` has cut are gathered for each microbatch, once forward and once backward, and
their gradients are summed and scattered once (Rajbhandari et al. 2020, section 7). Along `tensor`
each layer sums its activations twice forward and twice backward (Shoeybi et al. 2019, section 3),
and once more where the layer is computed again. Along `context` keys and values go round a ring,
with their gradients on the way back (Liu et al. 2023). Along `expert` tokens travel to their
experts and back, in both directions of differentiation (Lepikhin et al. 2021).
"""

from train.plan.candidate import Candidate
from train.plan.quantities import Quantities
from train.sharding.mesh import AXES
from transformer.attention import AttentionConfig
from transformer.mixture import MixtureConfig

GATHERS = 2.25
"""Times that weights are gathered in a microbatch: forward, backward, and some of them twice, as
the compiler's programs have it."""

MATRICES = 6
"""Of a layer: each is gathered and scattered by itself."""


def sent(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """Bytes that each chip sends in a step, by mesh axis; axes of one chip are left out."""
    mesh = candidate.mesh
    counts = {
        "data": _data(quantities, candidate),
        "fsdp": _fsdp(quantities, candidate),
        "expert": _expert(quantities, candidate),
        "context": _context(quantities, candidate),
        "tensor": _tensor(quantities, candidate),
    }
    return {axis: counts[axis] for axis in AXES if getattr(mesh, axis) > 1}


def messages(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """How many collectives a chip takes part in, one after the other, by mesh axis."""
    again = 1 if candidate.remat != "none" else 0
    layers = quantities.layers * candidate.accumulate
    counts = {
        "data": 1.0,  # gradients travel together
        "fsdp": layers * MATRICES * (GATHERS + 1),
        "expert": layers * (4.0 + 2 * again),
        "context": layers * (3.0 + again) * (candidate.mesh.context - 1),
        "tensor": layers * (4.0 + again),
    }
    return {axis: counts[axis] for axis in AXES if getattr(candidate.mesh, axis) > 1}


def local_tokens(quantities: Quantities, candidate: Candidate) -> float:
    """Tokens of a chip in one step, of all its microbatches."""
    mesh = candidate.mesh
    parts = mesh.data * mesh.fsdp * mesh.expert * mesh.context
    return quantities.rows * quantities.length * quantities.sides / parts


def _weights(quantities: Quantities, candidate: Candidate) -> float:
    """Bytes of the weights that a chip works with, gathered, in the dtype of products."""
    cut = candidate.mesh.tensor * candidate.mesh.expert
    return (quantities.layer_weights + quantities.other_weights) / cut * quantities.item


def _around(parts: int) -> float:
    """Share of an array that a ring of so many sends."""
    return (parts - 1) / parts


def _fsdp(quantities: Quantities, candidate: Candidate) -> float:
    whole = _weights(quantities, candidate) * _around(candidate.mesh.fsdp)
    return candidate.accumulate * whole * (GATHERS + 1)


def _data(quantities: Quantities, candidate: Candidate) -> float:
    gradients = _weights(quantities, candidate) / candidate.mesh.fsdp
    return candidate.accumulate * 2 * gradients * _around(candidate.mesh.data)


def _tensor(quantities: Quantities, candidate: Candidate) -> float:
    times = 5 if candidate.remat != "none" else 4
    activations = local_tokens(quantities, candidate) * _width(quantities)
    a_side = quantities.layers / quantities.sides
    return 2 * times * a_side * activations * _around(candidate.mesh.tensor)


def _context(quantities: Quantities, candidate: Candidate) -> float:
    """Keys and values forward, and again with their gradients backward."""
    heads = 0
    for block in quantities.experiment.model.pattern:
        if isinstance(block.mixer, AttentionConfig):
            width = block.mixer.query_width(quantities.experiment.model.width)
            heads += 2 * (block.mixer.kv_heads or block.mixer.heads) * width
    shared = heads / len(quantities.experiment.model.pattern) / candidate.mesh.tensor
    a_hop = local_tokens(quantities, candidate) * shared * quantities.item
    again = 1 if candidate.remat != "none" else 0
    return (3 + again) * quantities.layers * a_hop * (candidate.mesh.context - 1)


def _expert(quantities: Quantities, candidate: Candidate) -> float:
    chosen = [
        block.feed_forward.chosen
        for block in quantities.experiment.model.pattern
        if isinstance(block.feed_forward, MixtureConfig)
    ]
    share = sum(chosen) / len(quantities.experiment.model.pattern)
    again = 1 if candidate.remat != "none" else 0
    activations = local_tokens(quantities, candidate) * _width(quantities)
    return (
        (4 + 2 * again) * quantities.layers * share * activations * _around(candidate.mesh.expert)
    )


def _width(quantities: Quantities) -> int:
    """Bytes of one token between layers."""
    return quantities.experiment.model.width * quantities.item
