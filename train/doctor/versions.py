"""Check installed versions against the requirements in the metadata of the project and of JAX."""

import importlib.metadata as metadata
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

from train.doctor.environment import Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet


PROJECT = "linen-transformer"


FALLBACK_REQUIREMENTS = ("jax", "flax", "optax", "orbax-checkpoint", "chex", "grain", "tokenizers")
"""Packages to look for if the project itself is not installed."""


PLUGINS = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
"""Packages through which JAX uses TPUs and GPUs."""


PREINSTALLED_MISMATCHES = {
    ("0.7.2", "libtpu", "0.0.21.1"): "Colab",
    ("0.7.2", "libtpu", "0.0.17"): "Kaggle",
}
"""Services that ship jax with a plugin version that it does not ask for (as of August 2026)."""


def check_versions() -> Iterator[Finding]:
    """Check Python, the project's requirements, jaxlib and the installed plugins."""
    yield from check_project()
    if version := installed_version("jax"):
        yield from check_jax(version)


def check_project() -> Iterator[Finding]:
    """Check the project's requirements, from its metadata if it is installed."""
    from packaging.requirements import Requirement

    try:
        python = metadata.metadata(PROJECT)["Requires-Python"]
    except metadata.PackageNotFoundError:
        detail = "is not installed, so its required versions are unknown"
        remedy = "pip install -e . in the project's folder"
        yield Finding(PROJECT, "warning", detail, remedy)
        python, required = "", [Requirement(name) for name in FALLBACK_REQUIREMENTS]
    else:
        required = requirements(PROJECT)
    yield check_python(platform.python_version(), python)
    for requirement in required:
        yield check_package(requirement, installed_version(requirement.name))


def check_jax(version: str) -> Iterator[Finding]:
    """Check jaxlib and the installed plugins against this version of jax."""
    for requirement in requirements("jax"):
        if requirement.name == "jaxlib":
            yield check_package(requirement, installed_version("jaxlib"))
    yield from check_plugins()


def check_plugins() -> Iterator[Finding]:
    """Check each installed accelerator plugin against the requirement of the installed jax."""
    version = installed_version("jax") or ""
    extras = {each.name: each for each in requirements("jax", extras=True)} if version else {}
    for plugin in PLUGINS:
        if installed := installed_version(plugin):
            yield check_plugin(plugin, installed, extras.get(plugin), version)


def check_python(version: str, specifier: str) -> Finding:
    """Check the Python version against `Requires-Python`, such as >=3.11."""
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(specifier).contains(version, prereleases=True):
        return Finding("python", "ok", _in_range(version, specifier))
    return Finding(
        "python", "problem", f"{version} is not {specifier}", f"use a Python that is {specifier}"
    )


def check_package(requirement: "Requirement", version: str | None) -> Finding:
    """Check a package: missing or too old is a problem, newer than tested a warning."""
    remedy = f'pip install "{requirement.name}{requirement.specifier}"'
    if version is None:
        return Finding(requirement.name, "problem", "is not installed", remedy)
    if requirement.specifier.contains(version, prereleases=True):
        return Finding(requirement.name, "ok", _in_range(version, str(requirement.specifier)))
    # Upper bounds mark what was tested. A newer version may work, so it is only a warning.
    if _floor(requirement.specifier).contains(version, prereleases=True):
        detail = f"{version} is newer than the tested versions ({requirement.specifier})"
        return Finding(requirement.name, "warning", detail, f"if something breaks: {remedy}")
    return Finding(requirement.name, "problem", f"{version} is not {requirement.specifier}", remedy)


def check_plugin(name: str, version: str, requirement: "Requirement | None", jax: str) -> Finding:
    """Check a plugin: JAX ignores plugins of another version, or fails when they start."""
    if requirement is None or requirement.specifier.contains(version, prereleases=True):
        return Finding(name, "ok", f"{version}, for jax {jax}")
    detail = f"{version} is not {requirement.specifier}, which jax {jax} requires"
    if runtime := PREINSTALLED_MISMATCHES.get((jax, name, version)):
        detail = f"{detail}, but {runtime} ships them together"
        remedy = (
            "leave it: training runs; attention kernels that do not compile are replaced, "
            "and plan needs --compile-best 0"
        )
        return Finding(name, "warning", detail, remedy)
    remedy = f'pip install --upgrade "jax[{_extra(name)}]=={jax}"'
    return Finding(name, "warning", detail, remedy)


def _extra(plugin: str) -> str:
    """Return the extra of jax that installs a plugin."""
    return "tpu" if plugin == "libtpu" else plugin.split("-")[1]


def plugin_remedy(plugin: str) -> str:
    """Return the command that installs a plugin matching the installed jax; empty if it matches."""
    version, jax = installed_version(plugin), installed_version("jax")
    requirement = {each.name: each for each in requirements("jax", extras=True)}.get(plugin)
    if (
        version is None
        or jax is None
        or requirement is None
        or requirement.specifier.contains(version)
    ):
        return ""
    return f'in an environment of its own: pip install "jax[{_extra(plugin)}]=={jax}"'


def installed_plugins() -> tuple[str, ...]:
    """Return the installed accelerator plugins."""
    return tuple(name for name in PLUGINS if installed_version(name))


def installed_version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements(package: str, *, extras: bool = False) -> "list[Requirement]":
    """Return the requirements of an installed package; with `extras`, those of its extras too."""
    from packaging.requirements import Requirement

    all_requirements = map(Requirement, metadata.requires(package) or ())
    return [
        each for each in all_requirements if extras or not each.marker or each.marker.evaluate()
    ]


def _in_range(version: str, requirement: str) -> str:
    return f"{version} ({requirement})" if requirement else version


def _floor(specifier: "SpecifierSet") -> "SpecifierSet":
    """Return the specifier without its upper bounds."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(",".join(str(each) for each in specifier if each.operator[0] == ">"))
