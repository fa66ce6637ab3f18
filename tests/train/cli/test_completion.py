"""Shell completion, as interactive shells run it."""

import os
import pty
import re
import select
import shutil
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
    with pytest.raises(UsageError, match="completion fish: is not supported"):
        completion_script("fish")


def read_until(terminal: int, text: str) -> None:
    shown = ""
    while text not in shown:
        if not select.select([terminal], [], [], 60)[0]:
            pytest.fail(f"{text!r} did not appear in {shown!r}")
        shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(terminal, 4096).decode())


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_an_interactive_shell_completes_with_the_tab_key(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "completion"
    script.write_text(completion_script(shell))
    (tmp_path / "runs").mkdir()
    options = ["--norc", "-i"] if shell == "bash" else ["-f", "-i"]
    own, terminal = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm", "HOME": str(tmp_path)}
    process = subprocess.Popen(
        [shell, *options],
        stdin=terminal, stdout=terminal, stderr=terminal,
        cwd=tmp_path, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        os.write(own, f"source {script}; echo rea''dy\n".encode())
        read_until(own, "ready")
        os.write(own, b"linen-transformer descr\t")
        read_until(own, "linen-transformer describe ")
        os.write(own, b"\x15linen-transformer sample ru\t")  # control-U deletes the line
        read_until(own, "linen-transformer sample runs")
    finally:
        process.kill()
        process.wait()
        os.close(own)
        os.close(terminal)
