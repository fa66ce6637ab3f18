"""Sizes and costs of a model and of its training, computed before anything is allocated.

This module loads no JAX at import: the command line imports it for help texts.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from train.engines.lora import LoRAConfig
from train.errors import UsageError
from train.estimate.decoding import LARGE_BATCH, DecodingCost, count_decoding_variants
from train.estimate.training_memory import (
    NO_LORA,
    EightBitStateBytes,
    MemoryVariant,
    TrainingMemory,
    count_eight_bit_state,
    estimate_memory_variants,
    estimate_training_memory,
    trainable_shapes,
)

if TYPE_CHECKING:
    from rich.console import Console

    from train.estimate.compile import CompiledMemory
    from train.experiment import Experiment
    from train.optim.optimizer import Optimizer
    from transformer.flops import AttentionTraffic, TokenFlops
    from transformer.hardware import Hardware
    from transformer.models.config import TransformerConfig
    from transformer.models.model import Model
    from transformer.parameter_counts import ParameterCounts


SEQUENCE_LENGTHS = (128, 512, 2048, 8192, 32768)
"""Sequence lengths of the FLOPs table, in addition to the experiment's own length."""


@dataclasses.dataclass(frozen=True)
class Description:
    """Sizes and costs of one model and of its training."""

    config: "TransformerConfig"
    batch_size: int
    sequence_length: int
    parameters: "ParameterCounts"
    parameter_estimate: int
    """The textbook estimate 12 L D^2 + V D."""
    flops: tuple["TokenFlops", ...]
    """FLOPs of a token's forward pass at several lengths; the experiment's own length first."""
    training_flops: tuple["TokenFlops", ...]
    """FLOPs to train on a token, forward and backward, at the same lengths."""
    training_flops_estimate: int
    """The textbook estimate 6 N + 12 L D T, in FLOPs per training token."""
    optimizer: str
    """The optimizer's `kind`."""
    trainable: int
    """Parameters that are trained: fewer than in memory with LoRA. Weights of a new head
    (`lora.train_fully new`) are not counted, since they depend on the source of the weights."""
    memory: TrainingMemory
    memory_variants: tuple[MemoryVariant, ...]
    """Training memory for each pair of precision and optimizer in the textbook's table."""
    eight_bit_state: EightBitStateBytes
    """State of 8-bit AdamW by component."""
    decoding_costs: tuple[DecodingCost, ...]
    """Cost of one decoding step: this model first, then variants with other numbers of key-value
    heads. Empty for models that do not decode from a cache or whose steps have no cost formula."""
    attention_traffic: "AttentionTraffic"
    notes: tuple[str, ...] = ()
    """Assumptions that were made, and parts of the model that are not trained."""
    compiled_memory: "CompiledMemory | None" = None
    """Memory of the same step as the compiler reports it; None unless it was asked."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for `--json`."""
        return description_as_dict(self)

    def print(self, console: "Console | None" = None) -> None:
        """Print tables to a console, by default standard output."""
        from train.estimate.description_tables import print_description

        print_description(self, console)


def describe(
    experiment: "Experiment", hardware: "Hardware | None" = None, *, with_compiler: bool = False
) -> Description:
    """Describe an experiment without allocating its model.

    Data are read only if the vocabulary size or the number of labels depends on them.

    Args:
      experiment: The experiment; vocabulary size and number of labels may be left to its data.
      hardware: Hardware to run on, a CPU if None. It decides which attention backend is used.
      with_compiler: Compile the step for the local devices too, which `hardware` must describe.

    Raises:
      UserError: A size depends on data that cannot be read.
      UsageError: The model is invalid.
    """
    from train.assembly import make_task
    from train.estimate.batch_shapes import max_batch_shape, resolve_sizes
    from transformer.hardware import Hardware
    from transformer.model_context import unconstrained

    experiment, notes = resolve_sizes(experiment)
    batch_size, length = max_batch_shape(experiment)
    hardware = hardware or Hardware()
    task = make_task(experiment)
    if task.needs_base_weights:
        notes = (
            *notes,
            "a training step also has a forward pass of the reference, not counted here",
        )
    try:
        described = describe_model(
            task.make_model(hardware, unconstrained),
            batch_size=batch_size,
            sequence_length=length,
            optimizer=experiment.optimizer,
            grad_accum_steps=experiment.grad_accum_steps,
            segments=experiment.has_segments,
            ema=experiment.ema.decay > 0,
            lora=experiment.lora,
            predicted_fraction=task.target_fraction,
            notes=(*notes, *task.untrained_parts),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not with_compiler:
        return described
    from train.estimate.compile import compile_for_memory  # loads the engine

    compiled = compile_for_memory(experiment, described.memory, hardware)
    return dataclasses.replace(described, compiled_memory=compiled)


def describe_model(
    model: "Model",
    *,
    batch_size: int,
    sequence_length: int,
    optimizer: "Optimizer | None" = None,
    grad_accum_steps: int = 1,
    segments: bool = False,
    ema: bool = False,
    lora: LoRAConfig = NO_LORA,
    predicted_fraction: float | None = None,
    notes: tuple[str, ...] = (),
) -> Description:
    """Describe a model trained on `batch_size` sequences of `sequence_length` tokens per step.

    An encoder-decoder has `sequence_length` tokens in the source and as many in the target.

    Args:
      model: The model; its config has a vocabulary size.
      batch_size: Sequences of a step, over all microbatches.
      sequence_length: Tokens of a sequence, T.
      optimizer: The optimizer, AdamW if None.
      grad_accum_steps: Microbatches of a step.
      segments: True if sequences hold several documents or padding.
      ema: True if an exponential moving average of the weights is stored.
      lora: Settings of LoRA, which trains fewer parameters than the model has.
      predicted_fraction: Fraction of tokens that have a prediction target; None: the model's own.
      notes: Notes to show with the description.
    """
    import jax

    from train.engines.lora import make_lora_layout
    from train.optim.elementwise import AdamW
    from transformer import flops, parameter_counts

    config, optimizer = model.config, optimizer or AdamW()
    parameters = parameter_counts.count_parameters(model)
    layout = make_lora_layout(lora, parameter_counts.abstract_parameters(model).axes)
    lengths = _flops_lengths(sequence_length, config)
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
        flops=tuple(flops.count_token_flops(model, t, predicted_fraction, layout) for t in lengths),
        training_flops=tuple(
            flops.count_training_flops(model, t, predicted_fraction, layout) for t in lengths
        ),
        training_flops_estimate=flops.estimate_training_flops(
            config, parameters.active, sequence_length
        ),
        optimizer=optimizer.kind,
        trainable=sum(leaf.size for leaf in jax.tree.leaves(trainable_shapes(model, lora)[0])),
        memory=estimate_training_memory(model, optimizer, lora=lora, **shape),
        memory_variants=estimate_memory_variants(model, lora=lora, **shape),
        eight_bit_state=count_eight_bit_state(model, lora),
        decoding_costs=count_decoding_variants(model, sequence_length),
        attention_traffic=flops.attention_traffic(model, sequence_length),
        notes=notes,
    )


def _flops_lengths(own: int, config: "TransformerConfig") -> tuple[int, ...]:
    """Return the experiment's length, then the table's lengths that the model supports."""
    limit = config.max_length or SEQUENCE_LENGTHS[-1]
    return (own, *(length for length in SEQUENCE_LENGTHS if length <= limit and length != own))


def description_as_dict(description: "Description") -> dict[str, Any]:
    """Return parameters, FLOPs per token and bytes as plain numbers."""
    own, *others = description.flops
    return {
        "batch_size": description.batch_size,
        "sequence_length": description.sequence_length,
        "parameters": _parameters_as_dict(description.parameters)
        | {"estimate": description.parameter_estimate, "trainable": description.trainable},
        "flops_per_token": {
            "forward": _flops_as_dict(own),
            # Backward takes two products for each one forward: in the input and in the weight,
            # unless the weight is frozen.
            "training": _flops_as_dict(description.training_flops[0]),
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


def _flops_as_dict(flops: "TokenFlops") -> dict[str, Any]:
    return {
        "sequence_length": flops.sequence_length,
        "projections": flops.projections,
        "scores": flops.scores,
        "scores_causal": flops.scores_causal,
        "feed_forward": flops.feed_forward,
        "vocabulary": flops.vocabulary,
        "total": flops.total(causal=False),
        "total_causal": flops.total(causal=True),
        "uncounted": list(flops.uncounted),
    }


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


def _compiled_memory_as_dict(compiled: "CompiledMemory | None") -> dict[str, Any] | None:
    if compiled is None:
        return None
    return dataclasses.asdict(compiled) | {"estimated_temporaries": compiled.estimated_temporaries}


def _decoding_costs_as_dict(costs: tuple[DecodingCost, ...]) -> dict[str, Any] | None:
    if not costs:
        return None
    own, *variants = costs
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
