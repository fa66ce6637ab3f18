"""Whether what is installed is what the project and JAX ask for, by their own metadata."""

import importlib.metadata as metadata
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

from train.doctor.finding import Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

PROJECT = "linen-transformer"
LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "chex", "grain", "tokenizers")
"""What is looked for where the project itself was not installed."""
PLUGINS = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
"""What lets JAX use TPUs and GPUs."""


def check_versions() -> Iterator[Finding]:
    """Python, the project's requirements, jaxlib, and the plugins that are here."""
    yield from check_project()
    if version := installed("jax"):
        yield from check_jax(version)


def check_project() -> Iterator[Finding]:
    """Against the metadata of the installed project, where it is installed."""
    from packaging.requirements import Requirement

    try:
        python = metadata.metadata(PROJECT)["Requires-Python"]
    except metadata.PackageNotFoundError:
        detail = "is not installed, so the ranges that it asks for are not known here"
        remedy = "pip install -e . in the project's folder"
        yield Finding(PROJECT, "warning", detail, remedy)
        python, wanted = "", [Requirement(name) for name in LIBRARIES]
    else:
        wanted = requirements(PROJECT)
    yield check_python(platform.python_version(), python)
    for requirement in wanted:
        yield check_package(requirement, installed(requirement.name))


def check_jax(version: str) -> Iterator[Finding]:
    """jaxlib and the plugins that are here against what this jax asks for."""
    for requirement in requirements("jax"):
        if requirement.name == "jaxlib":
            yield check_package(requirement, installed("jaxlib"))
    extras = {each.name: each for each in requirements("jax", extras=True)}
    for plugin in PLUGINS:
        if found := installed(plugin):
            yield check_plugin(plugin, found, extras.get(plugin), version)


def check_python(version: str, wanted: str) -> Finding:
    """Against `Requires-Python`, such as >=3.11."""
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding("python", "ok", _in_range(version, wanted))
    return Finding(
        "python", "problem", f"{version} is not {wanted}", f"use a Python that is {wanted}"
    )


def check_package(wanted: "Requirement", version: str | None) -> Finding:
    """Too old or missing is a problem; newer than what was tested may still do."""
    remedy = f'pip install "{wanted.name}{wanted.specifier}"'
    if version is None:
        return Finding(wanted.name, "problem", "is not installed", remedy)
    if wanted.specifier.contains(version, prereleases=True):
        return Finding(wanted.name, "ok", _in_range(version, str(wanted.specifier)))
    if _floor(wanted.specifier).contains(version, prereleases=True):
        detail = f"{version} is newer than what was tested ({wanted.specifier})"
        return Finding(wanted.name, "warning", detail, f"if something breaks: {remedy}")
    return Finding(wanted.name, "problem", f"{version} is not {wanted.specifier}", remedy)


def check_plugin(name: str, version: str, wanted: "Requirement | None", jax: str) -> Finding:
    """A plugin of another version than JAX's own is ignored by JAX, or fails as it starts."""
    if wanted is None or wanted.specifier.contains(version, prereleases=True):
        return Finding(name, "ok", f"{version}, for jax {jax}")
    extra = "tpu" if name == "libtpu" else name.split("-")[1]
    detail = f"{version} is not {wanted.specifier}, which jax {jax} asks for"
    return Finding(name, "warning", detail, f'pip install --upgrade "jax[{extra}]=={jax}"')


def plugins() -> tuple[str, ...]:
    """The accelerator plugins that are installed."""
    return tuple(name for name in PLUGINS if installed(name))


def installed(name: str) -> str | None:
    """The version of a package; None if it is not here."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements(package: str, *, extras: bool = False) -> "list[Requirement]":
    """What an installed package asks for here; with `extras`, what any extra asks for too."""
    from packaging.requirements import Requirement

    found = map(Requirement, metadata.requires(package) or ())
    return [each for each in found if extras or not each.marker or each.marker.evaluate()]


def _in_range(version: str, wanted: str) -> str:
    return f"{version} ({wanted})" if wanted else version


def _floor(specifier: "SpecifierSet") -> "SpecifierSet":
    """The specifier without its upper bounds."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(",".join(str(each) for each in specifier if each.operator[0] == ">"))
