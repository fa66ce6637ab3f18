"""No positions."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class NoPosition:
    """Positions are not told here (they may be elsewhere: in the embeddings, or in attention)."""
