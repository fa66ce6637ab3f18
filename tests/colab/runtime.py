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
from collections.abc import Iterator, Mapping, Sequence
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
JAX = canonicalize_name("jax")
RELEASED_WITH_JAX = [
    canonicalize_name(f"jax{name}")
    for name in ("lib", "-cuda12-plugin", "-cuda12-pjrt", "-cuda13-plugin", "-cuda13-pjrt")
]
ACCELERATOR_PACKAGES = [JAX, canonicalize_name("libtpu"), *RELEASED_WITH_JAX]

MAX_ADDED = 9
"""Most direct dependencies that an installation on Colab should add."""

# Three forms of a requirement line. Group 1 is the name, group `rest` the version.
_NAME = r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:\[[^\]]*\])?"
_PINNED = re.compile(rf"\s*{_NAME}\s*===?\s*(?P<rest>[^\s;#]+)")
_DIRECT = re.compile(rf"\s*{_NAME}\s+@\s+(?P<rest>\S+)")
_EDITABLE = re.compile(rf"\s*-e\s+\S*[#&]egg={_NAME}(?P<rest>)")

Packages = Mapping[NormalizedName, Version | None]
"""Version of each package by its normalized name; None if the list has it without a version."""


class Report(NamedTuple):
    """Result of comparing a package list with the constraints and the dependencies."""

    differences: dict[NormalizedName, Version]
    """Constrained packages that the list has in another version, with that."""
    absent: list[NormalizedName]
    """Constrained packages that the list does not have."""
    added: list[NormalizedName]
    """Direct dependencies that the list does not have, so an installation adds them."""
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


def parse_packages(text: str) -> dict[NormalizedName, Version | None]:
    """Return the packages of a list in the format of `pip freeze`; other lines are ignored."""
    packages: dict[NormalizedName, Version | None] = {}
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


def read_packages(path: pathlib.Path) -> dict[NormalizedName, Version | None]:
    """Return the packages of a file in the format of `pip freeze`."""
    return parse_packages(path.read_text(encoding="utf-8-sig", errors="replace"))


def read_dependencies(pyproject: pathlib.Path = PYPROJECT) -> dict[NormalizedName, Requirement]:
    """Return the runtime dependencies that a pyproject.toml declares, by normalized name."""
    declared = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    requirements = [Requirement(line) for line in declared]
    return {canonicalize_name(one.name): one for one in requirements}


def _problems(
    packages: Packages, dependencies: Mapping[NormalizedName, Requirement]
) -> Iterator[str]:
    for name, requirement in dependencies.items():
        version = packages.get(name)
        if version and not requirement.specifier.contains(version, prereleases=True):
            yield (
                f"{name} {version} is outside the range {requirement.specifier} of pyproject.toml, "
                "so our installation would replace Colab's; widen the range once the tests pass "
                "with it"
            )
    jax = packages.get(JAX)
    for name in RELEASED_WITH_JAX:
        version = packages.get(name)
        if version and version != jax:
            yield (
                f"{name} {version} does not belong to jax {jax or '(not in the list)'}; both need "
                "the same version, so look for a list of the runtime that is consistent"
            )


def compare(
    packages: Packages, constraints: Packages, dependencies: Mapping[NormalizedName, Requirement]
) -> Report:
    """Return what a package list changes for this project."""
    return Report(
        differences={
            name: new
            for name, old in constraints.items()
            if (new := packages.get(name)) and new != old
        },
        absent=[name for name in constraints if name not in packages],
        added=[name for name in dependencies if name not in packages],
        problems=list(_problems(packages, dependencies)),
    )


def report_lines(report: Report, packages: Packages, constraints: Packages) -> Iterator[str]:
    """Yield the report as text, one line per finding."""
    for name, version in report.differences.items():
        yield f"differs: {name} {constraints[name]} -> {version}"
    for name in report.absent:
        yield f"not in this list: {name}"
    for name in constraints:
        if name in packages and packages[name] is None:
            yield f"in this list without a version, not checked: {name}"
    for name in report.added:
        yield f"would be installed by us: {name}"
    for name in ACCELERATOR_PACKAGES:
        if name in packages:
            yield f"accelerator: {name} {packages[name] or 'without a version'}"
    for problem in report.problems:
        yield f"PROBLEM: {problem}"
    added = f"an installation adds {len(report.added)} direct dependencies (aim: {MAX_ADDED})"
    yield f"{len(report.differences)} versions differ; {added}; problems: {len(report.problems)}"


def update_constraints(path: pathlib.Path, versions: Mapping[NormalizedName, Version]) -> None:
    """Write the new versions into a constraints file; comments and all other lines stay."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for index, line in enumerate(lines):
        result = _PINNED.match(line)
        if result and (new := versions.get(canonicalize_name(result[1]))):
            lines[index] = f"{line[: result.start('rest')]}{new}{line[result.end('rest') :]}"
    path.write_text("".join(lines), encoding="utf-8")


def main(
    arguments: Sequence[str] | None = None,
    constraints_path: pathlib.Path = CONSTRAINTS,
    pyproject: pathlib.Path = PYPROJECT,
) -> int:
    """Print the report and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.colab.runtime", description=__doc__)
    parser.add_argument("list", type=pathlib.Path, metavar="LIST", help="output of `pip freeze`")
    parser.add_argument(
        "--write", action="store_true", help=f"write the new versions into {constraints_path.name}"
    )
    parsed = parser.parse_args(arguments)
    try:
        packages = read_packages(parsed.list)
    except OSError as error:
        parser.error(str(error))
    if not packages:
        parser.error(f"{parsed.list}: holds no line of the form name==version")
    constraints = read_packages(constraints_path)
    report = compare(packages, constraints, read_dependencies(pyproject))
    print("\n".join(report_lines(report, packages, constraints)))
    if report.differences and parsed.write:
        update_constraints(constraints_path, report.differences)
        print(f"wrote {constraints_path.name}; set the date on top and run `make test-colab`")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
