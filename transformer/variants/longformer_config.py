"""The settings of Longformer (Beltagy et al. 2020)."""

import dataclasses
from typing import ClassVar

from transformer.checks import check_least, check_share
from transformer.heads import HeadsConfig
from transformer.positions import NoPosition, Rotary


@dataclasses.dataclass(frozen=True)
class LongformerConfig(HeadsConfig):
    """Every token sees its window and the global tokens, which see everything (section 3.1).

    What global tokens see they see by projections of their own: `query_global`, `key_global` and
    `value_global`. Other tokens see them by the ordinary ones.
    """

    kind: ClassVar[str] = "longformer"

    window: int = 256
    """Keys on each side, w / 2 in the paper's terms, beside the query's own. Under a causal mask
    those behind alone."""
    dilations: tuple[int, ...] = (1,)
    """Steps between the keys of the window, of each head, or one for all."""
    global_tokens: int = 1
    """So many tokens at the start of each document are global, such as [CLS], where the mask lists
    no `globals`."""
    position: NoPosition | Rotary = NoPosition()
    """What queries and keys know of each other's positions."""
    dropout: float = 0.0
    """Of the attention weights."""

    @property
    def reach(self) -> int:
        """Positions from a query to behind the last key of its window: what a cache has to keep."""
        return self.window * max(self.dilations) + 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("longformer.window", self.window, 0)
        check_least("longformer.global_tokens", self.global_tokens, 0)
        check_share("longformer.dropout", self.dropout)
        if len(self.dilations) not in (1, self.heads) or min(self.dilations) < 1:
            raise ValueError(
                f"longformer.dilations {self.dilations}: give one number from 1 on, or one for "
                f"each of {self.heads} heads"
            )
