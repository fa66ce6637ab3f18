"""recovery.json: the rollbacks of a run, each written before anything is done about it."""

from __future__ import annotations

import dataclasses
import json

import jax
from jax.experimental import multihost_utils

from train.data.files import Location
from train.errors import UserError
from train.recovery.plan import Rollback
from train.runfolder import reading, write_atomically


@dataclasses.dataclass(frozen=True)
class Record:
    """What was decided, oldest first."""

    rollbacks: tuple[Rollback, ...] = ()
    cleared: bool = True
    """Whether the checkpoints beyond the one that the last rollback goes to are out of the way."""

    @property
    def last(self) -> Rollback | None:
        return self.rollbacks[-1] if self.rollbacks else None

    def write(self, path: Location) -> None:
        """All processes go on once it is on disk (UserError: it cannot be written)."""
        if jax.process_index() == 0:
            write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        together()

    @classmethod
    def read(cls, path: Location) -> Record:
        """The record of a run; an empty one if it has none. UserError: it is damaged."""
        with reading(path):
            if not path.exists():
                return cls()
            data = path.read_bytes()
        try:
            plain = json.loads(data.decode())
            rollbacks = tuple(Rollback(**each) for each in plain["rollbacks"])
            return cls(rollbacks, bool(plain["cleared"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(
                f"{path}: tells of no rollbacks ({error}); put the file back as it was"
            ) from error


def together() -> None:
    """Waits until all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("recovery")
