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

from train.checkpoint.discovery import Retention
from train.checkpoint.manager import Checkpoints
from train.data.files import AnyPath
from train.engine import Engine
from train.errors import UserError
from train.experiment import Experiment
from train.recovery.config import RecoveryConfig
from train.run_folder.folder import RunFolder, reading, write_atomically
from train.run_folder.regular_files import SETTINGS_BYTES, read_bytes
from train.state import TrainState
from train.telemetry.reporter import Report
from transformer.validation import MAX_INTEGER


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Steps in a row out of line, as many as recovery has patience for."""

    first: int
    step: int
    """The last of them."""
    cursor: int
    """The batch after the one of that step."""
    why: str
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


def plan(
    trouble: Trouble, before: Rollback | None, checkpoints: Sequence[int], config: RecoveryConfig
) -> Rollback | None:
    """How to go back; None if that was tried often enough.

    Trouble is what it was before if it comes before the run has got `back` steps beyond it.

    Args:
      trouble: What there is.
      before: The last rollback of the run.
      checkpoints: The steps that can be gone back to, beside the start of the run.
      config: How often, and how far.
    """
    again = before is not None and trouble.first <= before.step + config.back
    tries = before.tries + 1 if before and again else 1
    if tries > config.tries:
        return None
    return Rollback(
        first=trouble.first,
        step=trouble.step,
        checkpoint=target(trouble.first, checkpoints, config.back),
        cursor=trouble.cursor + config.skip,
        rate=(before.rate if before else 1.0) * (config.rate if tries > 1 else 1.0),
        tries=tries,
    )


def target(first: int, checkpoints: Sequence[int], back: int) -> int:
    """The newest checkpoint `back` steps before step `first`, else the oldest before it, else 0."""
    before = [step for step in sorted(checkpoints) if step < first]
    far = [step for step in before if step <= first - back]
    return far[-1] if far else before[0] if before else 0


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


COUNT = "rollbacks"
"""What a checkpoint calls the number of rollbacks that the run had made when it was saved."""


def for_rollbacks(experiment: Experiment) -> Retention:
    """Which of the checkpoints that were due are kept to be gone back to.

    Of no others it is chosen: so what a run goes back to is the same whether or not it was stopped,
    and saved, in between.
    """
    settings, config = experiment.checkpoint, experiment.recovery
    if not (config.window and config.tries):
        return Retention(every=settings.every)
    noticed_after = max(config.patience, config.window // 2 if config.rise else 0)
    return Retention(
        every=settings.every,
        average=max(2, settings.keep_last),  # one of them may be from within the trouble
        apart=config.back + noticed_after,
    )


class Recovery:
    """The rollbacks of a run."""

    def __init__(self, experiment: Experiment, folder: RunFolder, *, begun: bool):
        """Reads what was decided; a run that begins anew has decided nothing."""
        self._experiment, self._config = experiment, experiment.recovery
        self._path, self._evidence = folder.recovery, folder.spikes
        self._record = Record.read(folder.recovery) if begun else Record()
        self._left_out: int | None = None

    @property
    def extra(self) -> dict[str, int]:
        """What a checkpoint has to say."""
        return {COUNT: len(self._record.rollbacks)}

    def decide(
        self,
        trouble: Trouble,
        state: TrainState,
        engine: Engine,
        checkpoints: Checkpoints,
        extra: dict[str, Any],
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
        due = [step for step in checkpoints.steps() if step == 0 or checkpoints.due(step)]
        kept = for_rollbacks(self._experiment).kept(due)
        rollback = plan(trouble, self._record.last, sorted(kept), self._config)
        evidence = self._keep(state)
        jax.tree.map(lambda leaf: leaf.delete(), state)
        if rollback is None:
            tries = self._config.tries
            raise UserError(
                f"step {trouble.step}: {trouble.why}, and "
                f"{f'going back {tries} times did not help' if tries else 'recovery.tries is 0'}; "
                f"{evidence}; look at its batches, or give a lower schedule.learning_rate or other "
                "recovery settings"
            )
        checkpoints.pin(rollback.checkpoint)
        if rollback.checkpoint not in checkpoints.steps():
            checkpoints.save(0, engine.init(), {**extra, COUNT: 0})
            checkpoints.wait()
        self._write(Record((*self._record.rollbacks, rollback), cleared=False))
        return rollback

    def clear(self, checkpoints: Checkpoints) -> None:
        """Moves out of the way what lies beyond the checkpoint that was decided on."""
        last = self._record.last
        if last is None:
            return
        for rollback in self._record.rollbacks:
            checkpoints.pin(rollback.checkpoint)
        beyond = [step for step in checkpoints.steps() if step > last.checkpoint]
        together()  # all have read what is there before anything changes
        if self._record.cleared:
            return
        for step in beyond:
            checkpoints.set_aside(step, f"rolled-back-{len(self._record.rollbacks)}")
        self._write(dataclasses.replace(self._record, cleared=True))

    def applied(self, state: TrainState, extra: dict[str, Any]) -> TrainState:
        """The state of a checkpoint, sent on as was decided after it had been saved."""
        last = self._record.last
        if last is None or extra.get(COUNT, 0) == len(self._record.rollbacks):
            return state
        self._left_out = int(state.cursor)
        cursor = jax.device_put(np.int32(last.cursor), state.cursor.sharding)
        if state.watch is None:
            return state.replace(cursor=cursor)
        rate = jax.device_put(np.float32(last.rate), state.watch.rate.sharding)
        return state.replace(cursor=cursor, watch=state.watch.replace(rate=rate))

    def tell(self, step: int, report: Report) -> None:
        """The line of the logbook, where a rollback has led to this step."""
        last = self._record.last
        if last is None or self._left_out is None:
            return
        what = {**dataclasses.asdict(last), "checkpoint": step}
        report.event("rolled back", **what, left_out=[self._left_out, last.cursor - 1])
        self._left_out = None
        report.say(
            f"step {last.step}: back to step {step}, and on with batch {last.cursor}"
            f"{f', the learning rate times {last.rate:g}' if last.rate != 1 else ''} "
            f"(try {last.tries} of {self._config.tries})"
        )

    def passed(self, step: int, report: Report) -> None:
        """Says so when a run has got beyond its last trouble."""
        last = self._record.last
        if last and step == min(last.step + self._config.back, self._experiment.steps):
            report.event("recovered", step=step, trouble=last.step, tries=last.tries)

    def _write(self, record: Record) -> None:
        record.write(self._path)
        self._record = record

    def _keep(self, state: TrainState) -> str:
        """Saves the state of the trouble. Returns where, or why it is not there, in words."""
        step = int(state.step)
        try:
            with Checkpoints(self._evidence, keep=1_000_000, asynchronous=False) as evidence:
                if step in evidence.steps():
                    evidence.set_aside(step, "earlier")
                evidence.save(step, state, self.extra)
        except UserError as error:
            return f"its state is not kept ({error})"
        return f"its state is in {self._evidence / str(step)}"
