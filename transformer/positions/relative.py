"""Relative positions with learned tables for keys and values (Shaw et al. 2018)."""

import dataclasses

from transformer.checks import check_at_least


@dataclasses.dataclass(frozen=True)
class RelativePositions:
    """Vectors of the distance j - i, added to the key and to the value (Shaw et al. 2018).

    Each layer has its two tables, which its heads share.
    """

    max_distance: int = 16
    """k: keys further away than this are as those at this distance."""

    def __post_init__(self) -> None:
        check_at_least("relative_positions.clip", self.max_distance, 0)

    @property
    def num_distances(self) -> int:
        """R, rows of each table: -k to k."""
        return 2 * self.max_distance + 1
