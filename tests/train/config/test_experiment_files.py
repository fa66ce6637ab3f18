from pathlib import Path

import pytest

from train.config.experiment_files import find_experiment, list_experiments
from train.errors import UsageError

OWN = """
import dataclasses
from train.experiment import Experiment

@dataclasses.dataclass(frozen=True)
class Size:
    steps: int

EXPERIMENTS = {
    "short": Experiment(name="short", steps=Size(3).steps),
    "long": Experiment(name="long", steps=Size(5).steps),
}
"""


def test_shipped_experiments_load() -> None:
    known = list_experiments()
    assert {"gpt2:small", "gpt2:xl", "quickstart:quickstart"} <= set(known)
    assert find_experiment("gpt2") == find_experiment("gpt2:small")
    assert find_experiment("gpt2:medium").name == "gpt2-medium"
    assert all(find_experiment(name) is not None for name in known)


def test_user_config_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    assert find_experiment(str(file)).name == "short"
    assert find_experiment(f"{file}:long").steps == 5
    with pytest.raises(UsageError, match="has no experiment wide; choose one of short, long"):
        find_experiment(f"{file}:wide")


def test_unknown_config() -> None:
    with pytest.raises(UsageError, match=r"config gpt9: is not known \(did you mean gpt[23]\?\); "):
        find_experiment("gpt9")
    with pytest.raises(UsageError, match="config gpt2:huge: gpt2 has no experiment huge; choose"):
        find_experiment("gpt2:huge")
    with pytest.raises(UsageError, match=r"no experiment smal \(did you mean small\?\)"):
        find_experiment("gpt2:smal")
    with pytest.raises(UsageError, match="config nothing: is not known; choose one of bert, "):
        find_experiment("nothing")
    with pytest.raises(UsageError, match="config : is not known"):
        find_experiment("")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("EXPERIMENTS = [", "SyntaxError"),
        ("import no_such_module", "no_such_module"),
        ("x = undefined", "undefined"),
        ("import train; train.nothing", "nothing"),
        ("1 / 0", "ZeroDivisionError"),
        ("x = 3", "defines no EXPERIMENTS"),
        ("EXPERIMENTS = {}", "defines no EXPERIMENTS"),
        (
            "from train.experiment import Experiment\nEXPERIMENTS = {'a': Experiment(steps=0)}",
            "steps 0: give 1 or more",
        ),
    ],
)
def test_file_without_experiments(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        find_experiment(str(file))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file; give the path"):
        find_experiment(str(tmp_path / "own.py"))
