"""The report on Colab's package list; an installation keeps Colab's packages."""

import importlib.util
import pathlib
import shutil
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

    def __init__(self, folder: pathlib.Path) -> None:
        self.list = folder / "freeze.txt"
        self.constraints = folder / "constraints-colab.txt"
        self.pyproject = folder / "pyproject.toml"
        self.list.write_text(FREEZE)
        self.constraints.write_text(CONSTRAINED)
        self.pyproject.write_text(PROJECT)

    def replace(self, old: str, new: str) -> None:
        assert old in self.list.read_text()
        self.list.write_text(self.list.read_text().replace(old, new))

    def main(self, *flags: str) -> int:
        return main([str(self.list), *flags], self.constraints, self.pyproject)


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> Checkout:
    return Checkout(tmp_path)


def test_constraints_match_themselves(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copy(CONSTRAINTS, tmp_path / "list.txt")
    assert main([str(copy)]) == 0
    output = capsys.readouterr().out
    assert "differs:" not in output
    assert "not in this list:" not in output
    assert "PROBLEM" not in output


def test_constraints_are_within_the_dependency_ranges() -> None:
    constraints = read_packages(CONSTRAINTS)
    assert None not in constraints.values()
    report = compare(constraints, constraints, read_dependencies())
    assert report.problems == []
    assert len(report.added) <= MAX_ADDED


def test_every_line_format_is_parsed() -> None:
    assert parse_packages(FREEZE) == {
        "jax": Version("0.7.2"),
        "jaxlib": Version("0.7.2"),
        "ml-dtypes": Version("0.6.0"),
        "numpy": Version("2.1.3"),
        "toolz": Version("0.12.1"),
        "torch": Version("2.11.0"),
        "google-colab": None,
        "some-tool": None,
    }


def test_list_without_differences(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkout.main() == 0
    assert capsys.readouterr().out == (
        "would be installed by us: tyro\n"
        "accelerator: jax 0.7.2\n"
        "accelerator: jaxlib 0.7.2\n"
        "0 versions differ; 0 constrained packages are not in this list; an installation adds 1 "
        "direct dependencies (aim: at most 9); problems: 0\n"
    )


def test_different_version_is_not_a_problem(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.replace("numpy==2.1.3", "numpy==2.4.0rc1")
    assert checkout.main() == 0
    output = capsys.readouterr().out
    assert "differs: numpy 2.1.3 -> 2.4.0rc1\n" in output
    assert "--write rewrites these versions in constraints-colab.txt\n" in output
    assert checkout.constraints.read_text() == CONSTRAINED


def test_package_missing_from_the_list(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.replace("numpy==2.1.3\n", "")
    checkout.replace("toolz==0.12.1\n", "")
    assert checkout.main() == 0
    output = capsys.readouterr().out
    assert "not in this list: numpy\nnot in this list: toolz\n" in output
    assert "would be installed by us: numpy\nwould be installed by us: tyro\n" in output
    assert "an installation adds 2 direct" in output


def test_package_without_version_is_ignored(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.replace("numpy==2.1.3", "numpy @ git+https://example.org/numpy@0123abc")
    assert checkout.main() == 0
    output = capsys.readouterr().out
    assert "in this list without a version, not checked: numpy\n" in output
    assert "installed by us: numpy" not in output


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("numpy==2.1.3", "numpy==1.26.4", "numpy 1.26.4 is outside the range >=2.1"),
        ("ml_dtypes==0.6.0", "ml_dtypes==0.4.1", "ml-dtypes 0.4.1 is outside the range >=0.5"),
        ("jaxlib==0.7.2", "jaxlib==0.7.1", "jaxlib 0.7.1 does not belong to jax 0.7.2"),
        ("Jax==0.7.2\n", "", "jaxlib 0.7.2 does not belong to jax (not in the list)"),
        (
            "toolz",
            "jax-cuda13-plugin==0.7.1\ntoolz",
            "jax-cuda13-plugin 0.7.1 does not belong to jax 0.7.2",
        ),
    ],
    ids=["below_the_range", "normalized_name", "jaxlib", "no_jax", "cuda_plugin"],
)
def test_problem_is_reported_with_its_remedy(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], old: str, new: str, problem: str
) -> None:
    checkout.replace(old, new)
    assert checkout.main() == 1
    actual = [x for x in capsys.readouterr().out.splitlines() if x.startswith("PROBLEM: ")]
    assert len(actual) == 1
    assert actual[0].startswith(f"PROBLEM: {problem}")
    assert "; " in actual[0]


def test_libtpu_and_matching_plugins_are_shown(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.replace("toolz", "libtpu==0.0.21.1\njax-cuda12-plugin==0.7.2\ntoolz")
    assert checkout.main() == 0
    output = capsys.readouterr().out
    assert "accelerator: libtpu 0.0.21.1\n" in output
    assert "accelerator: jax-cuda12-plugin 0.7.2\n" in output


def test_write_changes_only_versions(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.replace("numpy==2.1.3", "numpy==2.4.0\nunrelated==1.0")
    checkout.replace("ml_dtypes==0.6.0", "ml_dtypes==0.7.0")
    checkout.replace("toolz==0.12.1\n", "")
    assert checkout.main("--write") == 0
    assert "wrote 2 versions into constraints-colab.txt; set the date" in capsys.readouterr().out
    expected = CONSTRAINED.replace("numpy==2.1.3", "numpy==2.4.0")
    expected = expected.replace("ml-dtypes==0.6.0", "ml-dtypes==0.7.0")
    assert checkout.constraints.read_text() == expected
    assert checkout.main("--write") == 0
    output = capsys.readouterr().out
    assert "differs:" not in output
    assert "wrote" not in output


@pytest.mark.parametrize("text", ["", "# only a comment\n\n", "<html><p>Not found</p></html>"])
def test_empty_list_raises(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    checkout.list.write_text(text)
    assert checkout.main("--write") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"error: {checkout.list}: holds no line of the form name==version; give a file with the "
        "output of `pip freeze`\n"
    )


def test_unreadable_list_raises(
    checkout: Checkout, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.list.unlink()
    assert checkout.main() == 2
    missing = capsys.readouterr().err
    assert missing.startswith(f"error: {checkout.list}: no such file; give a file")
    assert missing.count("\n") == 1
    checkout.list.mkdir()
    assert checkout.main() == 2
    assert "cannot be read (Is a directory); give a file" in capsys.readouterr().err


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
