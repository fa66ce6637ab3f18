"""Memory of a training step without a compiler, for `plan`, `describe` and out-of-memory advice.

State and batch are exact. What a step has besides is

    r residuals + gradients + 2/3 layer + a logits + b gathered layer + c output gradient:

the arrays saved for the backward pass, the gradients in float32 (twice while microbatches
accumulate), the residuals of one layer while it is recomputed, the float32 logits of one chunk of
the loss, the weights of a layer in the compute dtype, which `fsdp` gathers, and the float32
gradient of the output matrix, which chunks sum without shards of `fsdp`. The fraction of a layer,
r and a to c are fitted to steps compiled for TPUs and GPUs (`bench/drills/plan.py`).
"""

import dataclasses
from typing import NamedTuple

from train.estimate.quantities import Candidate, Quantities
from transformer.chunked_cross_entropy import choose_num_chunks
from transformer.hardware import Platform
from transformer.models.stack import RematPolicy


class Coefficients(NamedTuple):
    """Bytes that compilers reserve per byte of a term; gradients count once."""

    residuals: float
    layer: float
    logits: float
    gathered_layer: float
    """On TPUs 2: the layer in use and the next one, whose weights arrive meanwhile."""
    output_gradient: float


COEFFICIENTS: dict[Platform, Coefficients] = {
    "cpu": Coefficients(1.0, layer=2 / 3, logits=0.5, gathered_layer=0.0, output_gradient=0.0),
    "tpu": Coefficients(0.97, layer=2 / 3, logits=0.5, gathered_layer=2.0, output_gradient=0.0),
    "gpu": Coefficients(1.0, layer=2 / 3, logits=0.9, gathered_layer=0.0, output_gradient=2.0),
}
"""By platform. Those of a CPU are taken from TPUs; none is fitted to it."""


@dataclasses.dataclass(frozen=True)
class Memory:
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


class Terms(NamedTuple):
    """Bytes of the parts of a chip's temporaries, before coefficients."""

    residuals: float
    gradients: float
    layer: float
    """Residuals of one layer while it is recomputed; 0 without rematerialization."""
    logits: float
    gathered_layer: float
    """Weights of the largest layer in the compute dtype; `tensor` and `expert` shard them."""
    output_gradient: float

    def estimated(self, platform: Platform) -> "Terms":
        """Return the bytes that the platform's compiler is estimated to reserve for each part."""
        coefficients = COEFFICIENTS[platform]._asdict()
        return self._replace(**{name: c * getattr(self, name) for name, c in coefficients.items()})


def count_terms(quantities: Quantities, candidate: Candidate) -> Terms:
    """Return the parts of a chip's temporaries.

    Raises UsageError if the mesh does not divide the model.
    """
    mesh, model = candidate.mesh, quantities.experiment.model
    microbatches = candidate.grad_accum_steps
    local_rows = quantities.rows_per_chip(mesh) / microbatches
    # With `offload` the matmul outputs are in host memory: the chip keeps the inputs of layers.
    remat: RematPolicy = "full" if candidate.remat == "offload" else candidate.remat
    layer = 0.0
    if remat != "none":
        every_layer = quantities.residuals("none").bytes_per_chip(local_rows, mesh.tensor)
        layer = every_layer / quantities.num_layers
    targets = round(quantities.sequence_length * quantities.predicted_fraction)
    vocabulary, chunks = model.padded_vocab_size, 1
    if targets:
        microbatch = quantities.batch_size // microbatches
        chunks = choose_num_chunks(
            microbatch, targets, model.embedding_width, vocabulary, quantities.hardware
        )
    return Terms(
        residuals=quantities.residuals(remat).bytes_per_chip(local_rows, mesh.tensor),
        gradients=quantities.state_bytes(mesh).gradients * (1 if microbatches == 1 else 2),
        layer=layer,
        logits=4 * local_rows * targets / chunks * vocabulary / mesh.tensor,
        gathered_layer=quantities.largest_layer_parameters
        * quantities.compute_itemsize
        / (mesh.tensor * mesh.expert),
        output_gradient=4.0 * vocabulary * model.embedding_width / mesh.tensor
        if targets and mesh.fsdp > 1
        else 0.0,
    )


def estimate_memory(quantities: Quantities, candidate: Candidate) -> Memory:
    """Return the estimate for a candidate.

    Raises UsageError if its mesh does not divide the model.
    """
    mesh, state = candidate.mesh, quantities.state_bytes(candidate.mesh)
    parts = count_terms(quantities, candidate).estimated(quantities.hardware.platform)
    working_set = parts.layer + parts.logits + parts.gathered_layer + parts.output_gradient
    optimizer = state.optimizer
    if mesh.optimizer_placement == "host":
        # The optimizer's state visits the chip one layer at a time, double-buffered; parameters
        # outside the layers (embedding, output) visit in one piece.
        layers, others = quantities.layer_parameters, quantities.other_parameters
        fraction = max(quantities.largest_layer_parameters, others) / (layers + others)
        working_set = max(working_set, 2 * fraction * optimizer - parts.residuals)
        optimizer = 0
    tokens = quantities.rows_per_chip(mesh) * quantities.sequence_length
    return Memory(
        weights=state.weights,
        optimizer=optimizer,
        other_state=state.other,
        batch=int(tokens * BATCH_BYTES_PER_TOKEN),
        gradients=int(parts.gradients),
        residuals=int(parts.residuals),
        working_set=int(working_set),
    )
