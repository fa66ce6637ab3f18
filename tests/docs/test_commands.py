"""The documentation drill parses pages correctly, and one of its pages runs."""

import shlex
from pathlib import Path

import pytest

from bench.drills.docs_commands import blocks, pages, run_page
from train.cli.config_verbs import FitArguments, parse_config_verb

PROGRAM = "linen-transformer"
SHELL_OPERATORS = ("&&", "||", "|", ">", "2>", "&", ";")

ROOT = Path(__file__).parents[2]


def fit_commands(page: str) -> list[list[str]]:
    """Return the words after `fit` of a page's commands that train a shipped config."""
    commands = []
    for block in blocks((ROOT / page).read_text("utf-8")):
        if block.language != "bash" or block.texts("skip") or block.texts("file"):
            continue
        for line in block.prepared().splitlines():
            words = shlex.split(line, comments=True)
            if "fit" not in words or words[words.index("fit") - 1] not in ("train", PROGRAM):
                continue
            words = words[words.index("fit") + 1 :]
            stop = next((i for i, word in enumerate(words) if word in SHELL_OPERATORS), None)
            if ".py" not in words[0] and not {"--import", "--init-model", "--mesh"} & set(words):
                commands.append(words[:stop])
    return commands


@pytest.mark.parametrize("page", pages())
def test_fit_commands_parse(page: str) -> None:
    """The drill runs them; this finds a renamed flag or a forgotten placeholder in seconds."""
    for words in fit_commands(page):
        parse_config_verb("fit", words, FitArguments)


def test_fit_commands_of_pages_are_found() -> None:
    found = [words[:3] for words in fit_commands("docs/training.md")]
    assert ["quickstart", "--data.path", "books/*.txt"] in found


def test_page_commands_run() -> None:
    results = run_page("docs/explanation/masks.md", ROOT)
    assert [(status, problem) for _, status, _, problem in results] == [("ok", "")]
