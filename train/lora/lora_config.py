"""Settings of LoRA fine-tuning."""

import dataclasses

from train.errors import UsageError
from train.settings import Settings
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
