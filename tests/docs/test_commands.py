"""The documentation drill parses pages correctly, and one of its pages runs."""

import shlex
from pathlib import Path

import pytest

from bench.drills.docs_commands import LANGUAGES, blocks, pages, run_page, with_flags
from train.cli.config_verbs import FitArguments, parse_config_verb

PROGRAM = "linen-transformer"
SHELL_OPERATORS = ("&&", "||", "|", ">", "2>", "&", ";")

ROOT = Path(__file__).parents[2]

PAGE = """Text.

<!-- run: first mkdir data -->
<!-- run: add --steps 2 -->
```bash
python -m train fit own.py \\
    --workdir W   # trains
ls
```

1. A list:

   <!-- run: skip needs a TPU -->
   ```bash
   false
   ```

```text
no command
```
"""


def test_blocks_of_a_page() -> None:
    first, second = blocks(PAGE)
    assert first.directives == (("first", "mkdir data"), ("add", "--steps 2"))
    assert second.code == "false\n"
    assert second.texts("skip") == ["needs a TPU"]
    assert second.texts("add") == []
    assert first.line == 5


def test_unknown_directive_raises() -> None:
    with pytest.raises(ValueError, match="later"):
        blocks("<!-- run: later -x -->\n```bash\nls\n```\n")


def test_flags_are_added_to_commands_that_train() -> None:
    code = blocks(PAGE)[0].code
    assert with_flags(code, "--steps 2").splitlines() == [
        "python -m train fit own.py      --workdir W --steps 2",
        "ls",
    ]
    assert with_flags(code, "") == code.replace("\\\n", " ").rstrip()


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
    assert ["quickstart", "--data.path", "books/*.txt"] in [
        words[:3] for words in fit_commands("docs/training.md")
    ]


def test_every_fence_names_its_language() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        fences = [line.strip() for line in path.read_text("utf-8").splitlines() if "```" in line]
        for fence in fences[::2]:
            assert fence.removeprefix("```") in (*LANGUAGES, "text", "toml"), (path, fence)


def test_every_page_is_parsed() -> None:
    assert "README.md" in pages()


def test_page_commands_run() -> None:
    results = run_page("docs/explanation/masks.md", ROOT)
    assert [(status, problem) for _, status, _, problem in results] == [("ok", "")]


@pytest.mark.full
def test_failing_block_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.drills.docs_commands.ROOT", tmp_path)
    (tmp_path / "page.md").write_text("```bash\necho why; exit 3\n```\n```python\n1 / 0\n```\n")
    (_, first, _, why), (_, second, _, trace) = run_page("page.md", tmp_path)
    assert (first, why, second) == ("FAILED", "why\n", "FAILED")
    assert "ZeroDivisionError" in trace
