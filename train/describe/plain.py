"""A description as plain numbers, for programs."""

import dataclasses
from typing import TYPE_CHECKING, Any

from train.describe.combinations import MemoryVariant
from train.describe.compiler import CompiledMemory
from train.describe.decoding import LARGE_BATCH, DecodingCost

if TYPE_CHECKING:
    from train.describe import Description
    from train.describe.memory import TrainingMemory
    from transformer.costs import TokenFlops
    from transformer.sizes import ParameterCounts


def description_as_dict(description: "Description") -> dict[str, Any]:
    """Numbers of parameters, operations a token, and bytes."""
    own, *others = description.flops
    return {
        "batch_size": description.batch_size,
        "sequence_length": description.sequence_length,
        "parameters": _parameters_as_dict(description.parameters)
        | {"estimate": description.parameter_estimate},
        "flops_per_token": {
            "forward": _flops_as_dict(own),
            "training": _flops_as_dict(own, times=3),
            "training_estimate": description.training_flops_estimate,
            "forward_by_length": [_flops_as_dict(each) for each in (own, *others)],
        },
        "memory_bytes": _memory_as_dict(description.memory)
        | {"optimizer_kind": description.optimizer},
        "memory_by_precision_and_optimizer": [
            _memory_variant_as_dict(c) for c in description.memory_variants
        ],
        "eight_bit_optimizer_bytes": dataclasses.asdict(description.eight_bit_state),
        "compiler_bytes": _compiled_memory_as_dict(description.compiled_memory),
        "decoding": _decoding_costs_as_dict(description.decoding_costs),
        "attention_bytes_per_token": description.attention_traffic._asdict(),
        "notes": list(description.notes),
    }


def _parameters_as_dict(parameters: "ParameterCounts") -> dict[str, Any]:
    return {
        "total": parameters.total,
        "padding": parameters.padding,
        "heads": parameters.task_heads,
        "active": parameters.active,
        "allocated": parameters.allocated,
        "parts": dict(parameters.by_part),
    }


def _flops_as_dict(flops: "TokenFlops", times: int = 1) -> dict[str, Any]:
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
    return {"sequence_length": flops.sequence_length, **scaled, "uncounted": list(flops.uncounted)}


def _memory_as_dict(memory: "TrainingMemory") -> dict[str, Any]:
    return dataclasses.asdict(memory) | {"total": memory.total}


def _memory_variant_as_dict(combination: MemoryVariant) -> dict[str, Any]:
    weights, gradients, optimizer = combination.textbook_bytes_per_parameter
    return {
        "precision": combination.precision,
        "optimizer": combination.optimizer,
        "textbook_bytes_per_parameter": {
            "weights": weights,
            "gradients": gradients,
            "optimizer": optimizer,
            "total": weights + gradients + optimizer,
        },
        "memory_bytes": _memory_as_dict(combination.memory),
    }


def _compiled_memory_as_dict(compiled: CompiledMemory | None) -> dict[str, Any] | None:
    if compiled is None:
        return None
    return dataclasses.asdict(compiled) | {"described": compiled.estimated_temporaries}


def _decoding_costs_as_dict(all_of_them: tuple[DecodingCost, ...]) -> dict[str, Any] | None:
    if not all_of_them:
        return None
    own, *variants = all_of_them
    return _decoding_cost_as_dict(own) | {
        "variants": [_decoding_cost_as_dict(each) for each in variants]
    }


def _decoding_cost_as_dict(decoding: DecodingCost) -> dict[str, Any]:
    return {
        **dataclasses.asdict(decoding),
        "kv_heads": list(decoding.num_kv_heads),
        "bytes_read_per_token": decoding.bytes_read_per_token(),
        "flops_per_byte": decoding.arithmetic_intensity(),
        f"flops_per_byte_batch_{LARGE_BATCH}": decoding.arithmetic_intensity(LARGE_BATCH),
    }
