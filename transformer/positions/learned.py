"""A table of positions, added to the embeddings (Gehring et al. 2017)."""

import dataclasses

from transformer.checks import check_at_least


@dataclasses.dataclass(frozen=True)
class LearnedPositions:
    """A learned vector for each position, added to the embedding; longer inputs are refused."""

    max_length: int = 1024
    """Rows of the table."""

    def __post_init__(self) -> None:
        check_at_least("learned_positions.length", self.max_length, 1)
