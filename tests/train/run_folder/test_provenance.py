"""Files of another run in a run's folder: settings, tokenizer, labels, checkpoints, rollbacks."""

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest

import train
from tests.train.support import light_compiler as light_compiler
from tests.train.support import lines_of, tiny
from train.errors import UserError
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.resume import read_final_metrics
from train.rollback import Rollback, RollbackRecord
from train.run_folder.folder import RunFolder
from train.run_folder.provenance import PROVENANCE_KEY, check_provenance, explain_library_mismatch
from train.telemetry.event_log import EventLog


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Path]:
    folder = tmp_path_factory.mktemp("trained")
    experiment = tiny(
        folder,
        steps=4,
        checkpoint=CheckpointConfig(every=2, keep_last=9),
        evaluation=EvaluationConfig(every=0),
    )
    train.fit(experiment, str(folder / "run"), quiet=True)
    return experiment, folder / "run"


@pytest.fixture
def run(trained: tuple[Experiment, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained[1], tmp_path / "run"))


@pytest.mark.full
def test_consistent_run_loads(run: Path) -> None:
    assert train.load(str(run)).step == 4
    assert train.load(str(run), step=2).step == 2


@pytest.mark.full
def test_edited_setting_is_detected(run: Path) -> None:
    """The setting changes no shape: the weights would be restored and give other results."""
    config = run / "config.json"
    plain = json.loads(config.read_text())
    plain["experiment"]["model"]["layer_pattern"][0]["mixer"]["num_heads"] = 2
    config.write_text(json.dumps(plain))
    changed = r"config\.json: model\.layer_pattern\.0\.mixer\.num_heads is 2, and checkpoint 4 was"
    with pytest.raises(UserError, match=changed):
        train.load(str(run))


@pytest.mark.full
def test_other_tokenizer_is_detected(run: Path, trained: tuple[Experiment, Path]) -> None:
    file = run / "tokenizer.json"
    plain = json.loads(file.read_text())
    vocabulary = plain["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(plain))
    with pytest.raises(UserError, match=r"tokenizer\.json: is not the one that checkpoint 4 was"):
        train.load(str(run))
    with pytest.raises(UserError, match=r"tokenizer\.json: is not the one that checkpoint 4 was"):
        train.fit(trained[0], str(run), quiet=True)


@pytest.mark.full
def test_added_labels_are_detected(run: Path) -> None:
    (run / "labels.json").write_text('["good", "bad"]')
    with pytest.raises(UserError, match=r"labels\.json: is not the one that checkpoint 4 was"):
        train.load(str(run))


@pytest.mark.full
def test_renamed_checkpoint_is_skipped(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "2").rename(run / "checkpoints" / "50")
    assert train.load(str(run)).step == 4
    assert "checkpoint of step 50: is the checkpoint of step 2" in capfd.readouterr().err


@pytest.mark.full
def test_stale_rollback_record_is_ignored_by_a_new_run(
    run: Path, trained: tuple[Experiment, Path]
) -> None:
    """Otherwise, a resume would roll the new run back and change its learning rate."""
    shutil.rmtree(run / "checkpoints")
    stale = RollbackRecord(
        (Rollback(first=3, step=3, checkpoint=2, cursor=50, rate=0.5, attempts=1),)
    )
    stale.write(run / "recovery.json")
    train.fit(trained[0], str(run), from_scratch=True, quiet=True)
    assert not (run / "recovery.json").exists()
    assert RollbackRecord.read(run / "recovery.json.earlier") == stale
    assert not [line for line in lines_of(run / "logbook.jsonl") if line["event"] == "rolled back"]


@pytest.mark.full
def test_stale_finished_event_is_ignored_by_a_new_run(tmp_path: Path) -> None:
    """A run killed between its last save and its last evaluation has no metrics of its own yet."""
    folder = RunFolder.create(tmp_path)
    logbook = EventLog(folder.event_log)
    logbook.write("started", step=0)
    logbook.write("finished", step=4, loss=1.5)
    assert read_final_metrics(folder, 4) == {"loss": 1.5}
    for event in ("started", "resumed"):  # resumed: with other settings of the evaluation
        logbook.write(event, step=0)
        assert read_final_metrics(folder, 4) is None
        logbook.write("finished", step=4, loss=2.5)
    assert read_final_metrics(folder, 4) == {"loss": 2.5}


def test_python_version_is_named_as_the_reason() -> None:
    extra = {"run": {"python": "3.9.1"}}
    here = platform.python_version()
    assert explain_library_mismatch(extra, "python:library") == (
        f"it is the library of Python {here}, and was that of Python 3.9.1"
    )
    assert explain_library_mismatch(extra, "text.txt") == ""
    assert explain_library_mismatch({"run": {"python": here}}, "python:library") == ""


@pytest.mark.parametrize(
    ("part", "value"), [("settings", {"model.d_model": 8}), ("tokenizer", "b"), ("labels", "b")]
)
def test_every_part_of_the_record_is_compared(part: str, value: Any, tmp_path: Path) -> None:
    record = {"settings": {"model.d_model": 16}, "tokenizer": "a", "labels": "a"}
    folder = RunFolder(tmp_path)
    check_provenance({PROVENANCE_KEY: record}, 3, folder, record)
    with pytest.raises(UserError, match="checkpoint 3 was trained with"):
        check_provenance({PROVENANCE_KEY: record}, 3, folder, {**record, part: value})
