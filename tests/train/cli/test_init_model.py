"""--init-model: what a run takes from the run that it starts from."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from train.cli.config_verbs import FitArguments, parse_config_verb
from train.config.experiment_files import find_experiment
from train.errors import UsageError
from train.run_folder.folder import RunFolder
from train.tasks.translation import Translation


def test_model_and_first_token_of_the_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multi30k = find_experiment("multi30k")
    model = dataclasses.replace(multi30k.model, d_model=64, vocab_size=77)
    source = dataclasses.replace(multi30k, model=model, task=Translation(start_token="<pad>"))
    folders = []

    def open_existing(folder: str, setting: str) -> Any:
        folders.append((folder, setting))
        return folder

    monkeypatch.setattr(RunFolder, "open_existing", staticmethod(open_existing))
    monkeypatch.setattr("train.cli.config_verbs.read_experiment", lambda folder: source)
    arguments = ["multi30k", "--init-model", "--init-from=W", "--task.num-beams", "2"]
    changed = parse_config_verb("fit", arguments, FitArguments).experiment
    assert folders == [("W", "init_from")]
    # The size of the vocabulary is the tokenizer's; all else of the task is the config's.
    assert changed.model == dataclasses.replace(model, vocab_size=0)
    assert isinstance(multi30k.task, Translation)
    assert changed.task == dataclasses.replace(multi30k.task, start_token="<pad>", num_beams=2)


def test_without_a_source_it_is_an_error() -> None:
    with pytest.raises(UsageError, match="needs --init-from W"):
        parse_config_verb("fit", ["trec", "--init-model"], FitArguments)
