"""Whole runs with planted faults."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import train
from bench.drills.faults import Fault, planted
from tests.train.support import assert_same_bits, lines_of, losses, tiny
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.assembly import make_engine
from train.checkpoint.manager import CheckpointManager
from train.detector import RecoveryConfig
from train.errors import UserError
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.optim.schedules import ScheduleConfig
from train.reporter import Reporter
from train.rollback import Rollback, RollbackManager, RollbackRecord
from train.runtime.local_hardware import local_hardware
from train.state import TrainState

STEPS = 48
POISON = Fault(first=25, count=3, words=20)
NAN = Fault(first=25, weight=float("nan"))
HOPELESS = Fault(first=25, count=1000, words=20)


class CrashError(Exception):
    """The process is gone."""


def an_experiment(folder: Path, **changes: Any) -> Experiment:
    """Return an experiment with checkpoints 8, 16, 24, ...; from an anomaly at 26, four steps back
    means 16.
    """
    settings = {
        "num_layers": 1,
        "steps": STEPS,
        "schedule": ScheduleConfig("cosine", learning_rate=1e-2, warmup_steps=3),
        "checkpoint": CheckpointConfig(every=8, keep_last=2, keep_best=True),
        "evaluation": EvaluationConfig(every=8, num_batches=1),
        "recovery": RecoveryConfig(
            window=16, warmup=8, patience=2, rollback_steps=4, skip_batches=3, max_rollbacks=2
        ),
    }
    return tiny(folder, **{**settings, **changes})


def fit(folder: Path, name: str, fault: Fault, **changes: Any) -> train.Run:
    with planted(fault):
        return train.fit(an_experiment(folder, **changes), str(folder / name), quiet=True)


def events(workdir: Path, *names: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(workdir / "logbook.jsonl") if line["event"] in names]


def last_state(run: train.Run) -> TrainState:
    engine = make_engine(run.experiment, local_hardware())
    with CheckpointManager(run.folder.checkpoints) as checkpoints:
        state: TrainState = checkpoints.restore(STEPS, engine.abstract_state()).state
    return state


class Runs(NamedTuple):
    folder: Path
    clean: train.Run
    poisoned: train.Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("recovery")
    clean = fit(folder, "clean", Fault(first=10**9))
    return Runs(folder, clean, fit(folder, "poisoned", POISON))


@pytest.mark.full
def test_clean_run_has_no_rollback(runs: Runs) -> None:
    names = [line["event"] for line in lines_of(runs.folder / "clean" / "logbook.jsonl")]
    assert set(names) <= {"started", "saved", "weights", "finished"}
    assert not (runs.folder / "clean" / "recovery.json").exists()
    assert int(last_state(runs.clean).cursor) == STEPS


def test_nonfinite_batch_is_skipped(runs: Runs) -> None:
    run = fit(runs.folder, "nan", NAN)
    [skipped] = events(runs.folder / "nan", "skipped")
    assert (skipped["step"], skipped["batch"], skipped["loss"]) == (26, 25, "NaN")
    assert not events(runs.folder / "nan", "rolled back")
    assert run.final_metrics["loss"] == pytest.approx(runs.clean.final_metrics["loss"], rel=0.01)
    assert int(last_state(run).cursor) == STEPS


def test_no_checkpoint_holds_an_anomaly_that_is_not_known_yet(tmp_path: Path) -> None:
    """Batch 26, of step 27, is bad, and a checkpoint is due after that step."""
    checkpoints = CheckpointConfig(every=9, keep_last=9)
    evaluation = EvaluationConfig(num_batches=1)
    run = fit(tmp_path, "due", POISON, checkpoint=checkpoints, evaluation=evaluation)
    # A checkpoint of the first time at step 27 would have been set aside by the rollback.
    names = {path.name for path in Path(str(run.folder.checkpoints)).iterdir()}
    assert names == {"9", "18", "27", "36", "45", "48"}


def test_poisoned_batches_are_detected_and_skipped(runs: Runs) -> None:
    """Batches 25 to 27 are bad.

    After two of them, the run goes back to step 16 and on with batch 30.
    """
    workdir = runs.folder / "poisoned"
    assert [line["step"] for line in events(workdir, "skipped")] == [26, 27]
    [rollback] = events(workdir, "rolled back")
    actual = {name: rollback[name] for name in rollback if name not in ("time", "event")}
    expected = dict(first=26, step=27, checkpoint=16, cursor=30, rate=1.0, attempts=1)
    assert actual == {**expected, "skipped_batches": [16, 29]}
    [recovered] = events(workdir, "recovered")
    assert (recovered["step"], recovered["anomaly_step"]) == (31, 27)
    assert runs.poisoned.final_metrics["loss"] == pytest.approx(
        runs.clean.final_metrics["loss"], rel=0.01
    )
    state = last_state(runs.poisoned)
    assert (int(state.step), int(state.cursor)) == (STEPS, STEPS + 30 - 16)


def test_rollback_passes_over_a_damaged_checkpoint(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later ones are set aside before it is restored: without it nothing would be left."""
    record = RollbackManager.record_rollback

    def damage_and_record(self: RollbackManager, *given: Any) -> Rollback:
        for step in (8, 16):
            (runs.folder / "damaged" / "checkpoints" / str(step) / "manifest/metadata").unlink(True)
        return record(self, *given)

    monkeypatch.setattr(RollbackManager, "record_rollback", damage_and_record)
    assert fit(runs.folder, "damaged", POISON).step == STEPS
    [rollback] = events(runs.folder / "damaged", "rolled back")
    assert rollback["checkpoint"] == 24


@pytest.mark.full
def test_slow_rise_of_the_loss_is_rolled_back(runs: Runs) -> None:
    """Gradients have the wrong sign for a while, without a single spike."""
    uphill = Fault(first=25, count=20, factor=-1.0)
    recovery = RecoveryConfig(
        window=16, warmup=8, threshold=1e3, rollback_steps=4, skip_batches=10, max_rollbacks=2
    )
    longer: dict[str, Any] = {
        "steps": 96,
        "schedule": ScheduleConfig("cosine", learning_rate=3e-2, warmup_steps=3),
        "checkpoint": CheckpointConfig(every=24, keep_last=2),
        "recovery": recovery,
        "num_layers": 2,
    }
    clean = fit(runs.folder, "longer", Fault(first=10**9), **longer)
    run = fit(runs.folder, "uphill", uphill, **longer)
    [skipped] = events(runs.folder / "uphill", "skipped")
    assert skipped["reason"].startswith("median loss ")
    [rollback] = events(runs.folder / "uphill", "rolled back")
    assert 33 <= rollback["step"] <= 45
    assert (rollback["first"], rollback["checkpoint"]) == (rollback["step"] - 8, 24)
    assert run.final_metrics["loss"] == pytest.approx(clean.final_metrics["loss"], rel=0.01)


def test_evidence_of_an_anomaly_is_kept(runs: Runs) -> None:
    """Checkpoints on both sides and the anomalous state are kept; nothing is overwritten."""
    workdir = runs.folder / "poisoned"
    kept = {path.name for path in (workdir / "checkpoints").iterdir()}
    assert {"16", "rolled-back-1-24", "40", "48"} <= kept
    assert [path.name for path in (workdir / "spikes").iterdir()] == ["28"]
    engine = make_engine(runs.poisoned.experiment, local_hardware())
    with CheckpointManager(workdir / "spikes") as spikes:
        state = spikes.restore(28, engine.abstract_state()).state
    assert int(state.anomaly_detector.consecutive_anomalies) == 3
    assert sorted(losses(workdir)) == list(range(1, STEPS + 1))
    aside = lines_of(workdir / "metrics.jsonl.beyond-16")
    assert {line["step"] for line in aside} == set(range(17, 29))


def test_best_evaluation_excludes_rolled_back_steps(runs: Runs) -> None:
    """The best evaluation is of a step that was not rolled back."""
    lines = lines_of(runs.folder / "poisoned" / "metrics.jsonl")
    judged = {line["step"]: line["loss"] for line in lines if line["split"] == "validation"}
    assert runs.poisoned.step in judged
    with CheckpointManager(runs.folder / "poisoned" / "checkpoints") as checkpoints:
        best = checkpoints.read_metadata(STEPS)["best"]
        assert best["step"] in checkpoints.steps()
    if best["step"] != STEPS:  # for the last step, the metrics are those of the full split
        assert judged[best["step"]] == best["value"]


def killed_when_it_is_decided(patch: pytest.MonkeyPatch) -> None:
    write = RollbackRecord.write

    def write_and_crash(self: RollbackRecord, path: Any) -> None:
        write(self, path)
        raise CrashError

    patch.setattr(RollbackRecord, "write", write_and_crash)


def killed_while_checkpoints_are_moved(patch: pytest.MonkeyPatch) -> None:
    def crash(self: CheckpointManager, step: int, name: str) -> None:
        raise CrashError

    patch.setattr(CheckpointManager, "set_aside", crash)


def killed_before_the_next_checkpoint(patch: pytest.MonkeyPatch) -> None:
    train_line, gone_back = Reporter.log_training, []
    go_back = Reporter.rewind

    def note(self: Reporter, step: int) -> None:
        go_back(self, step)
        gone_back.append(step)

    def crash(self: Reporter, step: int, metrics: dict[str, float]) -> None:
        train_line(self, step, metrics)
        if gone_back and step == gone_back[0] + 5:
            raise CrashError

    patch.setattr(Reporter, "rewind", note)
    patch.setattr(Reporter, "log_training", crash)


@pytest.mark.full
@pytest.mark.parametrize(
    "killed",
    [
        killed_when_it_is_decided,
        killed_while_checkpoints_are_moved,
        killed_before_the_next_checkpoint,
    ],
    ids=lambda each: each.__name__,
)
def test_crash_during_recovery_does_not_change_the_result(runs: Runs, killed: Any) -> None:
    """Bit for bit: weights, moments, data cursor, detector state."""
    name = killed.__name__
    with pytest.MonkeyPatch.context() as patch:
        killed(patch)
        with pytest.raises(CrashError):
            fit(runs.folder, name, POISON)
    run = fit(runs.folder, name, POISON)
    assert_same_bits(last_state(run), last_state(runs.poisoned))
    assert losses(runs.folder / name) == losses(runs.folder / "poisoned")
    assert run.final_metrics == runs.poisoned.final_metrics
    assert len(events(runs.folder / name, "rolled back")) in (1, 2)


@pytest.mark.full
def test_pmap_rolls_back_like_jit(runs: Runs) -> None:
    run = fit(runs.folder, "pmap", POISON, compile="pmap")
    [actual], [expected] = (
        events(runs.folder / name, "rolled back") for name in ("pmap", "poisoned")
    )
    assert {**actual, "time": ""} == {**expected, "time": ""}
    assert losses(runs.folder / "pmap") == pytest.approx(losses(runs.folder / "poisoned"), rel=1e-4)
    assert int(last_state(run).cursor) == int(last_state(runs.poisoned).cursor)


def test_number_of_rollbacks_is_bounded(runs: Runs) -> None:
    """All data are bad from some batch on."""
    workdir = runs.folder / "hopeless"
    with pytest.raises(UserError, match="2 rollbacks did not help") as caught:
        fit(runs.folder, "hopeless", HOPELESS)
    assert len(str(caught.value).splitlines()) == 1
    assert f"its state is in {workdir / 'spikes'}" in str(caught.value)
    rollbacks = events(workdir, "rolled back")
    assert [line["attempts"] for line in rollbacks] == [1, 2]
    assert [line["rate"] for line in rollbacks] == [1.0, 0.5]
    before = (workdir / "recovery.json").read_text()
    with pytest.raises(UserError, match="2 rollbacks did not help"):
        fit(runs.folder, "hopeless", HOPELESS)
    assert (workdir / "recovery.json").read_text() == before


@pytest.mark.full
def test_rollback_without_checkpoint_restarts(runs: Runs) -> None:
    """The run restarts from the initial weights, with other data."""
    experiment = dataclasses.replace(
        an_experiment(runs.folder), checkpoint=CheckpointConfig(every=0), steps=34
    )
    workdir = runs.folder / "anew"
    with planted(POISON):
        train.fit(experiment, str(workdir), quiet=True)
    [rollback] = events(workdir, "rolled back")
    assert (rollback["checkpoint"], rollback["cursor"]) == (0, 30)
    with CheckpointManager(workdir / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [0, 34]
        engine = make_engine(experiment_of(workdir), local_hardware())
        first, last = (checkpoints.restore(step, engine.abstract_state()).state for step in (0, 34))
    start = jax.tree.map(np.asarray, engine.init().params)
    assert_same_bits(first.params, start)
    assert int(last.cursor) == 30 + 34


def experiment_of(workdir: Path) -> Experiment:
    return train.load(str(workdir)).experiment
