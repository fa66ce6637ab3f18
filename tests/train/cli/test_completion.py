"""Shell completion, as bash runs it."""

import subprocess
from pathlib import Path

import pytest

from train.cli.main import VERBS
from train.cli.start_verbs import completion_script
from train.errors import UsageError


def complete(folder: Path, *words: str) -> set[str]:
    """Return what bash offers for the last word."""
    given = " ".join(f"'{word}'" for word in ("linen-transformer", *words))
    lines = f"COMP_WORDS=({given}); COMP_CWORD={len(words)}; _linen_transformer\n"
    program = f'{completion_script("bash")}\n{lines}printf "%s\\n" "${{COMPREPLY[@]}}"'
    ran = subprocess.run(
        ["bash", "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    assert ran.stderr == ""
    return set(ran.stdout.split())


def test_words_are_completed(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "own.py").touch()
    (tmp_path / "notes.txt").touch()
    assert complete(tmp_path, "") == set(VERBS)
    assert complete(tmp_path, "de") == {"describe"}
    assert complete(tmp_path, "fit", "gpt") == {"gpt2", "gpt3"}
    assert "own.py" in complete(tmp_path, "fit", "")
    assert complete(tmp_path, "sample", "") == {"runs"}
    assert complete(tmp_path, "fit", "gpt2", "x") == set()


def test_zsh_reads_the_same_script() -> None:
    assert completion_script("zsh").endswith(completion_script("bash"))
    with pytest.raises(UsageError, match="completion fish: is not supported; give one of bash"):
        completion_script("fish")
