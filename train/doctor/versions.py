"""Check installed versions against what the project and JAX ask for in their metadata."""

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
"""What is looked for where the project itself was not installed."""


PLUGINS = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
"""What lets JAX use TPUs and GPUs."""


PREINSTALLED_MISMATCHES = {
    ("0.7.2", "libtpu", "0.0.21.1"): "Colab",
    ("0.7.2", "libtpu", "0.0.17"): "Kaggle",
}
"""Where jax and a plugin that it does not ask for come together, as published in August 2026."""


def check_versions() -> Iterator[Finding]:
    """Python, the project's requirements, jaxlib, and the plugins that are here."""
    yield from check_project()
    if version := installed_version("jax"):
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
        python, wanted = "", [Requirement(name) for name in FALLBACK_REQUIREMENTS]
    else:
        wanted = requirements(PROJECT)
    yield check_python(platform.python_version(), python)
    for requirement in wanted:
        yield check_package(requirement, installed_version(requirement.name))


def check_jax(version: str) -> Iterator[Finding]:
    """jaxlib and the plugins that are here against what this jax asks for."""
    for requirement in requirements("jax"):
        if requirement.name == "jaxlib":
            yield check_package(requirement, installed_version("jaxlib"))
    yield from check_plugins()


def check_plugins() -> Iterator[Finding]:
    """Check each accelerator plugin that is installed against what the installed jax asks for."""
    version = installed_version("jax") or ""
    extras = {each.name: each for each in requirements("jax", extras=True)} if version else {}
    for plugin in PLUGINS:
        if found := installed_version(plugin):
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
    detail = f"{version} is not {wanted.specifier}, which jax {jax} asks for"
    if runtime := PREINSTALLED_MISMATCHES.get((jax, name, version)):
        detail = f"{detail}, but {runtime} has them so"
        remedy = (
            "leave it: training runs; attention kernels that cannot be compiled are replaced, "
            "and plan needs --compile-best 0"
        )
        return Finding(name, "warning", detail, remedy)
    remedy = f'pip install --upgrade "jax[{_extra(name)}]=={jax}"'
    return Finding(name, "warning", detail, remedy)


def _extra(plugin: str) -> str:
    """Return the extra of jax that installs a plugin."""
    return "tpu" if plugin == "libtpu" else plugin.split("-")[1]


def plugin_remedy(plugin: str) -> str:
    """Return the command that makes a plugin fit the installed jax; empty if it fits."""
    version, jax = installed_version(plugin), installed_version("jax")
    wanted = {each.name: each for each in requirements("jax", extras=True)}.get(plugin)
    if version is None or jax is None or wanted is None or wanted.specifier.contains(version):
        return ""
    return f'in an environment of its own: pip install "jax[{_extra(plugin)}]=={jax}"'


def installed_plugins() -> tuple[str, ...]:
    """The accelerator plugins that are installed."""
    return tuple(name for name in PLUGINS if installed_version(name))


def installed_version(name: str) -> str | None:
    """The version of a package; None if it is not here."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements(package: str, *, extras: bool = False) -> "list[Requirement]":
    """Return the requirements of an installed package; with `extras`, those of its extras too."""
    from packaging.requirements import Requirement

    found = map(Requirement, metadata.requires(package) or ())
    return [each for each in found if extras or not each.marker or each.marker.evaluate()]


def _in_range(version: str, wanted: str) -> str:
    return f"{version} ({wanted})" if wanted else version


def _floor(specifier: "SpecifierSet") -> "SpecifierSet":
    """The specifier without its upper bounds."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(",".join(str(each) for each in specifier if each.operator[0] == ">"))
