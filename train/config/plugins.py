"""Import the user's own code: modules that register mixers, tasks, datasets, optimizers, schedules.

Three things import such a module: `--import NAME` on the command line, the environment variable
`LINEN_TRANSFORMER_IMPORT`, and an entry point of an installed package. A config file imports what
it likes, because it is Python itself.

A run records in `config.json` which modules its parts come from (`imports_of`). That record imports
nothing: the reader of the run has to name the modules too (`check_imports`), so that a folder from
somebody else never makes code run.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from train.errors import UsageError, UserError, as_user_error
from train.files import expand_user
from train.tasks.registry import TASKS
from train.tasks.task import TaskConfig
from transformer.attention.mixer import MIXERS, MixerConfig

ENTRY_POINT_GROUP = "linen_transformer.plugins"
"""Group of the entry points of installed packages; each names a module."""

IMPORT_VARIABLE = "LINEN_TRANSFORMER_IMPORT"
"""Environment variable with names as for `--import`, separated by commas."""

OWN_PACKAGES = ("train", "transformer", "configs")
"""Top-level packages of this project."""

_imported: dict[str, None] = {}
"""Names that the user gave, in order; files by their absolute path."""

_file_of_module: dict[str, str] = {}
"""Absolute path of each module that `import_file` made."""


def import_modules(names: Sequence[str], source: str) -> None:
    """Import modules by name, and `.py` files by path.

    A module that is not installed is looked for in the current folder, which is appended to
    `sys.path` for it, unless Python was told not to (`python -P`).

    Args:
      names: `mypackage.attention` or `path/to/attention.py`.
      source: What named them, for errors: `--import`.

    Raises:
      UsageError: a module is not found, or it raises an exception.
    """
    for name in names:
        if name.endswith(".py"):
            path = str(expand_user(pathlib.Path(name)).absolute())
            if path not in _file_of_module.values():
                import_file(path, f"{source} {name}")
            _imported[path] = None
            continue
        try:
            # Appended only if needed: an optional dependency of a library, which is not installed,
            # is not to be found in the current folder.
            if importlib.util.find_spec(name.partition(".")[0]) is None and not sys.flags.safe_path:
                append_to_path(pathlib.Path.cwd())
            importlib.import_module(name)
        except Exception as error:
            raise _import_error(f"{source} {name}", error) from error
        _imported[name] = None


@functools.cache
def import_installed_plugins() -> None:
    """Import what the environment variable and the entry points of installed packages name, once.

    Raises:
      UsageError: one of them cannot be imported.
    """
    names = [name.strip() for name in os.environ.get(IMPORT_VARIABLE, "").split(",")]
    import_modules([name for name in names if name], IMPORT_VARIABLE)
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            point.load()
        except Exception as error:
            package = point.dist.name if point.dist else point.value
            raise _import_error(f"plugin {point.name} of package {package}", error) from error


def import_file(file: str, name: str) -> ModuleType:
    """Execute a Python file as a module, and return it.

    It may import its neighbors: its folder is appended to `sys.path`, never put in front, so that
    no file in it takes the place of an installed package.

    Args:
      file: Its path.
      name: What names it, for errors: `config own.py`.

    Raises:
      UsageError: there is no such file, or it raises an exception.
    """
    path = expand_user(pathlib.Path(file))
    with as_user_error(name):
        exists = path.is_file()
    if not exists:
        raise UsageError(f"{name}: there is no such file; give the path of a .py file")
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path)
    assert spec
    assert spec.loader
    append_to_path(path.absolute().parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # A dataclass looks its module up here.
    _file_of_module[spec.name] = str(path.absolute())
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:
        raise _import_error(name, error) from error
    return module


def append_to_path(folder: pathlib.Path) -> None:
    """Let modules of a folder be imported, after all others."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_error(name: str, error: Exception) -> UsageError:
    """Return the error for a module that raised `error`."""
    missing = str(error.name or "") if isinstance(error, ImportError) else ""
    package = missing.partition(".")[0]
    if package in OWN_PACKAGES:
        remedy = f"{package} is linen-transformer's own package; rename one of yours of this name"
    elif isinstance(error, ModuleNotFoundError) and name.endswith(f" {missing}"):
        remedy = "install it, or start in the folder that holds it"
    else:
        remedy = "correct the file, or see --debug"
    return UsageError(f"{name}: {type(error).__name__}: {error}; {remedy}")


# ---- What a run records, and what its readers have to import ----


def imports_of(experiment: object) -> list[str]:
    """Return what to import before an experiment can be read: modules by name, files by path.

    These are the names that the user gave, and the modules of the experiment's own parts unless one
    of the names covers them. A class of a notebook has no module that could be named.
    """
    names = list(_imported)
    for module in _modules_of_parts(experiment):
        name = _importable_name(module)
        if name and name not in names and not any(module.startswith(f"{n}.") for n in names):
            names.append(name)
    return names


def _modules_of_parts(part: object) -> Iterator[str]:
    """Yield the modules that register the classes of an experiment, without those of ours."""
    if isinstance(part, tuple):
        for each in part:
            yield from _modules_of_parts(each)
    if not dataclasses.is_dataclass(part):
        return
    # A mixer and a task are registered where their classes are, not where their settings are.
    registered: Any = type(part)
    if isinstance(part, MixerConfig):
        registered = MIXERS[part.kind]
    elif isinstance(part, TaskConfig):
        registered = TASKS[type(part).__name__].make
    if registered.__module__.partition(".")[0] not in OWN_PACKAGES:
        yield registered.__module__
    for field in dataclasses.fields(part):
        yield from _modules_of_parts(getattr(part, field.name))


def _importable_name(module: str) -> str | None:
    """Return the name to import a module by: a path for a config file or a script."""
    if module in _file_of_module:
        return _file_of_module[module]
    if module != "__main__":
        return module
    script = getattr(sys.modules[module], "__file__", None)
    return str(pathlib.Path(script).absolute()) if script and script.endswith(".py") else None


def check_imports(recorded: object, source: str) -> None:
    """Raise UserError unless the modules that a run recorded are imported. It imports none of them.

    `recorded` is `imports` of the config.json at `source`; None if there are none.
    """
    if recorded is None:
        return
    if not isinstance(recorded, list) or not all(isinstance(each, str) for each in recorded):
        raise UserError(f"{source}: imports is not a list of modules; restore the original file")
    missing = [name for name in recorded if not _is_imported(name)]
    if missing:
        flags = " ".join(f"--import {name}" for name in missing)
        raise UsageError(
            f"{source}: the run needs Python code that is not part of this package; if you "
            f"trust that code, add {flags} (in Python, import it)"
        )


def _is_imported(name: str) -> bool:
    """Return True for an imported module, or for a file that was imported from anywhere.

    A run may be read on another machine, where its file has another path.
    """
    if name in sys.modules:
        return True
    loaded = [*_imported, *_file_of_module.values(), _importable_name("__main__") or ""]
    return _stem(name) in map(_stem, loaded)


def _stem(name: str) -> str:
    if name.endswith(".py"):
        return name.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    return name.rpartition(".")[2]
