"""What a model is, costs and takes, before anything is allocated."""

import dataclasses
from typing import TYPE_CHECKING, Any

from train.describe.combinations import (
    EightBitStateBytes,
    MemoryVariant,
    count_eight_bit_state,
    estimate_memory_variants,
)
from train.describe.compiler import CompiledMemory, compile_for_memory
from train.describe.decoding import DecodingCost, count_decoding_variants
from train.describe.memory import TrainingMemory, estimate_training_memory
from train.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from train.experiment import Experiment
    from train.optimizers import OptimizerConfig
    from transformer.config import TransformerConfig
    from transformer.costs import AttentionTraffic, TokenFlops
    from transformer.hardware import Hardware
    from transformer.model import Model
    from transformer.sizes import ParameterCounts

__all__ = ["DecodingCost", "Description", "TrainingMemory", "describe", "describe_model"]

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
        from train.describe.plain import description_as_dict

        return description_as_dict(self)

    def print(self, console: "Console | None" = None) -> None:
        """Tables for people, on standard output unless a console is given."""
        from train.describe.tables import print_description

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
    from train.describe.shape import max_batch_shape, resolve_sizes
    from train.tasks.registry import make_task
    from transformer.hardware import Hardware
    from transformer.shared import unconstrained

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
    from train.optimizers import AdamW
    from transformer import costs, sizes

    config, optimizer = model.config, optimizer or AdamW()
    parameters = sizes.count_parameters(model)
    shape: dict[str, Any] = dict(
        batch_size=batch_size,
        sequence_length=sequence_length,
        accumulate=grad_accum_steps,
        segments=segments,
        average=ema,
        told=predicted_fraction,
    )
    return Description(
        config=config,
        batch_size=batch_size,
        sequence_length=sequence_length,
        parameters=parameters,
        parameter_estimate=sizes.estimate_parameters(config),
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
