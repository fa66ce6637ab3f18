"""Runs that are stopped, killed or damaged, and resumed: equal to the unbroken one, or refused."""

import dataclasses
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import train
from tests.train.resumed_runs import (
    STEPS,
    CrashError,
    OnStep,
    Uninterrupted,
    contents,
    crash,
    fit,
    kill,
    make_experiment,
    preempted_after,
    state_at,
)
from tests.train.support import (
    NO_DETECTOR,
    assert_close,
    assert_same_bits,
    lines_of,
    losses,
    write_text,
)
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.assembly import make_engine, make_task, training_options, with_task
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.manifest import ManifestHandler
from train.errors import UserError
from train.experiment import Experiment
from train.optim.elementwise import AdamW, Lion
from train.optim.schedules import ScheduleConfig
from train.parallel.mesh import MeshConfig
from train.reporter import Reporter
from train.resume import PreviousRun, pin_previous_choices, read_previous_run
from train.run_folder.folder import RunFolder
from train.run_folder.run_config import read_experiment
from train.runtime.local_hardware import local_hardware
from train.runtime.signals import PreemptedError
from train.state import TrainState
from train.telemetry.event_log import EventLog
from transformer import AttentionConfig, BlockConfig


@pytest.fixture
def on_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[OnStep], None]:
    """Call a function with the number of each step."""
    report = Reporter.log_training

    def install(called: OnStep) -> None:
        def train_and_call(self: Reporter, step: int, metrics: dict[str, float]) -> None:
            report(self, step, metrics)
            called(step)

        monkeypatch.setattr(Reporter, "log_training", train_and_call)

    return install


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    folder = tmp_path_factory.mktemp("resume")
    workdir = folder / "uninterrupted"
    fit(make_experiment(folder), workdir)
    return Uninterrupted(folder, workdir, losses(workdir))


@pytest.fixture(scope="module")
def stopped(uninterrupted: Uninterrupted) -> Path:
    """A run that was stopped after its fifth step. Copy it; do not resume it."""
    workdir = uninterrupted.folder / "stopped"
    with preempted_after(5):
        fit(make_experiment(uninterrupted.folder), workdir)
    return workdir


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "copy"))


def events_of(workdir: Path) -> list[tuple[str, int]]:
    """Return the events with their steps, without that of the first save: it comes at any time."""
    lines = [line for line in lines_of(workdir / "logbook.jsonl") if line["event"] != "saved"]
    return [(line["event"], line["step"]) for line in lines]


def test_preempted_run_saves_a_checkpoint(stopped: Path) -> None:
    assert sorted(losses(stopped)) == [1, 2, 3, 4, 5]
    with CheckpointManager(stopped / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [4, 5]
    assert events_of(stopped) == [("started", 0), ("preempted", 5)]
    assert lines_of(stopped / "logbook.jsonl")[-1]["reason"] == "SIGTERM"
    assert (stopped / "loss.png").exists()
    assert train.load(str(stopped)).step == 5


def test_resumed_run_equals_uninterrupted_run(
    uninterrupted: Uninterrupted, copy: Path, tmp_path: Path, on_step: Callable[[OnStep], None]
) -> None:
    """Stopped, crashed, stopped again, its text moved: bit-equal, with dropout."""
    text = shutil.move(
        shutil.copy(uninterrupted.folder / "text.txt", tmp_path), tmp_path / "text.txt"
    )
    moved = make_experiment(uninterrupted.folder)
    data = dataclasses.replace(moved.text_data, path=str(text), cache_dir=str(tmp_path / "cache"))
    moved = dataclasses.replace(moved, data=data, name="moved")
    on_step(crash(at=7))
    with pytest.raises(CrashError):
        fit(moved, copy)
    assert sorted(losses(copy)) == [1, 2, 3, 4, 5, 6, 7]
    on_step(kill(signal.SIGINT, at=9))
    with pytest.raises(PreemptedError, match="SIGINT at step 9"):
        fit(moved, copy)
    on_step(lambda step: None)
    run = fit(moved, copy)
    assert losses(copy) == uninterrupted.losses
    lines = [line for line in lines_of(copy / "metrics.jsonl") if line["split"] == "train"]
    untimed = [line["step"] for line in lines if "tokens_per_second" not in line]
    assert untimed == [1, 6, 10]  # the first step after each start
    last = lines_of(copy / "metrics.jsonl")[-1]
    assert last == lines_of(uninterrupted.workdir / "metrics.jsonl")[-1]
    assert_same_bits(state_at(copy, STEPS), state_at(uninterrupted.workdir, STEPS))
    assert_same_bits(run.params, state_at(copy, STEPS).params)
    aside = lines_of(copy / "metrics.jsonl.beyond-5")
    assert [line["step"] for line in aside] == [6, 7]
    assert events_of(copy) == [
        ("started", 0),
        ("preempted", 5),
        ("resumed", 5),
        ("resumed", 5),
        ("preempted", 9),
        ("resumed", 9),
        ("finished", STEPS),
    ]
    resumed = next(line for line in lines_of(copy / "logbook.jsonl") if line["event"] == "resumed")
    assert resumed["changed"] == {
        "data.cache_dir": str(tmp_path / "cache"),
        "data.path": str(text),
        "name": "moved",
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (4, {"grad_accum_steps": 2, "mesh": MeshConfig(data=1, fsdp=2, tensor=2)}),
        (2, {"compile": "pmap"}),
    ],
    ids=["accumulated on a mesh", "pmap"],
)
def test_resume_with_other_batch_splits(
    uninterrupted: Uninterrupted,
    tmp_path: Path,
    on_step: Callable[[OnStep], None],
    count_devices: Callable[[int], None],
    devices: int,
    changes: dict[str, Any],
) -> None:
    count_devices(devices)
    experiment = make_experiment(uninterrupted.folder, **changes)
    fit(experiment, tmp_path / "whole")
    on_step(kill(signal.SIGTERM, at=5))
    with pytest.raises(PreemptedError):
        fit(experiment, tmp_path / "broken")
    on_step(lambda step: None)
    fit(experiment, tmp_path / "broken")
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    full, broken = (state_at(tmp_path / name, STEPS) for name in ("whole", "broken"))
    assert_same_bits(broken, full)


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (4, {"mesh": MeshConfig(data=1, fsdp=2, tensor=2)}),
        (2, {"compile": "pmap"}),
        (4, {"grad_accum_steps": 4, "mesh": MeshConfig(data=2, tensor=2)}),
    ],
    ids=["mesh", "pmap", "grad_accum_steps"],
)
def test_resume_on_other_devices(
    uninterrupted: Uninterrupted,
    copy: Path,
    count_devices: Callable[[int], None],
    devices: int,
    changes: dict[str, Any],
) -> None:
    """With more devices, another compilation or another microbatch count."""
    count_devices(devices)
    fit(make_experiment(uninterrupted.folder, **changes), copy)
    result = losses(copy)
    assert result.keys() == uninterrupted.losses.keys()
    assert result == pytest.approx(uninterrupted.losses, abs=1e-5)
    params = jax.tree.map(np.asarray, state_at(copy, STEPS).params)
    assert_close(
        params, jax.tree.map(np.asarray, state_at(uninterrupted.workdir, STEPS).params), 1e-4
    )


@pytest.mark.full
def test_resume_with_more_steps(uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    """The steps before the resume are unchanged."""
    workdir = Path(shutil.copytree(uninterrupted.workdir, tmp_path / "longer"))
    run = fit(make_experiment(uninterrupted.folder, steps=STEPS + 2), workdir)
    assert run.step == STEPS + 2
    actual = losses(workdir)
    assert sorted(actual) == list(range(1, STEPS + 3))
    assert {step: actual[step] for step in uninterrupted.losses} == uninterrupted.losses
    resumed = lines_of(workdir / "logbook.jsonl")[-2]
    assert resumed["changed"] == {"steps": STEPS + 2}
    assert read_experiment(RunFolder.open_existing(workdir)).steps == STEPS + 2


def narrower(experiment: Experiment) -> Experiment:
    model = dataclasses.replace(experiment.model, d_model=8)
    return dataclasses.replace(experiment, model=model, recovery=NO_DETECTOR)


def with_heads(experiment: Experiment) -> Experiment:
    block = BlockConfig(mixer=AttentionConfig(num_heads=2), residual_dropout=0.1)
    model = dataclasses.replace(experiment.model, layer_pattern=(block,))
    return dataclasses.replace(experiment, model=model)


def larger_without_its_text(experiment: Experiment) -> Experiment:
    """Refused before the data are read, which may take long."""
    data = dataclasses.replace(experiment.text_data, path="/no/such/text")
    return dataclasses.replace(experiment, data=data, batch_size=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (larger_without_its_text, "batch_size = 8, not 16;"),
        (with_heads, "and 2 more differ"),
        (lambda e: dataclasses.replace(e, optimizer=Lion()), "optimizer.kind = adamw, not lion;"),
    ],
)
def test_forbidden_changes_raise(
    uninterrupted: Uninterrupted,
    stopped: Path,
    change: Callable[[Experiment], Experiment],
    message: str,
) -> None:
    before = contents(stopped)
    with pytest.raises(UserError, match=r"was trained with") as caught:
        fit(change(make_experiment(uninterrupted.folder)), stopped)
    assert message in str(caught.value)
    assert "give another --workdir, or the settings of its config.txt" in str(caught.value)
    assert contents(stopped) == before


def test_changed_text_raises(uninterrupted: Uninterrupted, stopped: Path, tmp_path: Path) -> None:
    experiment = make_experiment(uninterrupted.folder)
    other = write_text(tmp_path / "other.txt", seed=1)
    data = dataclasses.replace(experiment.text_data, path=str(other))
    before = contents(stopped)
    with pytest.raises(UserError, match=r"other.txt: is not the text that .* was trained on; give"):
        fit(dataclasses.replace(experiment, data=data), stopped)
    assert contents(stopped) == before


def one_step(experiment: Experiment, state: TrainState) -> TrainState:
    """Return the state after one step."""
    task, options = make_task(experiment), training_options(experiment)
    corpus = task.prepare_corpus()
    engine = make_engine(with_task(experiment, task.resolve(corpus)), local_hardware())
    rows = task.training_batches(corpus, options).host_batch(int(state.cursor), 0, 1)
    return engine.step(state, engine.put_batch(rows))[0]


@pytest.mark.full
def test_new_optimizer_settings_take_effect(uninterrupted: Uninterrupted, copy: Path) -> None:
    """Not the settings saved with the checkpoint."""
    settings = {
        "optimizer": AdamW(beta1=0.5, beta2=0.7, weight_decay=0.3, max_grad_norm=0.2),
        "schedule": ScheduleConfig("linear", learning_rate=2e-2, warmup_steps=2),
        "steps": 6,
    }
    new_experiment, before = make_experiment(uninterrupted.folder, **settings), state_at(copy, 5)
    fit(new_experiment, copy)
    assert_same_bits(state_at(copy, 6), one_step(new_experiment, before))
    old = make_experiment(uninterrupted.folder, **{**settings, "optimizer": AdamW()})
    moments = one_step(old, state_at(copy, 5)).optimizer
    assert not np.array_equal(
        jax.tree.leaves(moments)[1], jax.tree.leaves(state_at(copy, 6).optimizer)[1]
    )
    [changed] = [x["changed"] for x in lines_of(copy / "logbook.jsonl") if x["event"] == "resumed"]
    assert changed["optimizer.beta1"] == 0.5
    assert changed["schedule.learning_rate"] == 2e-2


def damage(checkpoint: Path) -> None:
    """Flip one bit of the weights."""
    largest = max((checkpoint / "state" / "d").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 8
    largest.write_bytes(data)


@pytest.mark.full
def test_damaged_checkpoint_is_skipped(uninterrupted: Uninterrupted, copy: Path) -> None:
    damage(copy / "checkpoints" / "5")
    fit(make_experiment(uninterrupted.folder), copy)
    assert losses(copy) == uninterrupted.losses
    assert_same_bits(state_at(copy, STEPS), state_at(uninterrupted.workdir, STEPS))
    assert events_of(copy)[2:4] == [("checkpoint skipped", 5), ("resumed", 4)]
    [reason] = [
        x["reason"] for x in lines_of(copy / "logbook.jsonl") if x["event"].endswith("skipped")
    ]
    assert reason.endswith("differs from what was saved")
    assert (copy / "checkpoints" / "damaged-5" / "manifest/metadata").exists()


def test_load_reads_newest_valid_checkpoint(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(copy / "checkpoints" / "5")
    before = contents(copy)
    assert train.load(str(copy)).step == 4
    assert "differs from what was saved; " in capsys.readouterr().err
    with pytest.raises(UserError, match=r"/5: is damaged \(.+\); ask for another step"):
        train.load(str(copy), step=5)
    assert contents(copy) == before


def damage_all(folder: Path) -> None:
    for step in (4, 5):
        damage(folder / str(step))


def rename_checkpoints(folder: Path) -> None:
    for step in (4, 5):
        (folder / str(step)).rename(folder / f"{step}.orbax-checkpoint-tmp")


def truncate_manifests(folder: Path) -> None:
    for step in (4, 5):
        (folder / str(step) / "manifest/metadata").write_text("{")


LOSSES: dict[str, Callable[[Path], object]] = {
    "files damaged": damage_all,
    "manifests truncated": truncate_manifests,
    "renamed": rename_checkpoints,
    "folders lost": shutil.rmtree,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_run_that_lost_its_checkpoints_is_an_error(
    uninterrupted: Uninterrupted, copy: Path, loss: str
) -> None:
    """Nothing is written, with other settings neither; `from_scratch` starts anew."""
    experiment = make_experiment(uninterrupted.folder)
    LOSSES[loss](copy / "checkpoints")
    before = contents(copy)
    for tried in (experiment, experiment, narrower(experiment)):
        with pytest.raises(UserError, match=r"there is none, but|none is intact|was trained with"):
            fit(tried, copy)
        assert contents(copy) == before
    train.fit(narrower(experiment), str(copy), from_scratch=True, quiet=True)
    assert read_experiment(RunFolder.open_existing(copy)).model.d_model == 8
    assert sorted(losses(copy)) == list(range(1, STEPS + 1))
    with CheckpointManager(copy / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [4, 8, 12]


def test_run_that_began_at_a_checkpoint_of_step_0_had_one(tmp_path: Path) -> None:
    """As a merged run does; a new start in the folder forgets what was before it."""
    folder, hardware = RunFolder.create(tmp_path / "run"), local_hardware()
    EventLog(folder.event_log).write("started", step=0, new=False)
    with pytest.raises(UserError, match="the run saved one at step 0"):
        read_previous_run(folder, hardware)
    EventLog(folder.event_log).write("started", step=0, new=True)
    assert read_previous_run(folder, hardware) is None


def test_from_scratch_resumes_where_a_checkpoint_is_intact(
    uninterrupted: Uninterrupted, copy: Path
) -> None:
    """So a requeued command may have it."""
    damage(copy / "checkpoints" / "5")
    experiment = make_experiment(uninterrupted.folder)
    train.fit(experiment, str(copy), from_scratch=True, quiet=True)
    assert losses(copy) == uninterrupted.losses
    assert [line["event"] for line in lines_of(copy / "logbook.jsonl")].count("resumed") == 1


def test_run_killed_in_its_first_save_starts_again(
    uninterrupted: Uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*given: object) -> None:
        raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(ManifestHandler, "finalize", die)
        with pytest.raises(CrashError):
            fit(make_experiment(uninterrupted.folder), tmp_path)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"4.orbax-checkpoint-tmp"}
    fit(make_experiment(uninterrupted.folder), tmp_path)
    assert losses(tmp_path) == uninterrupted.losses
    events = [line["event"] for line in lines_of(tmp_path / "logbook.jsonl")]
    assert events == ["started", "started", "saved", "finished"]


@pytest.mark.sampled("tpu")
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_auto_choices_are_pinned(uninterrupted: Uninterrupted, copy: Path, platform: str) -> None:
    name, path = "model.layer_pattern.0.mixer.backend", copy / "config.json"
    saved = json.loads(path.read_text())
    assert saved["chosen"][name].startswith("reference")
    saved["chosen"][name] = "blockwise (the fastest then)"
    saved["hardware"]["platform"] = platform
    path.write_text(json.dumps(saved))
    fit(make_experiment(uninterrupted.folder), copy)
    [resumed] = [x for x in lines_of(copy / "logbook.jsonl") if x["event"] == "resumed"]
    assert resumed["pinned"] == ({name: "blockwise"} if platform == "cpu" else {})
    # The blockwise backend drops other attention weights.
    assert (losses(copy) == uninterrupted.losses) == (platform == "tpu")


def test_choices_of_auto_hold_until_remat_changes(tmp_path: Path) -> None:
    """It decides the layer loop and the memory of attention."""
    experiment, hardware = make_experiment(tmp_path), local_hardware()
    previous = PreviousRun(experiment, None, (), {"model.layer_loop": "scan"})
    assert pin_previous_choices(experiment, None, hardware) == experiment
    assert pin_previous_choices(experiment, previous, hardware).model.layer_loop == "scan"
    model = dataclasses.replace(experiment.model, remat="full")
    changed = dataclasses.replace(experiment, model=model)
    unrolled = previous._replace(auto_choices={"model.layer_loop": "unroll"})
    assert pin_previous_choices(changed, unrolled, hardware) == changed
    damaged = previous._replace(auto_choices={"model.layer_pattern.0.mixer.backend": "swift"})
    with pytest.raises(UserError, match=r"config.json: chosen\..* swift: "):
        pin_previous_choices(experiment, damaged, hardware)
