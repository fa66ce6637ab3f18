"""The report on Colab's package list; an installation keeps Colab's packages."""

import importlib.util
import pathlib
from importlib import metadata

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.colab.runtime import (
    CONSTRAINTS,
    MAX_ADDED,
    compare,
    main,
    parse_packages,
    read_dependencies,
    read_packages,
)

FREEZE = """# pip freeze
Jax==0.7.2
jaxlib==0.7.2
ml_dtypes==0.6.0
numpy==2.1.3
toolz==0.12.1
torch @ https://example.org/cpu/torch-2.11.0%2Bcpu-cp313-cp313-manylinux_2_28_x86_64.whl#sha256=00
google-colab @ file:///colabtools/dist/google_colab-1.0.0.tar.gz
-e git+https://example.org/tool@0123abc#egg=some_tool
-e /content/project
"""

CONSTRAINED = """# The header, of 1 January.

jax==0.7.2
jaxlib==0.7.2
ml-dtypes==0.6.0
numpy==2.1.3  # a comment
toolz==0.12.1
"""

PROJECT = """[project]
dependencies = ["jax>=0.7.2,<0.13", "Ml_Dtypes[extra]>=0.5", "numpy>=2.1", "tyro>=1.0"]
"""


class Checkout:
    """A package list, a constraints file and a pyproject.toml in a folder."""

    def __init__(self, folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.list = folder / "freeze.txt"
        self.constraints = folder / "constraints-colab.txt"
        self.pyproject = folder / "pyproject.toml"
        self.constraints.write_text(CONSTRAINED)
        self.pyproject.write_text(PROJECT)
        self.capsys = capsys

    def report(self, *flags: str, **changes: str) -> tuple[int, list[str]]:
        """Return the status and the lines of the report on FREEZE with other lines."""
        text = FREEZE
        for name, line in changes.items():
            [old] = [each for each in FREEZE.splitlines() if each.lower().startswith(f"{name}==")]
            text = text.replace(old, line)
        self.list.write_text(text)
        status = main([str(self.list), *flags], self.constraints, self.pyproject)
        return status, self.capsys.readouterr().out.splitlines()


@pytest.fixture
def checkout(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Checkout:
    return Checkout(tmp_path, capsys)


def test_constraints_are_within_the_dependency_ranges() -> None:
    constraints = read_packages(CONSTRAINTS)
    assert None not in constraints.values()
    report = compare(constraints, constraints, read_dependencies())
    assert (report.differences, report.absent, report.problems) == ({}, [], [])
    assert len(report.added) <= MAX_ADDED


def test_every_line_format_is_parsed() -> None:
    versions = {"jax": "0.7.2", "jaxlib": "0.7.2", "ml-dtypes": "0.6.0", "numpy": "2.1.3"}
    versions |= {"toolz": "0.12.1", "torch": "2.11.0"}
    parsed = {name: Version(version) for name, version in versions.items()}
    assert parse_packages(FREEZE) == parsed | {"google-colab": None, "some-tool": None}


def test_differences_and_absent_packages_are_no_problems(checkout: Checkout) -> None:
    accelerators = ["accelerator: jax 0.7.2", "accelerator: jaxlib 0.7.2"]
    status, lines = checkout.report()
    assert (status, lines[:-1]) == (0, ["would be installed by us: tyro", *accelerators])
    git = "numpy @ git+https://example.org/numpy@0123abc"
    status, lines = checkout.report(ml_dtypes="ml_dtypes==0.7.0rc1", toolz="", numpy=git)
    assert (status, lines[:-1]) == (
        0,
        [
            "differs: ml-dtypes 0.6.0 -> 0.7.0rc1",
            "not in this list: toolz",
            "in this list without a version, not checked: numpy",
            "would be installed by us: tyro",
            *accelerators,
        ],
    )
    assert checkout.constraints.read_text() == CONSTRAINED


@pytest.mark.parametrize(
    ("name", "line", "problem"),
    [
        ("numpy", "numpy==1.26.4", "numpy 1.26.4 is outside the range >=2.1"),
        ("ml_dtypes", "ml_dtypes==0.4.1", "ml-dtypes 0.4.1 is outside the range >=0.5"),
        ("jax", "", "jaxlib 0.7.2 does not belong to jax (not in the list)"),
        ("toolz", "jax-cuda13-plugin==0.7.1", "jax-cuda13-plugin 0.7.1 does not belong to jax 0"),
    ],
)
def test_problem_is_reported(checkout: Checkout, name: str, line: str, problem: str) -> None:
    status, lines = checkout.report(**{name: line})
    [found] = [each for each in lines if each.startswith("PROBLEM: ")]
    assert status == 1
    assert found.startswith(f"PROBLEM: {problem}")


def test_write_changes_only_versions(checkout: Checkout) -> None:
    changes = {"numpy": "numpy==2.4.0\nunrelated==1.0", "ml_dtypes": "ml_dtypes==0.7.0"}
    assert checkout.report("--write", toolz="", **changes)[0] == 0
    expected = CONSTRAINED.replace("numpy==2.1.3", "numpy==2.4.0")
    expected = expected.replace("ml-dtypes==0.6.0", "ml-dtypes==0.7.0")
    assert checkout.constraints.read_text() == expected
    _, lines = checkout.report("--write", **changes)
    assert not [each for each in lines if each.startswith(("differs", "wrote"))]


@pytest.mark.parametrize("name", ["empty", "missing", "."])
def test_unusable_list_is_an_error(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / "empty").write_text("<html><p>Not found</p></html>")
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / name)])
    assert stop.value.code == 2


def test_installation_keeps_colabs_packages() -> None:
    constraints = read_packages(CONSTRAINTS)
    if Version(metadata.version("jax")) != constraints[canonicalize_name("jax")]:
        pytest.skip("this environment has another jax than Colab")
    if importlib.util.find_spec("libtpu"):
        pytest.skip("Colab's TPU runtime has other versions of some pure Python packages")
    installed = {}
    for name in constraints:
        try:
            installed[name] = Version(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    assert installed == {name: constraints[name] for name in installed}
