"""An own `--data.path` in place of the data that a config names."""

from typing import Any

import pytest

from train.cli.config_verbs import ConfigArguments, parse_config_verb


@pytest.mark.parametrize("config", ["sst2", "multi30k"])
def test_own_path_replaces_held_out_files(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    def paths(*arguments: str) -> tuple[str, str, str]:
        given = parse_config_verb("data", [config, *arguments], ConfigArguments)
        data: Any = given.experiment.data
        return data.path, data.validation_path, data.test_path

    shipped = paths()
    assert paths("--data.path", shipped[0]) == shipped
    assert capsys.readouterr().err == ""
    assert paths("--data.path", "own") == ("own", "", "")
    message = capsys.readouterr().err
    assert message.startswith("data.path own: replaces the config's data; data.")
    assert message.endswith("validation is held out unless the path has files of that split\n")
    assert paths("--data.path=own", "--data.test-path", "b") == ("own", "", "b")
    both = ("--data.validation_path", "a", "--data.test-path", "b")
    assert paths("--data.path", "own", *both) == ("own", "a", "b")
