"""How much memory a step takes on a chip: a model fitted to what compilers reserve.

The state and the batch are exact. What is reserved beside them is made of what differentiation
keeps (traced), gradients, and what a layer and the loss work with, each times a coefficient. The
coefficients are fitted to steps compiled for TPUs and GPUs (`bench/drills/plan.py`).
"""

import dataclasses
from typing import NamedTuple

from train.plan.candidate import Candidate
from train.plan.quantities import Quantities
from transformer.config import Remat
from transformer.losses import chunk_count


class Coefficients(NamedTuple):
    """What a compiler makes of each part."""

    kept: float
    """Of what is kept for the backward pass as it is traced, layers without rematerialisation."""
    dots: float
    """The same with products kept."""
    full: float
    """The same with inputs of layers kept."""
    gradients: float
    layer: float
    """Of what one layer would keep: its working set while it is computed again."""
    gathered: float
    """Of one layer's weights."""
    loss: float
    """Of the logits of a chunk, in float32."""


COEFFICIENTS = Coefficients(
    kept=0.97, dots=0.93, full=0.8, gradients=1.14, layer=0.53, gathered=3.31, loss=0.71
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
    kept: int
    """For the backward pass."""
    working: int
    """Of the layer or the loss that is being computed."""

    @property
    def arguments(self) -> int:
        return self.weights + self.optimizer + self.other_state + self.batch

    @property
    def temporaries(self) -> int:
        return self.gradients + self.kept + self.working

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries


BATCH_BYTES = 7 * 4
"""Of one token: tokens, segments, positions, targets, weights; of a pair, those of the source."""


def parts(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """What coefficients are applied to, by their names."""
    mesh, model = candidate.mesh, quantities.experiment.model
    rows = quantities.rows / (mesh.data * mesh.fsdp * mesh.expert * candidate.accumulate)
    share = rows / mesh.context
    none = quantities.kept("none")
    # What is offloaded lies with the host: the chip has the inputs of layers.
    remat: Remat = "full" if candidate.remat == "offload" else candidate.remat
    kept = quantities.kept(remat).of(share, mesh.tensor)
    target = quantities.target
    words = round(quantities.length * quantities.states.told)
    accumulated = quantities.rows // candidate.accumulate
    chunks = chunk_count(accumulated, words, model.vocab_rows, target.hardware) if words else 1
    logits = 4 * share * words / chunks * model.vocab_rows / mesh.tensor
    gathered = quantities.largest_layer * quantities.item / (mesh.tensor * mesh.expert)
    return {
        "kept" if remat == "none" else remat: kept,
        "gradients": quantities.state(mesh).gradients * (1 if candidate.accumulate == 1 else 2),
        "layer": none.of(share, mesh.tensor) / quantities.layers,
        "gathered": gathered,
        "loss": logits,
    }


def assembled(found: dict[str, float]) -> dict[str, float]:
    """Bytes of gradients, of what is kept, and of what is worked with, from `parts`."""
    sized = {name: getattr(COEFFICIENTS, name) * size for name, size in found.items()}
    held = sum(sized.pop(name, 0.0) for name in ("kept", "dots", "full"))
    gradients = sized.pop("gradients")
    return {"gradients": gradients, "kept": held, "working": sum(sized.values())}


def footprint(quantities: Quantities, candidate: Candidate) -> Footprint:
    """The estimate. Raises UsageError for a mesh that does not divide the model."""
    mesh, state = candidate.mesh, quantities.state(candidate.mesh)
    found = assembled(parts(quantities, candidate))
    optimizer = state.optimizer
    if mesh.optimizer == "host":  # a layer's comes and goes at a time, or what is in no layer
        layers, others = quantities.layer_weights, quantities.other_weights
        share = max(quantities.largest_layer, others) / (layers + others)
        found["working"] = max(found["working"], 2 * share * optimizer - found["kept"])
        optimizer = 0
    tokens = (
        quantities.rows * quantities.length / (mesh.data * mesh.fsdp * mesh.expert * mesh.context)
    )
    return Footprint(
        weights=state.weights,
        optimizer=optimizer,
        other_state=state.other,
        batch=int(tokens * BATCH_BYTES),
        **{name: int(size) for name, size in found.items()},
    )
