"""Write and read the files that describe a run: its config, tokenizer and labels.

These files and one checkpoint make a run. Writing them needs no trainer and no evaluator, so that
an importer of weights can create a run too.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from train.config.io import experiment_from_dict, experiment_to_dict, experiment_to_text
from train.config.plugins import check_imports, import_installed_plugins, imports_of
from train.data.chat_template import end_tokens
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_settings import SETTINGS_FILES, settings_files
from train.errors import UserError
from train.experiment import Experiment
from train.run_folder.folder import RunFolder, read_json
from train.runtime.writing import set_aside_file, write_atomically
from train.tasks.vocabulary import Labels
from transformer.hardware import Hardware


def write_run_files(
    folder: RunFolder,
    experiment: Experiment,
    tokenizer: Tokenizer | None,
    labels: Labels,
    *,
    auto_choices: Mapping[str, str],
    hardware: Hardware,
) -> None:
    """Write `tokenizer.json`, its settings, `labels.json`, `config.txt` and `config.json`.

    `auto_choices` are the values and reasons of all `auto` settings on the hardware. A resumed run
    keeps them.

    Raises:
      UserError: A file cannot be written.
    """
    record: dict[str, object] = {
        "experiment": experiment_to_dict(experiment),
        "chosen": dict(auto_choices),
        "hardware": dataclasses.asdict(hardware),
    }
    if imports := imports_of(experiment):
        record["imports"] = imports
    auto_lines = "".join(f"# auto: {name} = {choice}\n" for name, choice in auto_choices.items())
    files: dict[str, str] = {}
    if tokenizer is not None:
        files[folder.tokenizer.name] = tokenizer.to_json()
        files |= settings_files(tokenizer.settings, end_tokens(tokenizer))
    if labels:
        files[folder.labels.name] = json.dumps(labels, ensure_ascii=False) + "\n"
    for name, text in files.items():
        write_atomically(folder.path / name, text)
    # An earlier run here, whose checkpoints are lost, may have had files that this one has not.
    for name in {*SETTINGS_FILES, folder.labels.name} - files.keys():
        set_aside_file(folder.path / name, "earlier")
    write_atomically(folder.config_text, experiment_to_text(experiment) + auto_lines)
    # config.json marks the folder as a run, so it is written last: a process that is killed
    # before this line leaves a folder that the next `fit` starts from scratch.
    write_atomically(folder.config_json, json.dumps(record, indent=1) + "\n")


def read_experiment(folder: RunFolder) -> Experiment:
    """Return the saved experiment of a run.

    Raises UserError if its file is damaged, or if it needs a module that is not imported.
    """
    import_installed_plugins()
    saved, source = _read_section(folder, "experiment"), str(folder.config_json)
    check_imports(read_json(folder.config_json).get("imports"), source)
    return experiment_from_dict(saved, source)


def read_auto_choices(folder: RunFolder, hardware: Hardware) -> dict[str, str]:
    """Return what each `auto` setting was in a run. Empty if it ran on another kind of hardware."""
    saved = _read_section(folder, "hardware")
    if (saved.get("platform"), saved.get("kind")) != (hardware.platform, hardware.kind):
        return {}
    choices = _read_section(folder, "chosen")
    return {name: choice for name, choice in choices.items() if isinstance(choice, str)}


def read_labels(folder: RunFolder) -> Labels:
    """Return the labels saved with a run; empty for a task without labels."""
    if not folder.labels.exists():
        return ()
    names = read_json(folder.labels)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{folder.labels}: is not a list of names; restore the original file")
    return tuple(names)


def read_tokenizer(folder: RunFolder, experiment: Experiment) -> Tokenizer | None:
    """Return the tokenizer saved with a run; None for data without text."""
    return None if experiment.data.tokenizer is None else Tokenizer.load(folder.tokenizer)


def _read_section(folder: RunFolder, section: str) -> dict[str, Any]:
    """Return a section of config.json. Raise UserError if it is missing."""
    config = read_json(folder.config_json)
    content = config.get(section) if isinstance(config, dict) else None
    if not isinstance(content, dict):
        raise UserError(f"{folder.config_json}: has no {section}; restore the original file")
    return content
