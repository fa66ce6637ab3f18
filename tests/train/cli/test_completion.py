"""Shell completion, as bash runs it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from train.cli.listing_verbs import completion_script
from train.cli.main import VERBS
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
    with pytest.raises(UsageError, match="completion fish: is not supported"):
        completion_script("fish")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_read_the_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "completion").write_text(completion_script(shell))
    program = "source ./completion; complete -p linen-transformer"
    options = [shell] if shell == "bash" else [shell, "-f"]
    ran = subprocess.run(
        [*options, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "-F _linen_transformer linen-transformer" in ran.stdout
