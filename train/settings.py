"""Base of the classes of settings of the trainer."""

from typing import Annotated

import transformer.validation
from train.errors import as_usage_errors
from transformer.validation import Bounds

HostSeed = Annotated[int, Bounds(0, 2**63 - 1)]
"""Seed of random numbers that the host alone draws. JAX's are `transformer.validation.Seed`."""


class Settings(transformer.validation.Settings):
    """Base of frozen dataclasses of settings, whose errors are a user's."""

    def __post_init__(self) -> None:
        with as_usage_errors():
            super().__post_init__()
