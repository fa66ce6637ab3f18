"""Experiments by name: the files of `configs/`, or a Python file of the user, written here too."""

import importlib
import json
import pathlib
import re
from importlib import resources

from train.config.plugins import OWN_PACKAGES, import_file
from train.config.shipped import did_you_mean, shipped_configs
from train.errors import UsageError, as_user_error
from train.experiment import Experiment
from train.runtime.startup import program_name


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
            f"config {name}: {file} has no experiment {experiment}"
            f"{did_you_mean(experiment, experiments)}; choose one of {', '.join(experiments)}"
        )
    return experiments[experiment]


def list_experiments() -> list[str]:
    """Return the names of all shipped experiments, as `file:experiment`."""
    return [f"{each.name}:{name}" for each in shipped_configs() for name in each.experiments]


def _load_experiments(file: str) -> dict[str, Experiment]:
    if file.endswith(".py"):
        module = import_file(file, f"config {file}")
    else:
        known = [config.name for config in shipped_configs()]
        if file not in known:
            raise UsageError(
                f"config {file}: is not known{did_you_mean(file, known)}; choose one of "
                f"{', '.join(known)}, or give the path of a .py file"
            )
        module = importlib.import_module(f"configs.{file}")
    experiments = getattr(module, "EXPERIMENTS", None)
    if not isinstance(experiments, dict) or not experiments:
        raise UsageError(
            f"config {file}: defines no EXPERIMENTS; set it to a dict of experiments by name"
        )
    return experiments


TEMPLATE = "new_config.py.template"
"""File beside this module: the text of a config, in which `write_config` fills names."""

EXAMPLE_DATA = "python:library"
"""Text that ships with Python, so that a new config can be tried at once."""


def write_config(file: str, data: str = "") -> None:
    """Write a config file for a language model on text.

    Args:
      file: Path of a .py file that does not exist yet.
      data: File, folder or pattern of text; empty: `EXAMPLE_DATA`.

    Raises:
      UserError: The file exists, has another ending or the name of a package, or cannot be
        written.
    """
    path = pathlib.Path(file)
    if path.suffix != ".py":
        raise UsageError(f"init {file}: does not end with .py; give a name such as {path.stem}.py")
    if path.stem in OWN_PACKAGES:
        raise UsageError(
            f"init {file}: Python would import it in place of the package {path.stem}; "
            "give another name"
        )
    name = re.sub(r"\W+", "_", path.stem).strip("_") or "mine"
    source = data or EXAMPLE_DATA
    text = (resources.files(__package__) / TEMPLATE).read_text(encoding="utf-8")
    filled = text.format(
        docstring=f"{name}: a language model of my own.",
        file=file.replace("\\", "/").replace('"', "'"),
        program=program_name(),
        name=json.dumps(name),
        path=json.dumps(source, ensure_ascii=False),  # a string of Python too
        prompt=json.dumps("The " if data else "def "),
    )
    with as_user_error(file):
        try:
            with path.open("x", encoding="utf-8") as created:
                created.write(filled)
        except FileExistsError:
            raise UsageError(f"init {file}: exists already; give another name") from None
