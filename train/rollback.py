"""Rollbacks: find the anomalies that need one, choose its checkpoint, record it, and carry it out.

`AnomalyMonitor` reads the detector's verdicts on the host, one step late so that training does not
wait. `RollbackManager` plans, and records in `recovery.json` before anything is done. The rollback
then takes the path of every resume: later checkpoints are set aside, the checkpoint is restored,
and the state gets the cursor and the learning rate of the rollback. A process may be killed between
any two of these steps. What is done already can be told from the record, from the names of the
folders and from the checkpoint's metadata, so the next process continues there, to the same bits.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np

from train.checkpoint.manager import CheckpointManager, broadcast_integers
from train.checkpoint.retention import RetentionPolicy
from train.detector import DETECTOR_METRICS, MONITORED_METRICS, RecoveryConfig
from train.errors import UserError, as_damaged, as_user_error
from train.experiment import CheckpointConfig, Experiment
from train.files import AnyPath
from train.reporter import Reporter
from train.run_folder.folder import RunFolder
from train.runtime.writing import write_atomically
from train.state import TrainState
from train.step import Metrics
from transformer.validation import Bounds, NonNegativeInt, PositiveInt, Settings


@dataclasses.dataclass(frozen=True)
class Anomaly:
    """Consecutive anomalous steps that need a rollback."""

    first_step: int
    last_step: int
    next_batch: int
    """Cursor of the batch after the last step's."""
    reason: str
    """Description of the last step's anomaly."""


class AnomalyMonitor:
    """Log every skipped update, and return the anomalies that need a rollback."""

    def __init__(self, config: RecoveryConfig, reporter: Reporter):
        self._config, self._reporter = config, reporter
        # Step, cursor and metrics of the step that was dispatched last and may still be running.
        self._pending: tuple[int, int, Metrics] | None = None

    def find_anomaly(
        self, step: int, cursor: int, metrics: Metrics, *, wait: bool
    ) -> Anomaly | None:
        """Check the previous step, and return an anomaly that needs a rollback.

        With `wait`, check this step too, which waits for its end: its state is about to be saved or
        evaluated, so it must be known to be normal.
        """
        previous, self._pending = self._pending, (step, cursor, metrics)
        # Fetching a metric waits for its step. The previous step has ended, or ends before this
        # one can start, so reading it leaves the devices busy.
        anomaly = self._read(*previous) if previous else None
        if wait and not anomaly:
            # Forgotten: read again at the next step, it would be logged twice.
            anomaly, self._pending = self._read(step, cursor, metrics), None
        return anomaly

    def _read(self, step: int, cursor: int, fetched: Metrics) -> Anomaly | None:
        # One number decides in nearly every step; the rest is fetched only for an anomaly.
        if "consecutive_anomalies" not in fetched or not float(fetched["skipped"]):
            return None
        metrics = {name: float(fetched[name]) for name in (*MONITORED_METRICS, *DETECTOR_METRICS)}
        reason = describe_anomaly(metrics)
        monitored = {name: metrics[name] for name in MONITORED_METRICS}
        self._reporter.log_event("skipped", step=step, batch=cursor, **monitored, reason=reason)
        self._reporter.print_message(
            f"step {step}: the update of batch {cursor} is skipped: {reason}"
        )
        risen = metrics["median_loss"] > metrics["median_loss_limit"]
        # Skipping further updates does not repair the weights, so this cannot wait for patience.
        # `not <=` and not `>`: a norm of NaN compares False with everything.
        weights_damaged = not metrics["param_norm"] <= metrics["param_norm_limit"]
        count = int(metrics["consecutive_anomalies"])
        if count < self._config.patience and not (risen or weights_damaged):
            return None
        # The median has risen once half of its window has.
        age = self._config.window // 2 if risen else count - 1
        return Anomaly(max(step - age, 1), step, cursor + 1, reason)


def describe_anomaly(metrics: Mapping[str, float]) -> str:
    """Describe which of the monitored metrics exceed their limits."""
    problems = []
    for name in (*MONITORED_METRICS, "median_loss"):
        value, limit = metrics[name], metrics[f"{name}_limit"]
        label = "median loss" if name == "median_loss" else name
        if not math.isfinite(value):
            problems.append(f"{label} {value}")
        elif value > limit:
            problems.append(f"{label} {value:.4g}, more than {limit:.4g}")
    return " and ".join(problems)


ROLLBACK_COUNT_KEY = "rollbacks"
"""Key in a checkpoint's metadata: number of rollbacks before it was saved."""


@dataclasses.dataclass(frozen=True)
class Rollback(Settings):
    """One rollback. The field names are those of `recovery.json` and of the event log."""

    first: PositiveInt
    """First anomalous step."""
    step: PositiveInt
    """Step at which the rollback was decided."""
    checkpoint: NonNegativeInt
    """Step of the checkpoint to restore; 0: the initial state."""
    cursor: NonNegativeInt
    """Batch to continue with."""
    rate: Annotated[float, Bounds(maximum=1, above=0)]
    """Factor on the learning rate from then on."""
    attempts: PositiveInt
    """Rollbacks for this anomaly, this one included."""


@dataclasses.dataclass(frozen=True)
class RollbackRecord(Settings):
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
        broadcast_integers([])  # a barrier

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
            if plain.keys() != {"rollbacks", "cleared"} or not isinstance(plain["rollbacks"], list):
                raise ValueError("it has other fields than a list of rollbacks and cleared")
            return cls(tuple(Rollback(**each) for each in plain["rollbacks"]), plain["cleared"])


# States of anomalies are for inspection: the trainer never deletes them.
_KEEP_ALL = 1_000_000


def plan_rollback(
    anomaly: Anomaly,
    previous: Rollback | None,
    checkpoints: Sequence[int],
    config: RecoveryConfig,
) -> Rollback | None:
    """Plan a rollback to one of the checkpoints; None after `max_rollbacks` for this anomaly.

    It is the same anomaly as before if it starts within `rollback_steps` after the last one.
    """
    # Steps are counted as before the rollback, so the run passes the last anomalous step again,
    # with other data. An anomaly that starts near it is the same one.
    again = previous is not None and anomaly.first_step <= previous.step + config.rollback_steps
    attempts = previous.attempts + 1 if previous and again else 1
    if attempts > config.max_rollbacks:
        return None
    return Rollback(
        first=anomaly.first_step,
        step=anomaly.last_step,
        # The cause often precedes the first anomaly that is noticed.
        checkpoint=choose_checkpoint(anomaly.first_step, checkpoints, config.rollback_steps),
        # The data after the anomaly is skipped too. PaLM found that spikes come from a bad
        # combination of batch and state, so the same batches may well cause the next one.
        cursor=anomaly.next_batch + config.skip_batches,
        # The first attempt keeps the learning rate: other data alone are often enough, as in PaLM.
        rate=(previous.rate if previous else 1.0) * (config.lr_factor if attempts > 1 else 1.0),
        attempts=attempts,
    )


def choose_checkpoint(first_step: int, checkpoints: Sequence[int], rollback_steps: int) -> int:
    """Return the newest checkpoint at least `rollback_steps` before the first anomalous step.

    If none is that old, return the oldest one before the anomaly, or 0.
    """
    before = [step for step in sorted(checkpoints) if step < first_step]
    # The newest of these loses the fewest steps. Without any, the oldest is the furthest from the
    # cause that there is.
    far = [step for step in before if step <= first_step - rollback_steps]
    return far[-1] if far else before[0] if before else 0


def rollback_retention(settings: CheckpointConfig, config: RecoveryConfig) -> RetentionPolicy:
    """Return the policy that keeps the due checkpoints which a rollback may need.

    A rollback chooses only among these, never among those of a preempted run. It restores the
    same checkpoint whether or not the run was interrupted in between.
    """
    if not (config.window and config.max_rollbacks):
        return RetentionPolicy(save_every=settings.every)
    # A slow rise is noticed when half of the window has risen.
    steps_to_notice = max(config.patience, config.window // 2 if config.loss_rise_tolerance else 0)
    return RetentionPolicy(
        save_every=settings.every,
        keep_last_due=max(2, settings.keep_last),  # the newest may be from within the anomaly
        # Noticed at step s, an anomaly began at s - `steps_to_notice` or later, and the checkpoint
        # to restore is at least `rollback_steps` older than that.
        keep_min_age=config.rollback_steps + steps_to_notice,
    )


class RollbackManager:
    """The rollbacks of one run: its record, in memory and in its folder."""

    def __init__(self, experiment: Experiment, folder: RunFolder, *, resuming: bool):
        """Read the record of a run that is resumed; a new run starts with an empty one."""
        self._experiment, self._config = experiment, experiment.recovery
        self._path, self._states_folder = folder.rollback_record, folder.anomaly_states
        self._record = RollbackRecord.read(self._path) if resuming else RollbackRecord()
        # First batch that the rollback applied last skips; None once that rollback is logged.
        self._skipped_from: int | None = None

    @property
    def metadata(self) -> dict[str, int]:
        """Entries for the metadata of a checkpoint."""
        return {ROLLBACK_COUNT_KEY: len(self._record.rollbacks)}

    def record_rollback(
        self,
        anomaly: Anomaly,
        state: TrainState,
        init: Callable[[], TrainState],
        checkpoints: CheckpointManager,
        metadata: dict[str, Any],
    ) -> Rollback:
        """Plan the rollback for an anomaly and record it; save the anomalous state for inspection.

        The state is deleted: the devices may not hold a second one. Where no checkpoint is old
        enough, the state before the first step (`init`) is saved with the metadata.

        Raises:
          UserError: `max_rollbacks` were made for this anomaly.
        """
        # A save in progress is of a step before the anomaly, as only normal states are saved.
        checkpoints.wait()
        due = [step for step in checkpoints.steps() if step == 0 or checkpoints.is_due(step)]
        # Later checkpoints are set aside before this one is restored, so it must be intact.
        due = checkpoints.valid_steps(due)
        # As if the policy had just removed the others: which ones still lie on the disk depends on
        # when a process was interrupted, and the choice must not.
        candidates = rollback_retention(self._experiment.checkpoint, self._config).steps_to_keep(
            due
        )
        rollback = plan_rollback(anomaly, self._record.last, sorted(candidates), self._config)
        # Also if the run ends here: it is the last moment at which the state exists.
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
            checkpoints.save(0, init(), {**metadata, ROLLBACK_COUNT_KEY: 0})
            checkpoints.wait()
        # Last: a process killed before this line has recorded nothing. The next one resumes from a
        # normal state and meets the anomaly again.
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
        broadcast_integers([])  # a barrier: every process lists the steps before any is renamed
        if self._record.cleared:
            return
        # A process killed within this loop repeats it. What is renamed is not listed again.
        for step in later:
            checkpoints.set_aside(step, f"rolled-back-{len(self._record.rollbacks)}")
        self._write(dataclasses.replace(self._record, cleared=True))

    def apply(self, state: TrainState, metadata: Mapping[str, Any]) -> TrainState:
        """Return the state of a checkpoint with the cursor and learning rate of the last rollback.

        A state that was saved after that rollback, as the checkpoint's metadata tell, has both.
        """
        last = self._record.last
        if last is None or metadata.get(ROLLBACK_COUNT_KEY, 0) == len(self._record.rollbacks):
            return state
        self._skipped_from = int(state.cursor)
        # Keep the shardings of the restored arrays: the compiled step expects them.
        cursor = jax.device_put(np.int32(last.cursor), state.cursor.sharding)
        # Runs without detection have no factor; the batches are skipped all the same.
        detector = state.anomaly_detector
        if detector is None:
            return state.replace(cursor=cursor)
        lr_factor = jax.device_put(np.float32(last.rate), detector.lr_factor.sharding)
        detector = detector.replace(lr_factor=lr_factor)
        return state.replace(cursor=cursor, anomaly_detector=detector)

    def log_rollback(self, step: int, reporter: Reporter) -> None:
        """Log the rollback that was applied to the restored state of this step, if any."""
        last = self._record.last
        if last is None or self._skipped_from is None:
            return
        fields = {**dataclasses.asdict(last), "checkpoint": step}
        skipped = [self._skipped_from, last.cursor - 1]
        reporter.log_event("rolled back", **fields, skipped_batches=skipped)
        self._skipped_from = None
        reporter.print_message(
            f"step {last.step}: rolled back to step {step}, continues with batch "
            f"{last.cursor}{f', the learning rate times {last.rate:g}' if last.rate != 1 else ''} "
            f"(attempt {last.attempts} of {self._config.max_rollbacks})"
        )

    def log_if_recovered(self, step: int, reporter: Reporter) -> None:
        """Log at the step from which a new anomaly counts as another one."""
        last = self._record.last
        # Equal and not beyond: the loop passes each step once, so this is logged once.
        if last and step == min(last.step + self._config.rollback_steps, self._experiment.steps):
            reporter.log_event(
                "recovered", step=step, anomaly_step=last.step, attempts=last.attempts
            )

    def _save_anomalous_state(self, state: TrainState) -> str:
        """Save the state for inspection. Return where it is, or why it could not be saved."""
        step, folder = int(state.step), self._states_folder
        try:
            retention = RetentionPolicy(keep_last=_KEEP_ALL)
            with CheckpointManager(folder, retention, asynchronous=False) as saved:
                if step in saved.steps():
                    saved.set_aside(step, "earlier")
                saved.save(step, state, self.metadata)
        except UserError as error:
            return f"its state is not kept ({error})"  # of a full disk: no reason to stop the run
        return f"its state is in {folder / str(step)}"

    def _write(self, record: RollbackRecord) -> None:
        # On disk first: in memory it may only be what a killed process would find again.
        record.write(self._path)
        self._record = record
