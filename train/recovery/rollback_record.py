"""Rollbacks of a run as `recovery.json` records them, and what a resume does about the last one.

A rollback is recorded before it is carried out. It then takes the path of every resume: later
checkpoints are set aside, the checkpoint is restored, and the state gets the cursor and the
learning rate of the rollback. A process may be killed between any two of these steps. What is
done already can be told from the record, from the names of the folders and from the checkpoint's
metadata, so the next process continues there, to the same bits.
"""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.checkpoint.manager import CheckpointManager
from train.errors import as_damaged, as_user_error
from train.files import AnyPath
from train.run_folder.writing import write_atomically
from train.state import TrainState
from transformer.validation import MAX_INTEGER

ROLLBACK_COUNT_KEY = "rollbacks"
"""Key in a checkpoint's metadata: number of rollbacks before it was saved."""

MIN_VALUES = {"first": 1, "step": 1, "checkpoint": 0, "cursor": 0, "attempts": 1}
"""Smallest valid value of each integer field of a rollback."""


@dataclasses.dataclass(frozen=True)
class Rollback:
    """One rollback. The field names are those of `recovery.json` and of the event log."""

    first: int
    """First anomalous step."""
    step: int
    """Step at which the rollback was decided."""
    checkpoint: int
    """Step of the checkpoint to restore; 0: the initial state."""
    cursor: int
    """Batch to continue with."""
    rate: float
    """Factor on the learning rate from then on."""
    attempts: int
    """Rollbacks for this anomaly, this one included."""


@dataclasses.dataclass(frozen=True)
class RollbackRecord:
    """Content of `recovery.json`."""

    rollbacks: tuple[Rollback, ...] = ()
    """All rollbacks of the run, oldest first."""
    cleared: bool = True
    """The checkpoints after the one that the last rollback restores are set aside."""

    @property
    def last(self) -> Rollback | None:
        """Newest rollback; None if there is none."""
        return self.rollbacks[-1] if self.rollbacks else None

    def write(self, path: AnyPath) -> None:
        """Write the record; every process continues once it is on disk.

        Raises:
          UserError: The file cannot be written.
        """
        # No process may act on a rollback that a kill could still erase.
        if jax.process_index() == 0:
            # One writer: all processes see the same folder, which may be remote.
            write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        wait_for_all_processes()

    @classmethod
    def read(cls, path: AnyPath) -> "RollbackRecord":
        """Read the record of a run (UserError: it is damaged). A missing file is an empty one."""
        with as_user_error(str(path)):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return cls()
        with as_damaged(str(path), "a valid record of rollbacks", "restore the original file"):
            plain = json.loads(data.decode())
            # Exactly these fields: a record of another version, or half of one, is refused and not
            # guessed.
            if not isinstance(plain, dict) or plain.keys() != {"rollbacks", "cleared"}:
                raise ValueError("it has other fields than rollbacks and cleared")
            if not isinstance(plain["rollbacks"], list) or not isinstance(plain["cleared"], bool):
                raise ValueError("rollbacks is not a list, or cleared not a boolean")
            return cls(tuple(map(_parse_rollback, plain["rollbacks"])), plain["cleared"])


def _parse_rollback(plain: Any) -> Rollback:
    """Return one rollback (TypeError or ValueError: a field is missing or out of range)."""
    if not isinstance(plain, dict):
        raise TypeError("a rollback is not an object")
    # The record may have been edited, and its numbers become array values: check every one.
    rollback = Rollback(**plain)
    for name, least in MIN_VALUES.items():
        value = getattr(rollback, name)
        if type(value) is not int or not least <= value <= MAX_INTEGER:
            raise ValueError(f"{name} is not an integer from {least} to {MAX_INTEGER}")
    # `type`, not `isinstance`: JSON's true is an integer for Python.
    if type(rollback.rate) not in (int, float) or not 0 < rollback.rate <= 1:
        raise ValueError("rate is not a number in (0, 1]")
    return rollback


def wait_for_all_processes() -> None:
    """Wait until every process of the run has called this."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("recovery")


class RollbackHistory:
    """Rollbacks of one run: its record, in memory and in its folder."""

    def __init__(self, path: AnyPath, *, resuming: bool):
        """Read the record of a run that is resumed; a new run starts with an empty one."""
        self._path = path
        self._record = RollbackRecord.read(path) if resuming else RollbackRecord()
        self.skipped_from: int | None = None
        """First batch that the rollback applied last skips; None: none was applied since the
        rollbacks were last logged."""

    @property
    def last(self) -> Rollback | None:
        """Newest rollback; None if there is none."""
        return self._record.last

    @property
    def metadata(self) -> dict[str, int]:
        """Entries for the metadata of a checkpoint."""
        return {ROLLBACK_COUNT_KEY: len(self._record.rollbacks)}

    def append(self, rollback: Rollback) -> None:
        """Record a rollback that is to be carried out by the next restore."""
        self._write(RollbackRecord((*self._record.rollbacks, rollback), cleared=False))

    def set_aside_later_checkpoints(self, checkpoints: CheckpointManager) -> None:
        """Rename the checkpoints after the one to restore, unless that was done before."""
        last = self._record.last
        if last is None:
            return
        # An earlier rollback's checkpoint may be needed again, for the same anomaly.
        for rollback in self._record.rollbacks:
            checkpoints.pin(rollback.checkpoint)
        later = [step for step in checkpoints.steps() if step > last.checkpoint]
        wait_for_all_processes()  # every process has listed the steps before any is renamed
        if self._record.cleared:
            return
        # A process killed within this loop repeats it. What is renamed is not listed again.
        for step in later:
            checkpoints.set_aside(step, f"rolled-back-{len(self._record.rollbacks)}")
        self._write(dataclasses.replace(self._record, cleared=True))

    def apply(self, state: TrainState, metadata: dict[str, Any]) -> TrainState:
        """Return a restored state with the cursor and learning rate of the last rollback.

        Args:
          state: State of a checkpoint.
          metadata: Metadata of the checkpoint. If it was saved after the last rollback, the state
            has both already.
        """
        last = self._record.last
        if last is None or metadata.get(ROLLBACK_COUNT_KEY, 0) == len(self._record.rollbacks):
            return state
        self.skipped_from = int(state.cursor)
        # Keep the shardings of the restored arrays: the compiled step expects them.
        cursor = jax.device_put(np.int32(last.cursor), state.cursor.sharding)
        # Runs without detection have no factor; the batches are skipped all the same.
        detector = state.anomaly_detector
        if detector is None:
            return state.replace(cursor=cursor)
        lr_factor = jax.device_put(np.float32(last.rate), detector.lr_factor.sharding)
        detector = detector.replace(lr_factor=lr_factor)
        return state.replace(cursor=cursor, anomaly_detector=detector)

    def _write(self, record: RollbackRecord) -> None:
        # On disk first: in memory it may only be what a killed process would find again.
        record.write(self._path)
        self._record = record
