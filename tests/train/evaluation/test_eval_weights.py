"""Averages of checkpoints, EMA, the best checkpoint, and early stopping."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import optax
import pytest

import train
from tests.train.resumed_runs import fit, preempted_after, state_at
from tests.train.support import (
    NO_DETECTOR,
    assert_close,
    assert_same_bits,
    command,
    lines_of,
    losses,
    tiny,
)
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.assembly import make_engine
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.retention import RetentionPolicy
from train.errors import UsageError, UserError
from train.evaluation.eval_weights import steps_to_average
from train.evaluation.evaluator import Evaluator
from train.experiment import CheckpointConfig, EarlyStoppingConfig, EvaluationConfig, Experiment
from train.optim.schedules import SCHEDULES, LearningRateSchedule, register_schedule
from train.parallel.mesh import MeshConfig
from train.run_folder.folder import RunFolder
from train.runtime.local_hardware import local_hardware
from train.state import EmaConfig

STEPS = 8


def make_experiment(folder: Path, **changes: Any) -> Experiment:
    return tiny(folder, num_layers=1, dropout=0.0, **changes)


def steps_of(workdir: Path) -> list[int]:
    with CheckpointManager(workdir / "checkpoints") as checkpoints:
        return checkpoints.steps()


def fit_broken(experiment: Experiment, workdir: Path, at: int) -> train.Run:
    """Train until a step, stop, and resume."""
    with preempted_after(at):
        fit(experiment, workdir)
    return fit(experiment, workdir)


@pytest.mark.parametrize(
    ("newest", "count", "found"),
    [(12, 1, [12]), (12, 2, [8, 12]), (12, 3, [4, 8, 12]), (12, 9, [4, 8, 12]), (9, 2, [8, 9])],
)
def test_steps_to_average(newest: int, count: int, found: list[int]) -> None:
    assert steps_to_average([4, 5, 8, 9, 12], newest, 4, count) == found


def test_without_intermediate_checkpoints_one_is_averaged() -> None:
    assert steps_to_average([5, 12], 12, 0, 3) == [12]


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Path, train.Run]:
    folder = tmp_path_factory.mktemp("averaged")
    experiment = make_experiment(
        folder,
        steps=STEPS,
        checkpoint=CheckpointConfig(every=2, keep_last=1),
        evaluation=EvaluationConfig(every=0, average_checkpoints=3),
        ema=EmaConfig(decay=0.5),
        recovery=NO_DETECTOR,
    )
    return experiment, folder / "run", fit(experiment, folder / "run")


def test_final_weights_are_the_last_or_the_mean_of_the_last(
    averaged: tuple[Experiment, Path, train.Run], tmp_path: Path
) -> None:
    """Also while the last checkpoint is still being saved."""
    experiment, folder = averaged[2].experiment, RunFolder.create(tmp_path)
    engine = make_engine(experiment, local_hardware())
    states = [state_at(averaged[1], step) for step in (4, 6, 8)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, states[1].ema, states[2].ema)
    with CheckpointManager(folder.checkpoints, RetentionPolicy(keep_last=3)) as checkpoints:
        for state in states:
            checkpoints.save(int(state.step), state, {})
        for count, steps, expected in ((2, [6, 8], mean), (1, [8], states[2].ema)):
            settings = EvaluationConfig(every=0, average_checkpoints=count)
            asked = dataclasses.replace(experiment, evaluation=settings)
            evaluator = Evaluator(asked, engine, None)
            found = evaluator.final_weights(states[2], STEPS, checkpoints)
            assert found.steps == steps
            assert_close(found.params, expected, 1e-6)


@pytest.mark.full
def test_checkpoint_removed_while_read_is_replaced(
    averaged: tuple[Experiment, Path, train.Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A run training in the folder may remove the oldest of three while they are read."""
    shutil.copytree(averaged[1], tmp_path / "run")
    directory, read = tmp_path / "run" / "checkpoints", CheckpointManager.restore_subtree
    asked = []

    def remove_then_read(self: CheckpointManager, step: int, part: str, like: Any) -> Any:
        asked.append(step)
        if len(asked) == 1:
            (directory / "4" / "manifest/metadata").unlink()
            shutil.rmtree(directory / "4")
        return read(self, step, part, like)

    monkeypatch.setattr(CheckpointManager, "restore_subtree", remove_then_read)
    run = train.load(str(tmp_path / "run"))
    assert asked == [4, 6, 8]
    states = [state_at(averaged[1], step) for step in (6, 8)]
    assert_close(run.params, jax.tree.map(lambda a, b: (a + b) / 2, *(s.ema for s in states)), 1e-6)
    assert not capfd.readouterr().err


@pytest.mark.full
def test_last_checkpoints_are_kept_and_averaged(
    averaged: tuple[Experiment, Path, train.Run],
) -> None:
    _, workdir, run = averaged
    assert steps_of(workdir) == [4, 6, 8]
    states = [state_at(workdir, step) for step in (4, 6, 8)]
    expected = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *(s.ema for s in states))
    assert_close(run.params, expected, 1e-6)
    assert run.step == STEPS
    assert_same_bits(train.load(str(workdir)).params, run.params)
    weights = [e for e in lines_of(workdir / "logbook.jsonl") if e["event"] == "weights"]
    assert [each["checkpoints"] for each in weights] == [[4, 6, 8]]


@pytest.mark.full
def test_final_metrics_are_those_of_the_average(
    averaged: tuple[Experiment, Path, train.Run],
) -> None:
    _, workdir, run = averaged
    again = train.load(str(workdir)).evaluate("validation")
    assert again == pytest.approx(run.final_metrics, rel=1e-6)
    alone = train.load(str(workdir), step=8).evaluate("validation")
    assert alone["loss"] != pytest.approx(run.final_metrics["loss"], rel=1e-4)


@pytest.mark.full
def test_load_can_average_on_request(
    averaged: tuple[Experiment, Path, train.Run], capsys: pytest.CaptureFixture[str]
) -> None:
    _, workdir, _ = averaged
    two = train.load(str(workdir), step=6, average_checkpoints=2)
    states = [state_at(workdir, step).ema for step in (4, 6)]
    assert_close(two.params, jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *states), 1e-6)
    assert two.step == 6
    result = command(capsys, "evaluate", str(workdir), "--average-checkpoints", "4")
    assert (result.status, result.output) == (1, "")
    assert "average_checkpoints 4: only the checkpoints of steps 4, 6, 8 can be" in result.error
    with pytest.raises(UsageError, match="average_checkpoints 0"):
        train.load(str(workdir), average_checkpoints=0)


@pytest.mark.full
def test_ema_includes_every_step(tmp_path: Path) -> None:
    """By hand, from checkpoints of all steps: decays of 1/10, 2/11, 3/12 and then 1/4."""
    experiment = make_experiment(
        tmp_path,
        steps=4,
        checkpoint=CheckpointConfig(every=1, keep_last=9),
        ema=EmaConfig(decay=0.26),
    )
    run = fit(experiment, tmp_path / "run")
    engine = make_engine(run.experiment, local_hardware())
    expected: Any = jax.tree.map(np.asarray, engine.init().params)
    for step, decay in enumerate([1 / 10, 2 / 11, 3 / 12, 0.26], start=1):
        params = state_at(tmp_path / "run", step).params
        expected = jax.tree.map(
            lambda e, p, d=decay: d * e + (1 - d) * np.asarray(p), expected, params
        )
    last = state_at(tmp_path / "run", 4)
    assert_close(last.ema, expected, 1e-6)
    assert_same_bits(run.params, last.ema)
    assert not np.array_equal(run.params["embedding"], last.params["embedding"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (1, {}),
        (4, {"mesh": MeshConfig(data=1, fsdp=2, tensor=2), "grad_accum_steps": 2}),
        (2, {"compile": "pmap"}),
    ],
    ids=["jit", "mesh", "pmap"],
)
def test_resumed_run_has_the_same_averages(
    tmp_path: Path,
    count_devices: Callable[[int], None],
    devices: int,
    changes: dict[str, Any],
) -> None:
    """With one more checkpoint saved in between."""
    count_devices(devices)
    experiment = make_experiment(
        tmp_path,
        steps=STEPS,
        checkpoint=CheckpointConfig(every=2, keep_last=1),
        evaluation=EvaluationConfig(every=3, average_checkpoints=3),
        ema=EmaConfig(decay=0.9),
        **changes,
    )
    full = fit(experiment, tmp_path / "whole")
    broken = fit_broken(experiment, tmp_path / "broken", 5)
    assert broken.final_metrics == full.final_metrics
    assert_same_bits(broken.params, full.params)
    assert_same_bits(state_at(tmp_path / "broken", STEPS), state_at(tmp_path / "whole", STEPS))


@dataclasses.dataclass(frozen=True)
class JumpSchedule(LearningRateSchedule):
    """A small learning rate until step 8, and one that undoes all learning after it."""

    kind: ClassVar[str] = "jump"

    def make(self, *, steps: int, width: int) -> optax.Schedule:
        return optax.piecewise_constant_schedule(0.01, {9: 1000.0})


@pytest.fixture(scope="module", autouse=True)
def registered_jump_schedule() -> Iterator[None]:
    """Register the schedule for this module only."""
    register_schedule(JumpSchedule)
    yield
    del SCHEDULES[JumpSchedule.kind]


def impatient(folder: Path, **changes: Any) -> Experiment:
    """Return an experiment whose loss falls until step 8 and is far higher afterwards."""
    settings = {
        "steps": 40,
        "schedule": JumpSchedule(),
        "checkpoint": CheckpointConfig(every=5, keep_last=1),
        "evaluation": EvaluationConfig(every=2, num_batches=0),
        "early_stopping": EarlyStoppingConfig(patience=3),
    }
    return make_experiment(folder, **{**settings, **changes})


def evaluations(workdir: Path) -> list[tuple[int, float]]:
    lines = lines_of(workdir / "metrics.jsonl")
    return [(line["step"], line["loss"]) for line in lines if line["split"] == "validation"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Path, train.Run]:
    folder = tmp_path_factory.mktemp("stopped")
    experiment = impatient(folder)
    return experiment, folder / "run", fit(experiment, folder / "run")


@pytest.mark.full
def test_early_stopping_ends_the_run(
    stopped: tuple[Experiment, Path, train.Run],
) -> None:
    _, workdir, run = stopped
    *way, (evaluated, final) = evaluations(workdir)
    best, value = min(way, key=lambda each: each[1])
    assert [step for step, _ in way] == list(range(2, best + 7, 2))
    end = way[-1][0]
    assert end == best + 6 < 40
    assert evaluated == best  # or a curve would jump at its end
    assert run.step == best
    assert final == pytest.approx(value, rel=1e-6)  # the best weights, on the same text
    assert_same_bits(run.params, state_at(workdir, best).params)
    again = train.load(str(workdir))
    assert again.step == best
    assert_same_bits(again.params, run.params)
    kept_steps = steps_of(workdir)  # two that were due are kept for recovery
    assert {best, end} <= set(kept_steps)
    assert all(step in (best, end) or step % 5 == 0 for step in kept_steps)
    assert len(kept_steps) <= 4
    assert max(losses(workdir)) == end
    events = lines_of(workdir / "logbook.jsonl")
    assert [e["event"] for e in events] == [
        *("started", "saved", "stopped early", "weights", "finished")
    ]
    assert events[2]["best"] == {"step": best, "value": value, "waited": 3}


@pytest.mark.full
def test_stopped_run_is_not_continued(stopped: tuple[Experiment, Path, train.Run]) -> None:
    experiment, workdir, run = stopped
    before = evaluations(workdir)
    again = fit(experiment, workdir)
    assert (again.step, again.final_metrics) == (run.step, run.final_metrics)
    assert evaluations(workdir) == before


@pytest.mark.full
def test_resumed_run_stops_at_the_same_step(
    stopped: tuple[Experiment, Path, train.Run], tmp_path: Path
) -> None:
    experiment, workdir, run = stopped
    broken = fit_broken(experiment, tmp_path / "run", 5)
    assert evaluations(tmp_path / "run") == evaluations(workdir)
    assert steps_of(tmp_path / "run") == steps_of(workdir)
    assert_same_bits(broken.params, run.params)


@pytest.mark.full
def test_more_patience_continues_the_run(
    stopped: tuple[Experiment, Path, train.Run], tmp_path: Path
) -> None:
    """Without patience a run does not stop early; the best checkpoint is kept if requested."""
    experiment = stopped[0]
    workdir = Path(shutil.copytree(stopped[1], tmp_path / "longer"))
    again = dataclasses.replace(
        experiment,
        early_stopping=EarlyStoppingConfig(),
        checkpoint=dataclasses.replace(experiment.checkpoint, keep_best=True),
    )
    longer = fit(again, workdir)
    assert max(losses(workdir)) == 40
    way = evaluations(workdir)
    best = min(way[:-1], key=lambda each: each[1])[0]
    assert longer.step == best
    assert steps_of(workdir) == sorted({best, 35, 40})  # two that were due, for recovery


@pytest.mark.full
def test_best_checkpoint_can_be_requested_later(tmp_path: Path) -> None:
    """An earlier best evaluation without a checkpoint no longer counts."""
    experiment = impatient(
        tmp_path,
        steps=6,
        early_stopping=EarlyStoppingConfig(),
        checkpoint=CheckpointConfig(every=0),
    )
    fit(experiment, tmp_path / "run")
    assert steps_of(tmp_path / "run") == [6]
    kept = dataclasses.replace(experiment, steps=10, checkpoint=CheckpointConfig(0, keep_best=True))
    run = fit(kept, tmp_path / "run")
    later = [each for each in evaluations(tmp_path / "run")[:-1] if each[0] > 6]
    assert run.step == min(later, key=lambda each: each[1])[0]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("early_stopping.patience", {"early_stopping": EarlyStoppingConfig(3)}),
        ("checkpoint.keep_best", {"checkpoint": CheckpointConfig(keep_best=True)}),
        (
            "evaluation.average_checkpoints 2",
            {
                "evaluation": EvaluationConfig(average_checkpoints=2),
                "checkpoint": CheckpointConfig(every=0),
            },
        ),
    ],
)
def test_contradictory_settings_are_errors(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=f"^{name}: "):
        tiny(tmp_path, **changes)


def test_run_with_ema_is_not_resumed_without(
    averaged: tuple[Experiment, Path, train.Run],
) -> None:
    experiment, workdir, _ = averaged
    without = dataclasses.replace(experiment, ema=EmaConfig(), steps=STEPS + 1)
    with pytest.raises(UserError, match=r"was trained with ema\.decay = 0\.5, not 0\.0"):
        fit(without, workdir)
