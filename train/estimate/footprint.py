"""Estimated memory of a step on one chip, for `plan` and out-of-memory advice, uncompiled.

State and batch are exact. Temporaries are a linear model: traced residuals, gradients, the working
set of a layer, the gathered weights of a layer and the logits of a chunk, each times a coefficient.
The coefficients are fitted to steps compiled for TPUs and GPUs (`bench/drills/plan.py`).
"""

import dataclasses
from typing import NamedTuple

from train.estimate.candidate import Candidate
from train.estimate.quantities import Quantities
from transformer.chunked_cross_entropy import choose_num_chunks
from transformer.hardware import Platform
from transformer.models.stack import RematPolicy


class Coefficients(NamedTuple):
    """Bytes that compilers reserve per byte of each term."""

    residuals_none: float
    """Residuals of layers without rematerialization."""
    residuals_dots: float
    """Residuals with `dots`: outputs of weight matmuls."""
    residuals_full: float
    """Residuals with `full`: inputs of layers."""
    gradients: float
    layer_working_set: float
    """Residuals of one layer: the working set while the layer is recomputed."""
    gathered_weights: float
    """Weights of one layer, gathered over `fsdp`."""
    logits: float
    """Logits of one chunk, in float32."""
    output_gradient: float
    """Gradient of the output matrix, in float32, which is summed over chunks: not sharded over
    `fsdp`. 0 without `fsdp`, where it is part of the gradients."""


TPU_COEFFICIENTS = Coefficients(
    residuals_none=0.97,
    residuals_dots=0.93,
    residuals_full=0.8,
    gradients=1.14,
    layer_working_set=0.53,
    gathered_weights=3.31,
    logits=0.71,
    output_gradient=0.0,
)
COEFFICIENTS: dict[Platform, Coefficients] = {
    "cpu": TPU_COEFFICIENTS,
    "tpu": TPU_COEFFICIENTS,
    "gpu": Coefficients(
        residuals_none=1.01,
        residuals_dots=1.05,
        residuals_full=1.31,
        gradients=0.92,
        layer_working_set=0.56,
        gathered_weights=0.0,
        logits=0.71,
        output_gradient=1.88,
    ),
}
"""By platform. A CPU has those of TPUs; none is fitted to it."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Estimated bytes of one chip."""

    weights: int
    optimizer: int
    """Optimizer state on the chip; 0 if it is placed in host memory."""
    other_state: int
    batch: int
    gradients: int
    residuals: int
    """Arrays saved for the backward pass."""
    working_set: int
    """Working set of the layer or of the loss."""

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
"""Bytes per token of a batch: tokens, segments, positions, targets, weights, source and its
segments."""


def footprint_terms(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """Return the terms that the coefficients multiply, by name of the coefficient."""
    mesh, model = candidate.mesh, quantities.experiment.model
    rows = quantities.batch_size / (
        mesh.data * mesh.fsdp * mesh.expert * candidate.grad_accum_steps
    )
    local_rows = rows / mesh.context  # in whole sequences of T tokens
    no_remat = quantities.residuals("none")
    # With `offload` the matmul outputs are in host memory: the chip keeps the inputs of layers.
    remat: RematPolicy = "full" if candidate.remat == "offload" else candidate.remat
    residuals = quantities.residuals(remat).bytes_per_chip(local_rows, mesh.tensor)
    target = quantities.target
    targets = round(quantities.sequence_length * quantities.state_shapes.predicted_fraction)
    microbatch = quantities.batch_size // candidate.grad_accum_steps
    chunks = (
        choose_num_chunks(microbatch, targets, model.padded_vocab_size, target.hardware)
        if targets
        else 1
    )
    logits = 4 * local_rows * targets / chunks * model.padded_vocab_size / mesh.tensor
    # `fsdp` gathers one layer at a time; `tensor` and `expert` shards stay sharded.
    gathered = (
        quantities.largest_layer_parameters
        * quantities.compute_itemsize
        / (mesh.tensor * mesh.expert)
    )
    return {
        f"residuals_{remat}": residuals,
        "gradients": quantities.state_bytes(mesh).gradients
        * (1 if candidate.grad_accum_steps == 1 else 2),
        "layer_working_set": no_remat.bytes_per_chip(local_rows, mesh.tensor)
        / quantities.num_layers,
        "gathered_weights": gathered,
        "logits": logits,
        "output_gradient": 4.0 * model.padded_vocab_size * model.d_model / mesh.tensor
        if targets and mesh.fsdp > 1
        else 0.0,
    }


def apply_coefficients(terms: dict[str, float], platform: Platform) -> dict[str, float]:
    """Return estimated bytes of gradients, residuals and working set."""
    coefficients = COEFFICIENTS[platform]
    sizes = {name: getattr(coefficients, name) * size for name, size in terms.items()}
    residuals = sum(
        sizes.pop(name, 0.0) for name in ("residuals_none", "residuals_dots", "residuals_full")
    )
    gradients = sizes.pop("gradients")
    return {"gradients": gradients, "residuals": residuals, "working_set": sum(sizes.values())}


def estimate_footprint(quantities: Quantities, candidate: Candidate) -> Footprint:
    """Return the estimate for a candidate.

    Raises UsageError if its mesh does not divide the model.
    """
    mesh, state = candidate.mesh, quantities.state_bytes(candidate.mesh)
    platform = quantities.target.chip.platform
    temporaries = apply_coefficients(footprint_terms(quantities, candidate), platform)
    optimizer = state.optimizer
    if mesh.optimizer_placement == "host":
        # The optimizer's state visits the chip one layer at a time, double-buffered; parameters
        # outside the layers (embedding, output) visit in one piece.
        layers, others = quantities.layer_parameters, quantities.other_parameters
        fraction = max(quantities.largest_layer_parameters, others) / (layers + others)
        temporaries["working_set"] = max(
            temporaries["working_set"], 2 * fraction * optimizer - temporaries["residuals"]
        )
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
        **{name: int(size) for name, size in temporaries.items()},
    )
