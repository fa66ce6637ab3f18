"""Compare a package list that Colab publishes with this project's tested versions.

    python -m tests.colab.runtime LIST [--write]

LIST is the output of `pip freeze`, as in github.com/googlecolab/backend-info. Exit status: 0 if
nothing needs doing (including versions that merely differ), 1 if there is a problem, 2 if LIST
cannot be read.
"""

import argparse
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidWheelFilename,
    NormalizedName,
    canonicalize_name,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

ROOT = pathlib.Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints-colab.txt"
PYPROJECT = ROOT / "pyproject.toml"

# jaxlib and the CUDA plugins are released with jax and have its version. libtpu has versions of its
# own, so it is only shown.
RELEASED_WITH_JAX = (
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
)
ACCELERATOR_PACKAGES = ("jax", "libtpu", *RELEASED_WITH_JAX)

MAX_ADDED = 9
"""Most direct dependencies that an installation on Colab should add."""

# Three forms of a requirement line. Group 1 is the name, group `rest` the version.
_NAME = r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:\[[^\]]*\])?"
_PINNED = re.compile(rf"\s*{_NAME}\s*===?\s*(?P<rest>[^\s;#]+)")
_DIRECT = re.compile(rf"\s*{_NAME}\s+@\s+(?P<rest>\S+)")
_EDITABLE = re.compile(rf"\s*-e\s+\S*[#&]egg={_NAME}(?P<rest>)")

Packages = dict[NormalizedName, Version | None]
"""Version of each package; None if the list has the package without a readable version."""


class ListError(Exception):
    """Error: the package list is unusable."""


class Difference(NamedTuple):
    """A package with another version in the list than in the constraints."""

    name: NormalizedName
    old: Version | None
    new: Version


class Report(NamedTuple):
    """Result of comparing a package list with the constraints and the dependencies."""

    differences: list[Difference]
    absent: list[NormalizedName]
    """Constrained packages that the list does not have."""
    unversioned: list[NormalizedName]
    """Packages of the constraints or the dependencies that the list has without a version."""
    added: list[NormalizedName]
    """Direct dependencies that the list does not have, so an installation adds them."""
    accelerators: dict[str, Version | None]
    problems: list[str]


def _public(version: str) -> Version | None:
    # A local part (2.9.0+cpu) names a build that the package index does not have, so it could be
    # neither compared with a constraint nor installed from one.
    try:
        return Version(Version(version).public)
    except InvalidVersion:
        return None


def _wheel_version(url: str) -> Version | None:
    filename = url.split("#")[0].split("?")[0].rsplit("/", 1)[-1].replace("%2B", "+")
    try:
        return _public(str(parse_wheel_filename(filename)[1]))
    except InvalidWheelFilename:  # a source archive or a repository
        return None


def parse_packages(text: str) -> Packages:
    """Return the packages of a list in the format of `pip freeze`; other lines are ignored."""
    packages: Packages = {}
    for line in text.splitlines():
        if found := _PINNED.match(line):
            version = _public(found["rest"])
        elif found := _DIRECT.match(line):
            version = _wheel_version(found["rest"])
        elif found := _EDITABLE.match(line):
            version = None
        else:
            continue
        packages[canonicalize_name(found[1])] = version
    return packages


def read_packages(path: pathlib.Path) -> Packages:
    """Return the packages of a file in the format of `pip freeze`."""
    remedy = "give a file with the output of `pip freeze`"
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except FileNotFoundError:
        raise ListError(f"{path}: no such file; {remedy}") from None
    except OSError as error:
        raise ListError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    packages = parse_packages(text)
    if not packages:
        raise ListError(f"{path}: holds no line of the form name==version; {remedy}")
    return packages


def read_dependencies(pyproject: pathlib.Path = PYPROJECT) -> dict[NormalizedName, Requirement]:
    """Return the runtime dependencies that a pyproject.toml declares, by normalized name."""
    declared = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    requirements = [Requirement(line) for line in declared]
    return {canonicalize_name(one.name): one for one in requirements}


def _range_problems(
    packages: Packages, dependencies: dict[NormalizedName, Requirement]
) -> Iterator[str]:
    for name, requirement in dependencies.items():
        version = packages.get(name)
        if version is None or requirement.specifier.contains(version, prereleases=True):
            continue
        yield (
            f"{name} {version} is outside the range {requirement.specifier} of pyproject.toml, so "
            "our installation would replace Colab's; widen the range once the tests pass with it"
        )


def _accelerator_problems(packages: Packages) -> Iterator[str]:
    jax = packages.get(canonicalize_name("jax"))
    for name in RELEASED_WITH_JAX:
        version = packages.get(canonicalize_name(name))
        if version is not None and version != jax:
            yield (
                f"{name} {version} does not belong to jax {jax or '(not in the list)'}; both need "
                "the same version, so look for a list of the runtime that is consistent"
            )


def compare(
    packages: Packages,
    constraints: Packages,
    dependencies: dict[NormalizedName, Requirement],
) -> Report:
    """Return what a package list changes for this project."""
    accelerators = {
        name: packages[canonicalize_name(name)]
        for name in ACCELERATOR_PACKAGES
        if canonicalize_name(name) in packages
    }
    return Report(
        differences=[
            Difference(name, old, new)
            for name, old in constraints.items()
            if (new := packages.get(name)) is not None and new != old
        ],
        absent=[name for name in constraints if name not in packages],
        unversioned=sorted(
            name
            for name in {*constraints, *dependencies}
            if name in packages and packages[name] is None
        ),
        added=[name for name in dependencies if name not in packages],
        accelerators=accelerators,
        problems=[*_range_problems(packages, dependencies), *_accelerator_problems(packages)],
    )


def format_report(report: Report) -> str:
    """Return the report as text, one line per finding."""
    lines = [f"differs: {name} {old} -> {new}" for name, old, new in report.differences]
    lines += [f"not in this list: {name}" for name in report.absent]
    lines += [f"in this list without a version, not checked: {name}" for name in report.unversioned]
    lines += [f"would be installed by us: {name}" for name in report.added]
    lines += [
        f"accelerator: {name} {version or 'without a version'}"
        for name, version in report.accelerators.items()
    ]
    lines += [f"PROBLEM: {problem}" for problem in report.problems]
    lines.append(
        f"{len(report.differences)} versions differ; {len(report.absent)} constrained packages are "
        f"not in this list; an installation adds {len(report.added)} direct dependencies (aim: at "
        f"most {MAX_ADDED}); problems: {len(report.problems)}"
    )
    return "\n".join(lines)


def update_constraints(path: pathlib.Path, differences: Sequence[Difference]) -> None:
    """Write the new versions into a constraints file; comments and all other lines stay."""
    new_versions = {one.name: str(one.new) for one in differences}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for index, line in enumerate(lines):
        result = _PINNED.match(line)
        if result and (new := new_versions.get(canonicalize_name(result[1]))):
            lines[index] = line[: result.start("rest")] + new + line[result.end("rest") :]
    path.write_text("".join(lines), encoding="utf-8")


def main(
    arguments: Sequence[str] | None = None,
    constraints: pathlib.Path = CONSTRAINTS,
    pyproject: pathlib.Path = PYPROJECT,
) -> int:
    """Print the report and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.colab.runtime",
        description=f"Report what a package list of Colab changes against {constraints.name}.",
    )
    parser.add_argument("list", type=pathlib.Path, metavar="LIST", help="output of `pip freeze`")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write the list's versions into {constraints.name}, of the packages already in it",
    )
    parsed = parser.parse_args(arguments)
    try:
        packages = read_packages(parsed.list)
        report = compare(packages, read_packages(constraints), read_dependencies(pyproject))
    except ListError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_report(report))
    if report.differences and parsed.write:
        update_constraints(constraints, report.differences)
        print(
            f"wrote {len(report.differences)} versions into {constraints.name}; set the date in "
            "its header and run `make test-colab`"
        )
    elif report.differences:
        print(f"--write rewrites these versions in {constraints.name}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
