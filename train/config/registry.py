"""Experiments by name: the files of `configs/`, or a file of the user's own."""

import importlib
import importlib.util
import pathlib
import pkgutil
import sys
from types import ModuleType

from train.data.files import as_user_error, expand_user
from train.errors import UsageError, UserError
from train.experiment import Experiment
from train.run_folder.regular_files import MAX_SETTINGS_BYTES, too_large_error


def find_experiment(name: str) -> Experiment:
    """`gpt2`, `gpt2:medium`, or `path/to/file.py[:experiment]` -> the experiment.

    A file runs as Python: give only files that you trust. It holds `EXPERIMENTS`, experiments by
    name; the first is the one meant when none is named.

    Raises:
      UsageError: there is no such config or no such experiment in it.
    """
    file, _, chosen = name.partition(":")
    experiments = _experiments(file)
    if not chosen:
        return next(iter(experiments.values()))
    if chosen not in experiments:
        raise UsageError(
            f"config {name}: {file} has no experiment {chosen}; "
            f"choose one of {', '.join(experiments)}"
        )
    return experiments[chosen]


def list_experiments() -> list[str]:
    """Every experiment that is shipped, as `file:experiment`."""
    import configs

    files = sorted(module.name for module in pkgutil.iter_modules(configs.__path__))
    return [f"{file}:{name}" for file in files for name in _experiments(file)]


def _experiments(file: str) -> dict[str, Experiment]:
    module = _from_path(file) if file.endswith(".py") else _shipped(file)
    experiments = getattr(module, "EXPERIMENTS", None)
    if not isinstance(experiments, dict) or not experiments:
        raise UsageError(
            f"config {file}: defines no EXPERIMENTS; set it to a dict of experiments by name"
        )
    return experiments


def _shipped(file: str) -> ModuleType:
    import configs

    known = sorted(module.name for module in pkgutil.iter_modules(configs.__path__))
    if file not in known:
        raise UsageError(
            f"config {file}: is not known; choose one of {', '.join(known)}, "
            "or give the path of a .py file"
        )
    return importlib.import_module(f"configs.{file}")


def _config_file(file: str) -> pathlib.Path:
    path = expand_user(pathlib.Path(file))
    with as_user_error(f"config {file}"):
        if not path.is_file():  # nor is a FIFO, which Python would wait for
            raise UsageError(f"config {file}: there is no such file; give the path of a .py file")
        if (size := path.stat().st_size) > MAX_SETTINGS_BYTES:
            raise too_large_error(path, size, MAX_SETTINGS_BYTES)
    return path


def _from_path(file: str) -> ModuleType:
    path = _config_file(file)
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"config {file}: is no Python file; give the path of a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass of the file looks its module up
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise UsageError(f"config {file}: {problem}; mend the file, or see --debug") from error
    return module
