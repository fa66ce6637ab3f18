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


def test_unknown_names(tmp_path: Path) -> None:
    for name, words in (
        ("gpt9", r"config gpt9: is not known \(did you mean gpt[23]\?\); "),
        ("gpt2:huge", "config gpt2:huge: gpt2 has no experiment huge; choose"),
        ("gpt2:smal", r"no experiment smal \(did you mean small\?\)"),
        ("nothing", "config nothing: is not known; choose one of bert, "),
        ("", "config : is not known"),
        (str(tmp_path / "own.py"), "there is no such file; give the path"),
    ):
        with pytest.raises(UsageError, match=words):
            find_experiment(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("EXPERIMENTS = [", "SyntaxError"),
        ("import no_such_module", "no_such_module"),
        ("import train; train.nothing", "nothing"),
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
