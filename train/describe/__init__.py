"""What a model is, costs and takes, before anything is allocated."""

import dataclasses
from typing import TYPE_CHECKING, Any

from train.describe.decoding import Decoding, decoding, kv_variants
from train.describe.memory import Memory, training_memory
from train.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from train.experiment import Experiment
    from train.optimizers import OptimizerConfig
    from transformer.config import TransformerConfig
    from transformer.costs import Flops, Traffic
    from transformer.hardware import Hardware
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
    memory: Memory
    decoding: tuple[Decoding, ...]
    """With other numbers of key-value heads too; this model's own first."""
    traffic: "Traffic"
    notes: tuple[str, ...] = ()
    """What had to be assumed."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for `--json`."""
        from train.describe.plain import as_dict

        return as_dict(self)

    def print(self, console: "Console | None" = None) -> None:
        """Tables for people, on standard output unless a console is given."""
        from train.describe.tables import show

        show(self, console)


def describe(experiment: "Experiment", hardware: "Hardware | None" = None) -> Description:
    """Describes an experiment. Nothing is allocated, and text is read only to count characters.

    `hardware` is what it is to run on (a CPU if None): it decides whether attention keeps its
    scores. Raises UserError if the vocabulary is a text's characters and there is no text.
    """
    words, notes = _vocabulary(experiment)
    return describe_model(
        dataclasses.replace(experiment.model, vocab_size=words),
        batch_size=experiment.batch_size,
        sequence_length=experiment.data.sequence_length,
        optimizer=experiment.optimizer,
        accumulate=experiment.accumulate,
        segments=experiment.data.segments,
        hardware=hardware,
        notes=notes,
    )


def describe_model(
    config: "TransformerConfig",
    *,
    batch_size: int,
    sequence_length: int,
    optimizer: "OptimizerConfig | None" = None,
    accumulate: int = 1,
    segments: bool = False,
    hardware: "Hardware | None" = None,
    notes: tuple[str, ...] = (),
) -> Description:
    """Describes a model trained on `batch_size` windows of `sequence_length` tokens at a time."""
    from train.optimizers import OptimizerConfig
    from transformer import costs, sizes
    from transformer.hardware import Hardware
    from transformer.language_model import LanguageModel

    hardware = hardware or Hardware()
    model = LanguageModel(config, hardware)
    parameters = sizes.count_parameters(model)
    own = decoding(model, sequence_length)
    variants = (decoding(each, sequence_length) for each in kv_variants(config, hardware))
    return Description(
        config=config,
        batch_size=batch_size,
        sequence_length=sequence_length,
        parameters=parameters,
        estimate=sizes.estimate_parameters(config),
        flops=tuple(costs.count_flops(model, t) for t in _lengths(sequence_length, config)),
        training_estimate=costs.estimate_flops(config, parameters.total, sequence_length),
        memory=training_memory(
            model,
            optimizer or OptimizerConfig(),
            batch_size=batch_size,
            sequence_length=sequence_length,
            accumulate=accumulate,
            segments=segments,
        ),
        decoding=(own, *(each for each in variants if each != own)),
        traffic=costs.attention_traffic(model, sequence_length),
        notes=notes,
    )


def _lengths(own: int, config: "TransformerConfig") -> tuple[int, ...]:
    """The experiment's length, then those of the table that the model can take."""
    limit = config.max_length or LENGTHS[-1]
    return (own, *(length for length in LENGTHS if length <= limit and length != own))


def _vocabulary(experiment: "Experiment") -> tuple[int, tuple[str, ...]]:
    """V, and what was assumed to know it before a tokenizer has learned from its text."""
    tokenizer = experiment.data.tokenizer
    if experiment.model.vocab_size:
        return experiment.model.vocab_size, ()
    if tokenizer.kind in ("byte", "file"):
        from train.data.tokenizer_training import train_tokenizer

        return train_tokenizer(tokenizer, ()).vocab_size, ()
    if tokenizer.kind == "character":
        return _characters(experiment), ()
    most = tokenizer.vocab_size
    return most, (f"the {tokenizer.kind} tokenizer is taken to learn all of its {most:,} tokens",)


def _characters(experiment: "Experiment") -> int:
    """V of a tokenizer that has as many tokens as the text has characters: the text is read."""
    from train.data import prepare

    try:
        return prepare(experiment.data).tokenizer.vocab_size
    except UserError as error:
        raise UserError(f"{error}; or give --model.vocab-size, and no text is needed") from error
