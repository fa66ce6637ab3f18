"""What differentiation keeps of a forward pass, by tracing the real loss.

Arrays are counted by their shapes: those whose last axis is the model's width lie whole on every
part of the `tensor` axis, the others (heads, hidden units, scores) are cut by it.

How much memory a step takes on a chip: a model fitted to what compilers reserve.

The state and the batch are exact. What is reserved beside them is made of what differentiation
keeps (traced), gradients, and what a layer and the loss work with, each times a coefficient. The
coefficients are fitted to steps compiled for TPUs and GPUs (`bench/drills/plan.py`).
"""

import dataclasses
from typing import NamedTuple

from train.estimate.candidate import Candidate
from train.estimate.quantities import Quantities
from transformer.config import RematPolicy
from transformer.losses import choose_num_chunks


class Coefficients(NamedTuple):
    """What a compiler makes of each part."""

    residuals_none: float
    """Of what is kept for the backward pass as it is traced, layers without rematerialisation."""
    residuals_dots: float
    """The same with products kept."""
    residuals_full: float
    """The same with inputs of layers kept."""
    gradients: float
    layer_working_set: float
    """Of what one layer would keep: its working set while it is computed again."""
    gathered_weights: float
    """Of one layer's weights."""
    logits: float
    """Of the logits of a chunk, in float32."""


COEFFICIENTS = Coefficients(
    residuals_none=0.97,
    residuals_dots=0.93,
    residuals_full=0.8,
    gradients=1.14,
    layer_working_set=0.53,
    gathered_weights=3.31,
    logits=0.71,
)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of one chip."""

    weights: int
    optimizer: int
    """Its state; 0 if that lies with the host."""
    other_state: int
    batch: int
    gradients: int
    residuals: int
    """For the backward pass."""
    working_set: int
    """Of the layer or the loss that is being computed."""

    @property
    def arguments(self) -> int:
        return self.weights + self.optimizer + self.other_state + self.batch

    @property
    def temporaries(self) -> int:
        return self.gradients + self.residuals + self.working_set

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries


BATCH_BYTES_PER_TOKEN = 7 * 4
"""Of one token: tokens, segments, positions, targets, weights; of a pair, those of the source."""


def footprint_terms(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """What coefficients are applied to, by their names."""
    mesh, model = candidate.mesh, quantities.experiment.model
    rows = quantities.batch_size / (
        mesh.data * mesh.fsdp * mesh.expert * candidate.grad_accum_steps
    )
    share = rows / mesh.context
    none = quantities.residuals("none")
    # What is offloaded lies with the host: the chip has the inputs of layers.
    remat: RematPolicy = "full" if candidate.remat == "offload" else candidate.remat
    kept = quantities.residuals(remat).bytes_per_chip(share, mesh.tensor)
    target = quantities.target
    words = round(quantities.sequence_length * quantities.state_shapes.predicted_fraction)
    accumulated = quantities.batch_size // candidate.grad_accum_steps
    chunks = (
        choose_num_chunks(accumulated, words, model.padded_vocab_size, target.hardware)
        if words
        else 1
    )
    logits = 4 * share * words / chunks * model.padded_vocab_size / mesh.tensor
    gathered = (
        quantities.largest_layer_parameters
        * quantities.compute_itemsize
        / (mesh.tensor * mesh.expert)
    )
    return {
        f"residuals_{remat}": kept,
        "gradients": quantities.state_bytes(mesh).gradients
        * (1 if candidate.grad_accum_steps == 1 else 2),
        "layer_working_set": none.bytes_per_chip(share, mesh.tensor) / quantities.num_layers,
        "gathered_weights": gathered,
        "logits": logits,
    }


def apply_coefficients(terms: dict[str, float]) -> dict[str, float]:
    """Bytes of gradients, of what is kept, and of what is worked with, from `parts`."""
    sized = {name: getattr(COEFFICIENTS, name) * size for name, size in terms.items()}
    held = sum(
        sized.pop(name, 0.0) for name in ("residuals_none", "residuals_dots", "residuals_full")
    )
    gradients = sized.pop("gradients")
    return {"gradients": gradients, "residuals": held, "working_set": sum(sized.values())}


def estimate_footprint(quantities: Quantities, candidate: Candidate) -> Footprint:
    """The estimate. Raises UsageError for a mesh that does not divide the model."""
    mesh, state = candidate.mesh, quantities.state_bytes(candidate.mesh)
    found = apply_coefficients(footprint_terms(quantities, candidate))
    optimizer = state.optimizer
    if (
        mesh.optimizer_placement == "host"
    ):  # a layer's comes and goes at a time, or what is in no layer
        layers, others = quantities.layer_parameters, quantities.other_parameters
        share = max(quantities.largest_layer_parameters, others) / (layers + others)
        found["working_set"] = max(found["working_set"], 2 * share * optimizer - found["residuals"])
        optimizer = 0
    tokens = (
        quantities.batch_size
        * quantities.sequence_length
        / (mesh.data * mesh.fsdp * mesh.expert * mesh.context)
    )
    return Footprint(
        weights=state.weights,
        optimizer=optimizer,
        other_state=state.other,
        batch=int(tokens * BATCH_BYTES_PER_TOKEN),
        **{name: int(size) for name, size in found.items()},
    )
