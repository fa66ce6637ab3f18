"""Write the files that describe a run: its config, tokenizer and labels.

These files and one checkpoint make a run. Writing them needs no trainer and no evaluator, so that
an importer of weights can create a run too.
"""

import dataclasses
import json
from collections.abc import Mapping

from train.config.io import experiment_to_dict, experiment_to_text
from train.config.plugins import imports_of
from train.data.chat_template import end_tokens
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_settings import SETTINGS_FILES, settings_files
from train.experiment import Experiment
from train.run_folder.folder import RunFolder
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

    Args:
      folder: Run folder, prepared by `RunFolder.create`.
      experiment: Resolved settings, including the vocabulary size.
      tokenizer: Tokenizer that the model's embedding rows belong to; None for data without text.
      labels: Class or tag names by index. No file is written if there are none.
      auto_choices: Value and reason of every `auto` setting. A resumed run keeps them.
      hardware: Hardware on which `auto_choices` were made.

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
