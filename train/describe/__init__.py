"""What a model is, costs and takes, before anything is allocated."""

import dataclasses
from typing import TYPE_CHECKING, Any

from train.describe.combinations import Combination, EightBits, combinations, eight_bits
from train.describe.compiler import Compiled, ask_compiler
from train.describe.decoding import Decoding, decodings
from train.describe.memory import Memory, training_memory
from train.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from train.experiment import Experiment
    from train.optimizers import OptimizerConfig
    from transformer.config import TransformerConfig
    from transformer.costs import Flops, Traffic
    from transformer.hardware import Hardware
    from transformer.model import Model
    from transformer.sizes import Parameters

__all__ = ["Decoding", "Description", "Memory", "describe", "describe_model"]

LENGTHS = (128, 512, 2048, 8192, 32768)
"""At which operations are shown, beside the experiment's own length."""


@dataclasses.dataclass(frozen=True)
class Description:
    """Sizes and costs of one model and of how it is trained."""

    config: "TransformerConfig"
    batch_size: int
    sequence_length: int
    parameters: "Parameters"
    estimate: int
    """12 L D^2 + V D."""
    flops: tuple["Flops", ...]
    """Of a token's forward pass, at several lengths; the experiment's own first."""
    training_estimate: int
    """6 N + 12 L D T operations a token."""
    optimizer: str
    """The kind of it."""
    memory: Memory
    combinations: tuple[Combination, ...]
    """Of precision and optimizer, beside the textbook's bytes a parameter."""
    eight_bits: EightBits
    """What 8-bit AdamW's state is made of."""
    decoding: tuple[Decoding, ...]
    """With other numbers of key-value heads too; this model's own first. None of a model that does
    not write token by token, or in steps that have no formula."""
    traffic: "Traffic"
    notes: tuple[str, ...] = ()
    """What had to be assumed, and what of the model is not trained."""
    compiled: Compiled | None = None
    """What the compiler says of the same step's memory, if it was asked."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for `--json`."""
        from train.describe.plain import as_dict

        return as_dict(self)

    def print(self, console: "Console | None" = None) -> None:
        """Tables for people, on standard output unless a console is given."""
        from train.describe.tables import show

        show(self, console)


def describe(
    experiment: "Experiment", hardware: "Hardware | None" = None, *, compiled: bool = False
) -> Description:
    """Describes an experiment. Nothing is allocated, and data are read only for what they decide.

    `hardware` is what it is to run on (a CPU if None): it decides whether attention keeps its
    scores. If `compiled`, the step is compiled too, for the devices that are here, which
    `hardware` must tell of. Raises UserError if the vocabulary is a text's characters, or the
    number of classes is that of the data, and there are no data; UsageError for a model that
    cannot be made.
    """
    from train.describe.shape import window, with_sizes
    from train.tasks.registry import make_task
    from transformer.hardware import Hardware
    from transformer.shared import unconstrained

    experiment, notes = with_sizes(experiment)
    batch_size, length = window(experiment)
    hardware = hardware or Hardware()
    task = make_task(experiment)
    try:
        described = describe_model(
            task.model(hardware, unconstrained),
            batch_size=batch_size,
            sequence_length=length,
            optimizer=experiment.optimizer,
            accumulate=experiment.accumulate,
            segments=getattr(experiment.data, "segments", True),
            average=experiment.ema.decay > 0,
            told=task.told,
            notes=(*notes, *task.untrained),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not compiled:
        return described
    found = ask_compiler(experiment, described.memory, hardware)
    return dataclasses.replace(described, compiled=found)


def describe_model(
    model: "Model",
    *,
    batch_size: int,
    sequence_length: int,
    optimizer: "OptimizerConfig | None" = None,
    accumulate: int = 1,
    segments: bool = False,
    average: bool = False,
    told: float | None = None,
    notes: tuple[str, ...] = (),
) -> Description:
    """Describes a model trained on `batch_size` windows of `sequence_length` tokens at a time.

    Windows of an encoder-decoder have as many tokens in the source as in the target. `told` is the
    share of the tokens of which a word is told; None: the model's own.
    """
    from train.optimizers import AdamW
    from transformer import costs, sizes

    config, optimizer = model.config, optimizer or AdamW()
    parameters = sizes.count_parameters(model)
    shape: dict[str, Any] = dict(
        batch_size=batch_size,
        sequence_length=sequence_length,
        accumulate=accumulate,
        segments=segments,
        average=average,
        told=told,
    )
    return Description(
        config=config,
        batch_size=batch_size,
        sequence_length=sequence_length,
        parameters=parameters,
        estimate=sizes.estimate_parameters(config),
        flops=tuple(costs.count_flops(model, t, told) for t in _lengths(sequence_length, config)),
        training_estimate=costs.estimate_flops(config, parameters.active, sequence_length),
        optimizer=optimizer.kind,
        memory=training_memory(model, optimizer, **shape),
        combinations=combinations(model, **shape),
        eight_bits=eight_bits(model),
        decoding=decodings(model, sequence_length),
        traffic=costs.attention_traffic(model, sequence_length),
        notes=notes,
    )


def _lengths(own: int, config: "TransformerConfig") -> tuple[int, ...]:
    """The experiment's length, then those of the table that the model can take."""
    limit = config.max_length or LENGTHS[-1]
    return (own, *(length for length in LENGTHS if length <= limit and length != own))
