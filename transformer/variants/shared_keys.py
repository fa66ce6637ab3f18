"""Mixers that group tokens by what they look for: their queries are keys too."""

import dataclasses

from transformer.heads import HeadsConfig
from transformer.positions import NoPosition, Rotary


@dataclasses.dataclass(frozen=True)
class SharedKeysConfig(HeadsConfig):
    """What their configurations have in common: a head of keys for each of queries."""

    position: NoPosition | Rotary = NoPosition()
    """What queries and keys know of each other's positions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_heads != self.heads:
            raise ValueError(
                f"{self.kind}.kv_heads {self.kv_heads}: queries are keys too, so there are as many "
                "heads of both; leave it at 0"
            )
        if self.qk_norm is not None:
            raise ValueError(
                f"{self.kind}.qk_norm {self.qk_norm.kind}: it has a norm of its own; leave it at "
                "None"
            )
