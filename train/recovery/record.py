"""recovery.json: the rollbacks of a run, each written before anything is done about it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
from jax.experimental import multihost_utils

from train.data.files import AnyPath
from train.errors import UserError
from train.recovery.plan import Rollback
from train.regular_files import SETTINGS_BYTES, read_bytes
from train.runfolder import reading, write_atomically
from transformer.checks import MAX_INTEGER

LEAST = {"first": 1, "step": 1, "checkpoint": 0, "cursor": 0, "tries": 1}
"""Smallest value of each integer of a rollback."""


@dataclasses.dataclass(frozen=True)
class Record:
    """What was decided, oldest first."""

    rollbacks: tuple[Rollback, ...] = ()
    cleared: bool = True
    """Whether the checkpoints beyond the one that the last rollback goes to are out of the way."""

    @property
    def last(self) -> Rollback | None:
        return self.rollbacks[-1] if self.rollbacks else None

    def write(self, path: AnyPath) -> None:
        """All processes go on once it is on disk (UserError: it cannot be written)."""
        if jax.process_index() == 0:
            write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        together()

    @classmethod
    def read(cls, path: AnyPath) -> Record:
        """The record of a run; an empty one if it has none. UserError: it is damaged."""
        with reading(path):
            try:
                data = read_bytes(path, SETTINGS_BYTES)
            except FileNotFoundError:
                return cls()
        try:
            plain = json.loads(data.decode())
            if not isinstance(plain, dict) or plain.keys() != {"rollbacks", "cleared"}:
                raise ValueError("it has other fields than rollbacks and cleared")
            if not isinstance(plain["rollbacks"], list) or not isinstance(plain["cleared"], bool):
                raise ValueError("rollbacks is no list, or cleared no boolean")
            return cls(tuple(map(_rollback, plain["rollbacks"])), plain["cleared"])
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path}: tells of no rollbacks ({error}); put the file back as it was"
            ) from error


def _rollback(plain: Any) -> Rollback:
    """One rollback (TypeError or ValueError: it is none that `plan` could have decided)."""
    if not isinstance(plain, dict):
        raise TypeError("a rollback is no object")
    found = Rollback(**plain)
    for name, least in LEAST.items():
        value = getattr(found, name)
        if type(value) is not int or not least <= value <= MAX_INTEGER:
            raise ValueError(f"{name} is no integer from {least} to {MAX_INTEGER}")
    if type(found.rate) not in (int, float) or not 0 < found.rate <= 1:
        raise ValueError("rate is no number in (0, 1]")
    return found


def together() -> None:
    """Waits until all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("recovery")
