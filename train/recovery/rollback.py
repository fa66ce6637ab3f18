"""Roll back to a checkpoint from before an anomaly, and continue with other batches.

A rollback is planned, written to `recovery.json`, and only then carried out: later checkpoints are
renamed, and the run restores its state as if it were resumed. A process that is killed at any
moment leaves nothing to undo. The next one reads the record and continues from it, to the same
bits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.checkpoint.manager import CheckpointManager
from train.checkpoint.retention import RetentionPolicy
from train.data.files import AnyPath
from train.engine import Engine
from train.errors import UserError
from train.experiment import Experiment
from train.recovery.config import RecoveryConfig
from train.run_folder.folder import RunFolder, explain_read_errors, write_atomically
from train.run_folder.regular_files import MAX_SETTINGS_BYTES, read_bytes
from train.state import TrainState
from train.telemetry.reporter import Reporter
from transformer.validation import MAX_INTEGER

ROLLBACK_COUNT_KEY = "rollbacks"
"""Key in a checkpoint's metadata: number of rollbacks before it was saved."""

MIN_VALUES = {"first": 1, "step": 1, "checkpoint": 0, "cursor": 0, "tries": 1}
"""Smallest valid value of each integer field of a rollback."""

_KEEP_ALL = 1_000_000


@dataclasses.dataclass(frozen=True)
class Anomaly:
    """Consecutive anomalous steps that need a rollback."""

    first_step: int
    last_step: int
    next_batch: int
    """Cursor of the batch after the last step's."""
    reason: str
    """Description of the last step's anomaly."""


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
    tries: int
    """Rollbacks for this anomaly, this one included."""


def plan_rollback(
    anomaly: Anomaly,
    previous: Rollback | None,
    checkpoints: Sequence[int],
    config: RecoveryConfig,
) -> Rollback | None:
    """Plan a rollback; None if `max_rollbacks` were made for this anomaly.

    It is the same anomaly as before if it starts within `rollback_steps` after the last one.

    Args:
      anomaly: Anomaly to recover from.
      previous: Last rollback of the run.
      checkpoints: Steps that can be restored, besides the initial state.
      config: Settings of the run.
    """
    again = previous is not None and anomaly.first_step <= previous.step + config.rollback_steps
    tries = previous.tries + 1 if previous and again else 1
    if tries > config.max_rollbacks:
        return None
    return Rollback(
        first=anomaly.first_step,
        step=anomaly.last_step,
        # The cause often precedes the first anomaly that is noticed.
        checkpoint=choose_checkpoint(anomaly.first_step, checkpoints, config.rollback_steps),
        # The data after the anomaly is skipped too. PaLM found that spikes come from a bad
        # combination of batch and state, so the same batches may well cause the next one.
        cursor=anomaly.next_batch + config.skip_batches,
        rate=(previous.rate if previous else 1.0) * (config.lr_factor if tries > 1 else 1.0),
        tries=tries,
    )


def choose_checkpoint(first_step: int, checkpoints: Sequence[int], rollback_steps: int) -> int:
    """Return the newest checkpoint at least `rollback_steps` before the first anomalous step.

    If none is that old, return the oldest one before the anomaly, or 0.
    """
    before = [step for step in sorted(checkpoints) if step < first_step]
    far = [step for step in before if step <= first_step - rollback_steps]
    return far[-1] if far else before[0] if before else 0


def rollback_retention(experiment: Experiment) -> RetentionPolicy:
    """Return the policy that keeps the due checkpoints which a rollback may need.

    A rollback chooses only among these, never among those of a preempted run. It restores the
    same checkpoint whether or not the run was interrupted in between.
    """
    settings, config = experiment.checkpoint, experiment.recovery
    if not (config.window and config.max_rollbacks):
        return RetentionPolicy(save_every=settings.every)
    # A slow rise is noticed when half of the window has risen.
    steps_to_notice = max(config.patience, config.window // 2 if config.loss_rise_tolerance else 0)
    return RetentionPolicy(
        save_every=settings.every,
        keep_last_due=max(2, settings.keep_last),  # the newest may be from within the anomaly
        keep_min_age=config.rollback_steps + steps_to_notice,
    )


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
            write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        wait_for_all_processes()

    @classmethod
    def read(cls, path: AnyPath) -> RollbackRecord:
        """Read the record of a run (UserError: it is damaged). A missing file is an empty one."""
        with explain_read_errors(path):
            try:
                data = read_bytes(path, MAX_SETTINGS_BYTES)
            except FileNotFoundError:
                return cls()
        try:
            plain = json.loads(data.decode())
            if not isinstance(plain, dict) or plain.keys() != {"rollbacks", "cleared"}:
                raise ValueError("it has other fields than rollbacks and cleared")
            if not isinstance(plain["rollbacks"], list) or not isinstance(plain["cleared"], bool):
                raise ValueError("rollbacks is no list, or cleared no boolean")
            return cls(tuple(map(_parse_rollback, plain["rollbacks"])), plain["cleared"])
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path}: is no record of rollbacks ({error}); put the file back as it was"
            ) from error


def _parse_rollback(plain: Any) -> Rollback:
    """Return one rollback (TypeError or ValueError: a field is missing or out of range)."""
    if not isinstance(plain, dict):
        raise TypeError("a rollback is no object")
    # The record may have been edited, and its numbers become array values: check every one.
    rollback = Rollback(**plain)
    for name, least in MIN_VALUES.items():
        value = getattr(rollback, name)
        if type(value) is not int or not least <= value <= MAX_INTEGER:
            raise ValueError(f"{name} is no integer from {least} to {MAX_INTEGER}")
    if type(rollback.rate) not in (int, float) or not 0 < rollback.rate <= 1:
        raise ValueError("rate is no number in (0, 1]")
    return rollback


def wait_for_all_processes() -> None:
    """Wait until every process of the run has called this."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("recovery")


class RollbackManager:
    """Plan, record and apply the rollbacks of one run."""

    def __init__(self, experiment: Experiment, folder: RunFolder, *, resuming: bool):
        """Read the record of a run that is resumed; a new run starts with an empty one."""
        self._experiment, self._config = experiment, experiment.recovery
        self._path, self._states_folder = folder.rollback_record, folder.anomaly_states
        self._record = RollbackRecord.read(folder.rollback_record) if resuming else RollbackRecord()
        self._skipped_from: int | None = None

    @property
    def metadata(self) -> dict[str, int]:
        """Entries for the metadata of a checkpoint."""
        return {ROLLBACK_COUNT_KEY: len(self._record.rollbacks)}

    def decide(
        self,
        anomaly: Anomaly,
        state: TrainState,
        engine: Engine,
        checkpoints: CheckpointManager,
        metadata: dict[str, Any],
    ) -> Rollback:
        """Save the anomalous state for inspection, and record the rollback to make.

        Args:
          anomaly: Anomaly to recover from.
          state: Current state. It is deleted: the devices may not hold a second one.
          engine: Creates the initial state if no checkpoint is old enough.
          checkpoints: Checkpoints of the run.
          metadata: Metadata to save with an initial state.

        Raises:
          UserError: `max_rollbacks` were made for this anomaly.
        """
        # A save in progress is of a step before the anomaly, as only normal states are saved.
        checkpoints.wait()
        due = [step for step in checkpoints.steps() if step == 0 or checkpoints.is_due(step)]
        candidates = rollback_retention(self._experiment).steps_to_keep(due)
        rollback = plan_rollback(anomaly, self._record.last, sorted(candidates), self._config)
        saved = self._save_anomalous_state(state)
        # Free the memory now: the restored state needs as much again.
        jax.tree.map(lambda leaf: leaf.delete(), state)
        if rollback is None:
            count = self._config.max_rollbacks
            tried = f"{count} rollbacks did not help" if count else "recovery.max_rollbacks is 0"
            raise UserError(
                f"step {anomaly.last_step}: {anomaly.reason}, and {tried}; "
                f"{saved}; look at its batches, or give a lower schedule.learning_rate or other "
                "recovery settings"
            )
        # The retention policy must not delete it while the run recovers.
        checkpoints.pin(rollback.checkpoint)
        if rollback.checkpoint not in checkpoints.steps():
            # Only step 0 can be missing. It is saved, so that a killed process finds it again.
            checkpoints.save(0, engine.init(), {**metadata, ROLLBACK_COUNT_KEY: 0})
            checkpoints.wait()
        self._write(RollbackRecord((*self._record.rollbacks, rollback), cleared=False))
        return rollback

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

    def apply_rollback(self, state: TrainState, metadata: dict[str, Any]) -> TrainState:
        """Return a restored state with the cursor and learning rate of the last rollback.

        Args:
          state: State of a checkpoint.
          metadata: Metadata of the checkpoint. If it was saved after the last rollback, the state
            has both already.
        """
        last = self._record.last
        if last is None or metadata.get(ROLLBACK_COUNT_KEY, 0) == len(self._record.rollbacks):
            return state
        self._skipped_from = int(state.cursor)
        # Keep the shardings of the restored arrays: the compiled step expects them.
        cursor = jax.device_put(np.int32(last.cursor), state.cursor.sharding)
        detector = state.anomaly_detector
        if detector is None:
            return state.replace(cursor=cursor)
        lr_factor = jax.device_put(np.float32(last.rate), detector.lr_factor.sharding)
        detector = detector.replace(lr_factor=lr_factor)
        return state.replace(cursor=cursor, anomaly_detector=detector)

    def log_rollback(self, step: int, reporter: Reporter) -> None:
        """Log the rollback that `apply_rollback` has applied to the state of this step, if any."""
        last = self._record.last
        if last is None or self._skipped_from is None:
            return
        fields = {**dataclasses.asdict(last), "checkpoint": step}
        skipped = [self._skipped_from, last.cursor - 1]
        reporter.log_event("rolled back", **fields, left_out=skipped)
        self._skipped_from = None
        reporter.print_message(
            f"step {last.step}: back to step {step}, and on with batch {last.cursor}"
            f"{f', the learning rate times {last.rate:g}' if last.rate != 1 else ''} "
            f"(try {last.tries} of {self._config.max_rollbacks})"
        )

    def log_if_recovered(self, step: int, reporter: Reporter) -> None:
        """Log at the step from which a new anomaly counts as another one."""
        last = self._record.last
        if last and step == min(last.step + self._config.rollback_steps, self._experiment.steps):
            reporter.log_event("recovered", step=step, trouble=last.step, tries=last.tries)

    def _write(self, record: RollbackRecord) -> None:
        record.write(self._path)
        self._record = record

    def _save_anomalous_state(self, state: TrainState) -> str:
        """Save the state for inspection. Return where it is, or why it could not be saved."""
        step, folder = int(state.step), self._states_folder
        try:
            with CheckpointManager(folder, keep_last=_KEEP_ALL, asynchronous=False) as saved:
                if step in saved.steps():
                    saved.set_aside(step, "earlier")
                saved.save(step, state, self.metadata)
        except UserError as error:
            return f"its state is not kept ({error})"  # of a full disk: no reason to stop the run
        return f"its state is in {folder / str(step)}"
