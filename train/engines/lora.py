"""LoRA fine-tuning: its settings, and which weights are frozen, adapted or trained in full."""

import dataclasses
from typing import Any

from train.errors import UsageError
from train.settings import Settings
from transformer.lora import LoRALayout
from transformer.quantization import Quantization
from transformer.validation import NonNegativeInt, PositiveFloat

NEW = "new"
"""Entry of `train_fully` for the weights that the source of a warm start lacks."""


@dataclasses.dataclass(frozen=True)
class LoRAConfig(Settings, part="lora"):
    """Low-rank adaptation (LoRA, Hu et al. 2021) of frozen weights: W + alpha / rank A B."""

    rank: NonNegativeInt = 0
    """Columns of A and rows of B. 0: train all weights in full."""
    alpha: PositiveFloat = 16.0
    """The low-rank update is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("query", "value")
    """Matrices that get an update: query, key, value, output, gate, up, down, or the groups
    attention, feed_forward, all. Separated by spaces or commas."""
    train_fully: tuple[str, ...] = (NEW,)
    """Other weights to train in full, by tree path with * and ? as in file names: head,
    */mixer_norm. new: those that the source of the weights lacks, such as a classifier's head."""
    quantize: Quantization = "none"
    """Frozen matrices of the layers in few bits: int8, or int4 by groups of 64 inputs. none: as
    floats. Matrices of a packed import (GPTQ, AWQ, MXFP4) stay packed with either."""

    def __post_init__(self) -> None:
        for name in ("targets", "train_fully"):
            value = getattr(self, name)
            names = (value,) if isinstance(value, str) else value
            if isinstance(names, list | tuple) and all(isinstance(each, str) for each in names):
                words = (word for each in names for word in each.split(","))
                object.__setattr__(self, name, tuple(word for word in words if word))
        super().__post_init__()
        if self.rank and not self.targets:
            raise UsageError("lora.targets: is empty; give matrices such as query,value")


def make_lora_layout(lora: LoRAConfig, logical_axes: Any) -> LoRALayout | None:
    """Return the layout of a run; None if it trains all weights in full.

    Raises:
      UsageError: A target or a weight to train in full does not exist.
    """
    if not lora.rank:
        return None
    try:
        return LoRALayout.create(
            logical_axes,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=lora.targets,
            # `fit` replaces `new` by paths. Where no source is known (`describe`, `plan`) nothing
            # is new.
            trained=[each for each in lora.train_fully if each != NEW],
        )
    except ValueError as error:
        message = str(error).replace("trained ", "train_fully ", 1)
        raise UsageError(f"lora.{message}") from error
