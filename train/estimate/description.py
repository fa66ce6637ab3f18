"""A description as plain numbers, for programs.

What a model is, costs and takes, before anything is allocated.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from train.estimate.compiled_memory import CompiledMemory
from train.estimate.decoding import LARGE_BATCH, DecodingCost
from train.estimate.memory import MemoryVariant

if TYPE_CHECKING:
    pass  # DROPPED
    from train.estimate.memory import TrainingMemory
    from transformer.costs import TokenFlops
    from transformer.parameter_counts import ParameterCounts
from train.errors import UsageError
from train.estimate.compiled_memory import compile_for_memory
from train.estimate.decoding import count_decoding_variants
from train.estimate.memory import (
    EightBitStateBytes,
    TrainingMemory,
    count_eight_bit_state,
    estimate_memory_variants,
    estimate_training_memory,
)

if TYPE_CHECKING:
    from rich.console import Console

    from train.experiment import Experiment
    from train.optim.registry import OptimizerConfig
    from transformer.config import TransformerConfig
    from transformer.costs import AttentionTraffic, TokenFlops
    from transformer.hardware import Hardware
    from transformer.models.base import Model
    from transformer.parameter_counts import ParameterCounts


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
    return dataclasses.asdict(compiled) | {"estimated_temporaries": compiled.estimated_temporaries}


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
        "num_kv_heads": list(decoding.num_kv_heads),
        "bytes_read_per_token": decoding.bytes_read_per_token(),
        "flops_per_byte": decoding.arithmetic_intensity(),
        f"flops_per_byte_batch_{LARGE_BATCH}": decoding.arithmetic_intensity(LARGE_BATCH),
    }


SEQUENCE_LENGTHS = (128, 512, 2048, 8192, 32768)
"""At which operations are shown, beside the experiment's own length."""


@dataclasses.dataclass(frozen=True)
class Description:
    """Sizes and costs of one model and of how it is trained."""

    config: "TransformerConfig"
    batch_size: int
    sequence_length: int
    parameters: "ParameterCounts"
    parameter_estimate: int
    """12 L D^2 + V D."""
    flops: tuple["TokenFlops", ...]
    """Of a token's forward pass, at several lengths; the experiment's own first."""
    training_flops_estimate: int
    """6 N + 12 L D T operations a token."""
    optimizer: str
    """The kind of it."""
    memory: TrainingMemory
    memory_variants: tuple[MemoryVariant, ...]
    """Of precision and optimizer, beside the textbook's bytes a parameter."""
    eight_bit_state: EightBitStateBytes
    """What 8-bit AdamW's state is made of."""
    decoding_costs: tuple[DecodingCost, ...]
    """With other numbers of key-value heads too; this model's own first. None of a model that does
    not write token by token, or in steps that have no formula."""
    attention_traffic: "AttentionTraffic"
    notes: tuple[str, ...] = ()
    """What had to be assumed, and what of the model is not trained."""
    compiled_memory: CompiledMemory | None = None
    """What the compiler says of the same step's memory, if it was asked."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for `--json`."""
        pass  # DROPPED

        return description_as_dict(self)

    def print(self, console: "Console | None" = None) -> None:
        """Tables for people, on standard output unless a console is given."""
        from train.estimate.tables import print_description

        print_description(self, console)


def describe(
    experiment: "Experiment", hardware: "Hardware | None" = None, *, with_compiler: bool = False
) -> Description:
    """Describes an experiment. Nothing is allocated, and data are read only for what they decide.

    `hardware` is what it is to run on (a CPU if None): it decides whether attention keeps its
    scores. If `with_compiler`, the step is compiled too, for the devices that are here, which
    `hardware` must tell of. Raises UserError if the vocabulary is a text's characters, or the
    number of classes is that of the data, and there are no data; UsageError for a model that
    cannot be made.
    """
    from train.estimate.batch_shapes import max_batch_shape, resolve_sizes
    from train.tasks.registry import make_task
    from transformer.context import unconstrained
    from transformer.hardware import Hardware

    experiment, notes = resolve_sizes(experiment)
    batch_size, length = max_batch_shape(experiment)
    hardware = hardware or Hardware()
    task = make_task(experiment)
    try:
        described = describe_model(
            task.make_model(hardware, unconstrained),
            batch_size=batch_size,
            sequence_length=length,
            optimizer=experiment.optimizer,
            grad_accum_steps=experiment.grad_accum_steps,
            segments=getattr(experiment.data, "segments", True),
            ema=experiment.ema.decay > 0,
            predicted_fraction=task.target_fraction,
            notes=(*notes, *task.untrained_parts),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not with_compiler:
        return described
    found = compile_for_memory(experiment, described.memory, hardware)
    return dataclasses.replace(described, compiled_memory=found)


def describe_model(
    model: "Model",
    *,
    batch_size: int,
    sequence_length: int,
    optimizer: "OptimizerConfig | None" = None,
    grad_accum_steps: int = 1,
    segments: bool = False,
    ema: bool = False,
    predicted_fraction: float | None = None,
    notes: tuple[str, ...] = (),
) -> Description:
    """Describes a model trained on `batch_size` windows of `sequence_length` tokens at a time.

    Windows of an encoder-decoder have as many tokens in the source as in the target. `predicted_fraction` is the
    share of the tokens of which a word is told; None: the model's own.
    """
    from train.optim.adam import AdamW
    from transformer import costs, parameter_counts

    config, optimizer = model.config, optimizer or AdamW()
    parameters = parameter_counts.count_parameters(model)
    shape: dict[str, Any] = dict(
        batch_size=batch_size,
        sequence_length=sequence_length,
        grad_accum_steps=grad_accum_steps,
        segments=segments,
        ema=ema,
        predicted_fraction=predicted_fraction,
    )
    return Description(
        config=config,
        batch_size=batch_size,
        sequence_length=sequence_length,
        parameters=parameters,
        parameter_estimate=parameter_counts.estimate_parameters(config),
        flops=tuple(
            costs.count_token_flops(model, t, predicted_fraction)
            for t in _lengths(sequence_length, config)
        ),
        training_flops_estimate=costs.estimate_training_flops(
            config, parameters.active, sequence_length
        ),
        optimizer=optimizer.kind,
        memory=estimate_training_memory(model, optimizer, **shape),
        memory_variants=estimate_memory_variants(model, **shape),
        eight_bit_state=count_eight_bit_state(model),
        decoding_costs=count_decoding_variants(model, sequence_length),
        attention_traffic=costs.attention_traffic(model, sequence_length),
        notes=notes,
    )


def _lengths(own: int, config: "TransformerConfig") -> tuple[int, ...]:
    """The experiment's length, then those of the table that the model can take."""
    limit = config.max_length or SEQUENCE_LENGTHS[-1]
    return (own, *(length for length in SEQUENCE_LENGTHS if length <= limit and length != own))
