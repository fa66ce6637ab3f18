"""A description as plain numbers, for programs."""

import dataclasses
from typing import TYPE_CHECKING, Any

from train.describe.combinations import Combination
from train.describe.compiler import Compiled
from train.describe.decoding import LARGE_BATCH, Decoding

if TYPE_CHECKING:
    from train.describe import Description
    from train.describe.memory import Memory
    from transformer.costs import Flops
    from transformer.sizes import Parameters


def as_dict(description: "Description") -> dict[str, Any]:
    """Numbers of parameters, operations a token, and bytes."""
    own, *others = description.flops
    return {
        "batch_size": description.batch_size,
        "sequence_length": description.sequence_length,
        "parameters": _parameters(description.parameters) | {"estimate": description.estimate},
        "flops_per_token": {
            "forward": _flops(own),
            "training": _flops(own, times=3),
            "training_estimate": description.training_estimate,
            "forward_by_length": [_flops(each) for each in (own, *others)],
        },
        "memory_bytes": _memory(description.memory) | {"optimizer_kind": description.optimizer},
        "memory_by_precision_and_optimizer": [_combination(c) for c in description.combinations],
        "eight_bit_optimizer_bytes": dataclasses.asdict(description.eight_bits),
        "compiler_bytes": _compiled(description.compiled),
        "decoding": _decodings(description.decoding),
        "attention_bytes_per_token": description.traffic._asdict(),
        "notes": list(description.notes),
    }


def _parameters(parameters: "Parameters") -> dict[str, Any]:
    return {
        "total": parameters.total,
        "padding": parameters.padding,
        "heads": parameters.heads,
        "active": parameters.active,
        "allocated": parameters.allocated,
        "parts": dict(parameters.parts),
    }


def _flops(flops: "Flops", times: int = 1) -> dict[str, Any]:
    counts = {
        "projections": flops.projections,
        "scores": flops.scores,
        "scores_causal": flops.scores_causal,
        "feed_forward": flops.feed_forward,
        "vocabulary": flops.vocabulary,
        "total": flops.total(causal=False),
        "total_causal": flops.total(causal=True),
    }
    scaled = {name: count * times for name, count in counts.items()}
    return {"sequence_length": flops.length, **scaled, "uncounted": list(flops.uncounted)}


def _memory(memory: "Memory") -> dict[str, Any]:
    return dataclasses.asdict(memory) | {"total": memory.total}


def _combination(combination: Combination) -> dict[str, Any]:
    weights, gradients, optimizer = combination.textbook
    return {
        "precision": combination.precision,
        "optimizer": combination.optimizer,
        "textbook_bytes_per_parameter": {
            "weights": weights,
            "gradients": gradients,
            "optimizer": optimizer,
            "total": weights + gradients + optimizer,
        },
        "memory_bytes": _memory(combination.memory),
    }


def _compiled(compiled: Compiled | None) -> dict[str, Any] | None:
    if compiled is None:
        return None
    return dataclasses.asdict(compiled) | {"described": compiled.described}


def _decodings(all_of_them: tuple[Decoding, ...]) -> dict[str, Any] | None:
    if not all_of_them:
        return None
    own, *variants = all_of_them
    return _decoding(own) | {"variants": [_decoding(each) for each in variants]}


def _decoding(decoding: Decoding) -> dict[str, Any]:
    return {
        **dataclasses.asdict(decoding),
        "kv_heads": list(decoding.kv_heads),
        "bytes_read_per_token": decoding.bytes_read_per_token(),
        "flops_per_byte": decoding.intensity(),
        f"flops_per_byte_batch_{LARGE_BATCH}": decoding.intensity(LARGE_BATCH),
    }
