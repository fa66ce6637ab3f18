"""User code: imported by name, recorded with a run, and never imported because of a run folder."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.support import command, lines_of, write_config
from tests.train.support import light_compiler as light_compiler
from train.config import plugins
from train.config.experiment_files import find_experiment
from train.config.io import classes_by_kind, experiment_from_dict, experiment_to_dict
from train.config.plugins import check_imports, import_installed_plugins, import_modules, imports_of
from train.errors import UsageError, UserError
from train.experiment import Experiment
from train.optim.optimizer_registry import OPTIMIZERS
from train.optim.schedules import SCHEDULES, LearningRateSchedule, ScheduleConfig
from train.tasks.registry import DATASETS, TASKS
from transformer.attention.mixer import MIXERS

Capture = pytest.CaptureFixture[str]

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"

(EXAMPLE,) = re.findall(r"```python\n(# mypackage/parts\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
"""The optimizer, the schedule and the dataset of the page, as they stand there."""

PARTS = f"""{EXAMPLE}

import pathlib

(pathlib.Path(__file__).parent / "imported").touch()
"""

FLAGS = ("--optimizer.kind", "sign_descent", "--optimizer.gain", "0.5")
RATES = ("--schedule.kind", "sawtooth", "--schedule.period", "2")
DATA = (
    *("--data.kind", "Sums", "--data.largest", "9", "--data.sequence-length", "16"),
    *("--data.tokenizer.kind", "character", "--data.cache-dir", "cache"),
)


def forget() -> None:
    """Undo the import of `mypackage` in this process."""
    for registry in (OPTIMIZERS, SCHEDULES, DATASETS, TASKS, MIXERS):
        for kind in ("sign_descent", "sawtooth", "Sums"):
            if kind in registry:
                del registry[kind]
    for name in [each for each in sys.modules if each.partition(".")[0] == "mypackage"]:
        del sys.modules[name]
    plugins._imported.clear()
    plugins._file_of_module.clear()
    import_installed_plugins.cache_clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a package in the current folder, which is not on `sys.path`."""
    folder = tmp_path / "project"
    (folder / "mypackage").mkdir(parents=True)
    (folder / "mypackage" / "__init__.py").touch()
    (folder / "mypackage" / "parts.py").write_text(PARTS)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv(plugins.IMPORT_VARIABLE, raising=False)
    forget()
    yield folder
    forget()


@pytest.fixture
def marker(package: Path) -> Path:
    """Return a file that exists once the module has been imported."""
    return package / "mypackage" / "imported"


def install(folder: Path, entries: str) -> Path:
    """Install a package with these entry points; return the folder with its metadata."""
    information = folder / "mypackage-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(entries)
    return information


@pytest.mark.full
def test_run_with_user_defined_parts(
    package: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    workdir = str(package / "run")
    model = "TransformerConfig(d_model=16, num_layers=1)"  # any length: no table of positions
    config = write_config(package, steps="5", model=model)
    fit = ("fit", config, "--workdir", workdir, "--quiet", *FLAGS, *RATES, *DATA)
    result = command(capsys, *fit)
    assert (result.status, ".kind" in result.error) == (2, True)
    result = command(capsys, *fit, "--import", "mypackage.parts")
    assert (result.status, result.error) == (0, "")

    # The run's folder records the module and the settings.
    saved = json.loads((package / "run" / "config.json").read_text())
    assert saved["imports"] == ["mypackage.parts"]
    assert saved["experiment"]["optimizer"] == {
        "kind": "sign_descent",
        "max_grad_norm": 1.0,
        "gain": 0.5,
    }
    assert saved["experiment"]["schedule"] == {"kind": "sawtooth", "peak": 0.01, "period": 2}
    data = saved["experiment"]["data"]
    assert (data["kind"], data["largest"], data["path"]) == ("Sums", 9, "")
    tokenizer = json.loads((package / "run" / "tokenizer.json").read_text())
    assert set(tokenizer["model"]["vocab"]) == {*"0123456789 +="}
    rates = [line["learning_rate"] for line in lines_of(package / "run" / "metrics.jsonl")[:4]]
    assert rates == pytest.approx([0.005, 0.01, 0.005, 0.01])

    # The folder by itself runs no code.
    def evaluate(*more: str) -> tuple[int, str]:
        forget()
        marker.unlink(missing_ok=True)
        result = command(capsys, "evaluate", workdir, *more)
        return result.status, result.error

    status, error = evaluate()
    assert status == 2
    assert "not part of this package; if you trust that code, add --import mypackage.parts" in error
    assert error.count("\n") == 1
    assert not marker.exists()
    assert "mypackage.parts" not in sys.modules
    resumed = command(capsys, "fit", config, "--workdir", workdir)
    assert (resumed.status, resumed.error) == (2, error)

    # The module can be named by the command line, the environment or an installed package.
    assert evaluate("--import=mypackage.parts") == (0, "")
    with monkeypatch.context() as patch:
        patch.setenv(plugins.IMPORT_VARIABLE, "mypackage, mypackage.parts")
        assert evaluate() == (0, "")
    entries = f"[{plugins.ENTRY_POINT_GROUP}]\nparts = mypackage.parts\n"
    information = install(package, entries)
    assert evaluate() == (0, "")
    resumed = command(capsys, *fit, "--steps", "7")
    assert (resumed.status, resumed.error) == (0, "")
    assert [x["step"] for x in lines_of(package / "run" / "metrics.jsonl")][-2:] == [7, 7]
    forget()
    (package / "mypackage" / "parts.py").write_text(PARTS.replace("a + b}", "a + b + 1}"))
    others = command(capsys, *fit, "--steps", "8")
    assert (others.status, "is not the text that" in others.error) == (1, True)
    forget()
    (information / "entry_points.txt").write_text(entries.replace("parts\n", "nothing\n"))
    status, error = evaluate()
    assert status == 2
    assert error.startswith("error: plugin parts of package mypackage: ModuleNotFoundError: ")


def test_settings_survive_a_round_trip(package: Path) -> None:
    import_modules(["mypackage.parts"], "--import")
    experiment = Experiment(
        optimizer=OPTIMIZERS["sign_descent"](gain=2.0),  # type: ignore[call-arg]
        schedule=SCHEDULES["sawtooth"](period=9),  # type: ignore[call-arg]
        data=DATASETS["Sums"](largest=7),  # type: ignore[call-arg]
    )
    assert experiment_from_dict(experiment_to_dict(experiment), "here") == experiment
    assert imports_of(experiment) == ["mypackage.parts"]
    assert imports_of(Experiment()) == ["mypackage.parts"]  # as the user named it
    plugins._imported.clear()
    assert imports_of(experiment) == ["mypackage.parts"]
    assert imports_of(Experiment()) == []
    plugins._imported["mypackage"] = None  # covers its modules
    assert imports_of(experiment) == ["mypackage"]


def test_shipped_schedules_keep_their_form(package: Path) -> None:
    plain = experiment_to_dict(Experiment())
    assert list(plain["schedule"])[:2] == ["kind", "learning_rate"]
    assert set(classes_by_kind(LearningRateSchedule).values()) == {ScheduleConfig}
    import_modules(["mypackage.parts"], "--import")
    assert set(classes_by_kind(LearningRateSchedule)) == set(SCHEDULES)
    assert experiment_to_dict(Experiment()) == plain
    assert experiment_from_dict(plain, "here") == Experiment()


def test_a_schedule_is_chosen_by_flags(package: Path, capsys: Capture) -> None:
    config = write_config(package, schedule="ScheduleConfig('linear', 0.5)")
    describe = ("describe", config, "--import", "mypackage.parts", "--model.vocab-size", "30")
    for flags in (RATES, ("--schedule.kind", "cosine", "--schedule.warmup-steps=3")):
        assert command(capsys, *describe, *flags).error == ""
    refused = command(capsys, *describe, "--schedule.warmup-steps", "3", *RATES)
    assert (refused.status, "--schedule.warmup-steps" in refused.error) == (2, True)
    result = command(capsys, *describe, "--schedule.kind", "square")
    assert result.status == 2
    assert all(each in result.error for each in ("--schedule.kind", "'square'", "'cosine'"))


def test_a_config_file_imports_its_neighbors(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(package.parent)
    (package / "json.py").write_text("raise AssertionError('it hides the library')")
    config = package / "own.py"
    config.write_text(
        "import json\nfrom mypackage.parts import SignDescent\n"
        "from train.experiment import Experiment\n"
        "EXPERIMENTS = {'own': Experiment(optimizer=SignDescent())}\n"
    )
    experiment = find_experiment(str(config))
    assert sys.path[-1] == str(package)
    assert sys.path.count(str(package)) == 1
    assert imports_of(experiment) == ["mypackage.parts"]


def test_the_current_folder_is_searched_last(package: Path) -> None:
    """And only for a module that is not installed."""
    (package / "json.py").write_text("raise AssertionError('it hides the library')")
    import_modules(["json.tool"], "--import")
    assert str(package) not in sys.path
    import_modules(["mypackage.parts"], "--import")
    assert sys.path[-1] == str(package)


def test_a_file_is_imported_by_its_path(package: Path) -> None:
    file = package / "mypackage" / "parts.py"
    import_modules(["mypackage/parts.py"], "--import")
    config = package / "own.py"
    config.write_text(PARTS + "\nfrom train.experiment import Experiment\n")
    experiment = Experiment(optimizer=OPTIMIZERS["sign_descent"]())
    assert imports_of(experiment) == [str(file)]
    check_imports([str(file), "/elsewhere/parts.py", "mypackage.parts"], "here")
    with pytest.raises(UsageError, match=r"add --import /elsewhere/other\.py \(in Python"):
        check_imports([str(file), "/elsewhere/other.py"], "here")


def test_parts_of_a_config_file_are_recorded_by_its_path(package: Path) -> None:
    config = package / "own.py"
    config.write_text(
        PARTS + "\nfrom train.experiment import Experiment\n"
        "EXPERIMENTS = {'own': Experiment(optimizer=SignDescent())}\n"
    )
    for _ in range(2):  # executing it again registers the same classes again
        assert imports_of(find_experiment(str(config))) == [str(config)]
    import_modules([str(config)], "--import")
    with pytest.raises(UsageError, match="sign_descent: is the kind of experiment_own"):
        import_modules(["mypackage.parts"], "--import")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such", "no_such: ModuleNotFoundError: .*; install it, or start in the folder"),
        ("mypackage.broken", "mypackage.broken: ZeroDivisionError: .*; correct the file, or"),
        ("mypackage.hidden", "configs is linen-transformer's own package; rename one of yours"),
        ("no/such.py", "no/such.py: there is no such file; give the path of a .py file"),
        ("a-b", "No module named .a-b.; install it"),
    ],
)
def test_what_cannot_be_imported(package: Path, name: str, words: str) -> None:
    (package / "mypackage" / "broken.py").write_text("1 / 0")
    (package / "mypackage" / "hidden.py").write_text("import configs.of_mine")
    with pytest.raises(UsageError, match=words):
        import_modules([name], "--import")
    assert not plugins._imported


@pytest.mark.parametrize("flags", [("--import",), ("--import", "--steps", "3"), ("--import=",)])
def test_a_flag_without_a_module(capsys: Capture, flags: tuple[str, ...]) -> None:
    result = command(capsys, "describe", "quickstart", *flags)
    assert result.status == 2
    assert result.error.startswith("error: --import: names no module")


def test_a_damaged_record_is_refused() -> None:
    check_imports(None, "here")
    for recorded in ("mypackage", [3], {"a": 1}):
        with pytest.raises(UserError, match="here: imports is not a list of modules"):
            check_imports(recorded, "here")


def test_verbs_without_experiments_take_no_modules(capsys: Capture) -> None:
    assert command(capsys, "doctor", "--import", "json").status == 2
