"""What to do about trouble: a pure function of it, of what was done before, and of what is kept.

recovery.json: the rollbacks of a run, each written before anything is done about it.

Going back to a checkpoint from before the trouble, and on with other data.

A rollback is decided, written down, and only then done: what lies beyond the checkpoint is moved
out of the way, and the run is started as if it were resumed. So a process that is killed at any
moment of it has nothing to undo: the next one goes on from what is written.
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


@dataclasses.dataclass(frozen=True)
class Anomaly:
    """Steps in a row out of line, as many as recovery has patience for."""

    first_step: int
    last_step: int
    """The last of them."""
    next_batch: int
    """The batch after the one of that step."""
    reason: str
    """What was wrong with that step, in words."""


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Going back, for a trouble."""

    first: int
    """The first step out of line."""
    step: int
    """The step at which it was decided."""
    checkpoint: int
    """The step to go back to."""
    cursor: int
    """The batch to go on with."""
    rate: float
    """What the learning rate is multiplied by from then on."""
    tries: int
    """1 for the first of one trouble."""


def plan_rollback(
    anomaly: Anomaly, previous: Rollback | None, checkpoints: Sequence[int], config: RecoveryConfig
) -> Rollback | None:
    """How to go back; None if that was tried often enough.

    Trouble is what it was before if it comes before the run has got `rollback_steps` steps beyond it.

    Args:
      trouble: What there is.
      before: The last rollback of the run.
      checkpoints: The steps that can be gone back to, beside the start of the run.
      config: How often, and how far.
    """
    again = previous is not None and anomaly.first_step <= previous.step + config.rollback_steps
    tries = previous.tries + 1 if previous and again else 1
    if tries > config.max_rollbacks:
        return None
    return Rollback(
        first=anomaly.first_step,
        step=anomaly.last_step,
        checkpoint=choose_checkpoint(anomaly.first_step, checkpoints, config.rollback_steps),
        cursor=anomaly.next_batch + config.skip_batches,
        rate=(previous.rate if previous else 1.0) * (config.lr_factor if tries > 1 else 1.0),
        tries=tries,
    )


def choose_checkpoint(first_step: int, checkpoints: Sequence[int], rollback_steps: int) -> int:
    """The newest checkpoint `rollback_steps` steps before step `first_step`, else the oldest before it, else 0."""
    before = [step for step in sorted(checkpoints) if step < first_step]
    far = [step for step in before if step <= first_step - rollback_steps]
    return far[-1] if far else before[0] if before else 0


MIN_VALUES = {"first": 1, "step": 1, "checkpoint": 0, "cursor": 0, "tries": 1}
"""Smallest value of each integer of a rollback."""


@dataclasses.dataclass(frozen=True)
class RollbackRecord:
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
        wait_for_all_processes()

    @classmethod
    def read(cls, path: AnyPath) -> RollbackRecord:
        """The record of a run; an empty one if it has none. UserError: it is damaged."""
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
    for name, least in MIN_VALUES.items():
        value = getattr(found, name)
        if type(value) is not int or not least <= value <= MAX_INTEGER:
            raise ValueError(f"{name} is no integer from {least} to {MAX_INTEGER}")
    if type(found.rate) not in (int, float) or not 0 < found.rate <= 1:
        raise ValueError("rate is no number in (0, 1]")
    return found


def wait_for_all_processes() -> None:
    """Waits until all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("recovery")


ROLLBACK_COUNT_KEY = "rollbacks"
"""What a checkpoint calls the number of rollbacks that the run had made when it was saved."""


def rollback_retention(experiment: Experiment) -> RetentionPolicy:
    """Which of the checkpoints that were due are kept to be gone back to.

    Of no others it is chosen: so what a run goes back to is the same whether or not it was stopped,
    and saved, in between.
    """
    settings, config = experiment.checkpoint, experiment.recovery
    if not (config.window and config.max_rollbacks):
        return RetentionPolicy(save_every=settings.every)
    noticed_after = max(config.patience, config.window // 2 if config.loss_rise_tolerance else 0)
    return RetentionPolicy(
        save_every=settings.every,
        keep_last_due=max(2, settings.keep_last),  # one of them may be from within the trouble
        keep_min_age=config.rollback_steps + noticed_after,
    )


class RollbackManager:
    """The rollbacks of a run."""

    def __init__(self, experiment: Experiment, folder: RunFolder, *, resuming: bool):
        """Reads what was decided; a run that begins anew has decided nothing."""
        self._experiment, self._config = experiment, experiment.recovery
        self._path, self._evidence = folder.rollback_record, folder.anomaly_states
        self._record = RollbackRecord.read(folder.rollback_record) if resuming else RollbackRecord()
        self._left_out: int | None = None

    @property
    def metadata(self) -> dict[str, int]:
        """What a checkpoint has to say."""
        return {ROLLBACK_COUNT_KEY: len(self._record.rollbacks)}

    def decide(
        self,
        anomaly: Anomaly,
        state: TrainState,
        engine: Engine,
        checkpoints: CheckpointManager,
        metadata: dict[str, Any],
    ) -> Rollback:
        """Keeps the evidence, and writes down what to do.

        Args:
          trouble: What there is.
          state: As it is now. It is deleted: there may be no room for a second one.
          engine: Makes the first state, if there is no checkpoint to go back to.
          checkpoints: Those of the run.
          extra: What is saved with a first state.

        Raises:
          UserError: It was tried often enough.
        """
        checkpoints.wait()
        due = [step for step in checkpoints.steps() if step == 0 or checkpoints.is_due(step)]
        kept = rollback_retention(self._experiment).steps_to_keep(due)
        rollback = plan_rollback(anomaly, self._record.last, sorted(kept), self._config)
        evidence = self._keep(state)
        jax.tree.map(lambda leaf: leaf.delete(), state)
        if rollback is None:
            tries = self._config.max_rollbacks
            raise UserError(
                f"step {anomaly.last_step}: {anomaly.reason}, and "
                f"{f'going back {tries} times did not help' if tries else 'recovery.tries is 0'}; "
                f"{evidence}; look at its batches, or give a lower schedule.learning_rate or other "
                "recovery settings"
            )
        checkpoints.pin(rollback.checkpoint)
        if rollback.checkpoint not in checkpoints.steps():
            checkpoints.save(0, engine.init(), {**metadata, ROLLBACK_COUNT_KEY: 0})
            checkpoints.wait()
        self._write(RollbackRecord((*self._record.rollbacks, rollback), cleared=False))
        return rollback

    def set_aside_later_checkpoints(self, checkpoints: CheckpointManager) -> None:
        """Moves out of the way what lies beyond the checkpoint that was decided on."""
        last = self._record.last
        if last is None:
            return
        for rollback in self._record.rollbacks:
            checkpoints.pin(rollback.checkpoint)
        beyond = [step for step in checkpoints.steps() if step > last.checkpoint]
        wait_for_all_processes()  # all have read what is there before anything changes
        if self._record.cleared:
            return
        for step in beyond:
            checkpoints.set_aside(step, f"rolled-back-{len(self._record.rollbacks)}")
        self._write(dataclasses.replace(self._record, cleared=True))

    def apply_rollback(self, state: TrainState, metadata: dict[str, Any]) -> TrainState:
        """The state of a checkpoint, sent on as was decided after it had been saved."""
        last = self._record.last
        if last is None or metadata.get(ROLLBACK_COUNT_KEY, 0) == len(self._record.rollbacks):
            return state
        self._left_out = int(state.cursor)
        cursor = jax.device_put(np.int32(last.cursor), state.cursor.sharding)
        if state.anomaly_detector is None:
            return state.replace(cursor=cursor)
        rate = jax.device_put(np.float32(last.rate), state.anomaly_detector.lr_factor.sharding)
        return state.replace(cursor=cursor, anomaly_detector=state.anomaly_detector.replace(rate=rate))

    def log_rollback(self, step: int, report: Reporter) -> None:
        """The line of the logbook, where a rollback has led to this step."""
        last = self._record.last
        if last is None or self._left_out is None:
            return
        what = {**dataclasses.asdict(last), "checkpoint": step}
        report.log_event("rolled back", **what, left_out=[self._left_out, last.cursor - 1])
        self._left_out = None
        report.print_message(
            f"step {last.step}: back to step {step}, and on with batch {last.cursor}"
            f"{f', the learning rate times {last.rate:g}' if last.rate != 1 else ''} "
            f"(try {last.tries} of {self._config.max_rollbacks})"
        )

    def log_if_recovered(self, step: int, report: Reporter) -> None:
        """Says so when a run has got beyond its last trouble."""
        last = self._record.last
        if last and step == min(last.step + self._config.rollback_steps, self._experiment.steps):
            report.log_event("recovered", step=step, trouble=last.step, tries=last.tries)

    def _write(self, record: RollbackRecord) -> None:
        record.write(self._path)
        self._record = record

    def _keep(self, state: TrainState) -> str:
        """Saves the state of the trouble. Returns where, or why it is not there, in words."""
        step = int(state.step)
        try:
            with CheckpointManager(
                self._evidence, keep_last=1_000_000, asynchronous=False
            ) as evidence:
                if step in evidence.steps():
                    evidence.set_aside(step, "earlier")
                evidence.save(step, state, self.metadata)
        except UserError as error:
            return f"its state is not kept ({error})"
        return f"its state is in {self._evidence / str(step)}"
