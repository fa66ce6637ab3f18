"""Settings of LoRA fine-tuning. This module loads no JAX: `--help` reads it."""

import dataclasses

from train.data.data_config import require_types
from train.errors import UsageError

NEW = "new"
"""Entry of `train_fully` for the weights that the source of a warm start lacks."""


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adaptation (LoRA, Hu et al. 2021) of frozen weights: W + alpha / rank A B."""

    rank: int = 0
    """Columns of A and rows of B. 0: train all weights in full."""
    alpha: float = 16.0
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
        require_types(self, "lora")
        if self.rank < 0:
            raise UsageError(f"lora.rank {self.rank}: give 0 or more")
        if not self.alpha > 0:
            raise UsageError(f"lora.alpha {self.alpha}: give a positive number")
        if self.rank and not self.targets:
            raise UsageError("lora.targets: is empty; give matrices such as query,value")
