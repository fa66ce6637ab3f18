"""What the doctor says of one thing."""

import dataclasses
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at. A warning costs speed or comfort; a problem must be solved."""

    name: str
    level: Level
    detail: str
    remedy: str = ""
    """What to do about it; empty if nothing."""
