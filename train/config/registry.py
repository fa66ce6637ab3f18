"""Experiments by name: the files of `configs/`, or a Python file of the user."""

import importlib
import importlib.util
import pathlib
import pkgutil
import sys
from types import ModuleType

from train.data.files import expand_user
from train.errors import UsageError, UserError, as_user_error
from train.experiment import Experiment
from train.run_folder.regular_files import MAX_SETTINGS_BYTES, too_large_error


def find_experiment(name: str) -> Experiment:
    """Return the experiment of a name.

    A config file holds a dict `EXPERIMENTS` of experiments by name. It is executed as Python: load
    only files that you trust.

    Args:
      name: `gpt2` (the first experiment of a shipped file), `gpt2:medium`, or
        `path/to/file.py[:experiment]`.

    Raises:
      UsageError: there is no such config, or no such experiment in it.
    """
    file, _, experiment = name.partition(":")
    experiments = _load_experiments(file)
    if not experiment:
        return next(iter(experiments.values()))
    if experiment not in experiments:
        raise UsageError(
            f"config {name}: {file} has no experiment {experiment}; "
            f"choose one of {', '.join(experiments)}"
        )
    return experiments[experiment]


def list_experiments() -> list[str]:
    """Return the names of all shipped experiments, as `file:experiment`."""
    return [f"{file}:{name}" for file in _shipped_files() for name in _load_experiments(file)]


def _shipped_files() -> list[str]:
    # `configs` imports `train`: the only import against that direction, made when it is needed.
    import configs

    return sorted(module.name for module in pkgutil.iter_modules(configs.__path__))


def _load_experiments(file: str) -> dict[str, Experiment]:
    module = _import_path(file) if file.endswith(".py") else _import_shipped(file)
    experiments = getattr(module, "EXPERIMENTS", None)
    if not isinstance(experiments, dict) or not experiments:
        raise UsageError(
            f"config {file}: defines no EXPERIMENTS; set it to a dict of experiments by name"
        )
    return experiments


def _import_shipped(file: str) -> ModuleType:
    known = _shipped_files()
    if file not in known:
        raise UsageError(
            f"config {file}: is not known; choose one of {', '.join(known)}, "
            "or give the path of a .py file"
        )
    return importlib.import_module(f"configs.{file}")


def _config_file(file: str) -> pathlib.Path:
    path = expand_user(pathlib.Path(file))
    with as_user_error(f"config {file}"):
        if not path.is_file():  # Reading a FIFO would wait forever.
            raise UsageError(f"config {file}: there is no such file; give the path of a .py file")
        if (size := path.stat().st_size) > MAX_SETTINGS_BYTES:
            raise too_large_error(path, size, MAX_SETTINGS_BYTES)
    return path


def _import_path(file: str) -> ModuleType:
    path = _config_file(file)
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"config {file}: is no Python file; give the path of a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # A dataclass looks its module up here.
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise UsageError(f"config {file}: {problem}; mend the file, or see --debug") from error
    return module
