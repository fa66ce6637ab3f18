"""Run every command and every Python block of README and docs, in order, as a reader would.

    python -m bench docs_commands [--only docs/tutorial/own_text.md]

Each page runs in its own temporary folder, on the CPU and without a network. Bash blocks run
in `bash`; the Python blocks of a page share one interpreter. Comments of the page, which readers do
not see, precede a block and say what is different here:

    <!-- run: skip REASON -->      the block is not run
    <!-- run: add FLAGS -->        its `fit`, `sweep` and `scaling` commands get these flags too
    <!-- run: first COMMAND -->    a shell command to run before it, such as one that creates data
    <!-- run: file NAME -->        the block is a file, which is written and not run
    <!-- run: replace A => B -->   a placeholder in the block and its value: CONFIG => quickstart

TINY among the flags stands for the flags of a model that trains in seconds.

Prints a table of all blocks; the exit status is the number of blocks that failed, at most 99.
"""

import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

BLOCK_SECONDS = 900
"""Limit of one block."""

TINY = (
    "--steps 4 --evaluation.every 0 --sample.every 0 --model.num-layers 1 --model.d-model 48 "
    "--data.validation-fraction 0.01"
)
"""Flags that make a language model of `quickstart` train in seconds."""

_BLOCK = re.compile(
    r"((?:^ *<!-- run: [^\n]* -->\n)*)^( *)```(\w*)\n(.*?)^\2```$", re.MULTILINE | re.DOTALL
)
_DIRECTIVE = re.compile(r"<!-- run: (\w+) ([^\n]*) -->")

_INTERPRETER = """
import json, sys, traceback
names, answers = {"__name__": "page"}, sys.stdout
sys.stdout = sys.stderr
for line in sys.stdin:
    code, error = json.loads(line), ""
    try:
        exec(compile(code, "<block>", "exec"), names)
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps(error), file=answers, flush=True)
"""


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    code: str
    directives: list[tuple[str, str]]
    """What the page says about running it: verbs and their texts."""

    def texts(self, verb: str) -> list[str]:
        """Return the texts of the directives with a verb."""
        return [text for each, text in self.directives if each == verb]

    def prepared(self) -> str:
        """Return the code as it runs here: with the page's replacements and flags."""
        code = self.code
        for replacement in self.texts("replace"):
            old, _, new = replacement.partition(" => ")
            code = code.replace(old, new)
        if self.language == "python":
            return code
        flags = " ".join(self.texts("add")).replace("TINY", TINY)
        lines = code.replace("\\\n", " ").splitlines()
        for number, line in enumerate(lines):
            if flags and re.search(r"\btrain (fit|sweep|scaling) ", line):
                lines[number] = re.sub(r"( +#.*)?$", f" {flags}", line, count=1)
        return "\n".join(lines)


def pages() -> list[str]:
    """Return the pages with blocks to run, as paths from the root."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in paths if blocks(path.read_text("utf-8"))]


def blocks(text: str) -> list[Block]:
    """Return the blocks of a page that can be run."""
    result = []
    for match in _BLOCK.finditer(text):
        comments, indent, language, code = match.groups()
        if language in ("bash", "python"):  # others are text, output or settings
            code = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
            line = text.count("\n", 0, match.start(3)) + 1
            result.append(Block(line, language, code, _DIRECTIVE.findall(comments)))
    return result


class Reader:
    """A reader of one page: a folder, a shell and an interpreter."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder = folder
        for name in ("examples", "cloud"):
            (folder / name).symlink_to(ROOT / name)
        self._environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "MPLBACKEND": "agg",
            "JAX_PLATFORMS": "cpu",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMER_CACHE": str(cache),
        }
        self._log = folder.parent / f"{folder.name}.log"
        with self._log.open("w") as log:
            self._python = subprocess.Popen(
                [sys.executable, "-c", _INTERPRETER],
                cwd=folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run(self, block: Block) -> str:
        """Run a block; return what went wrong, or an empty string."""
        for name in block.texts("file"):
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code, "utf-8")
            return ""
        for first in block.texts("first"):
            if problem := self._run_shell(first.replace("TINY", TINY)):
                return problem
        code = block.prepared()
        return self._run_shell(code) if block.language == "bash" else self._run_python(code)

    def _run_shell(self, code: str) -> str:
        try:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", code],
                cwd=self._folder,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=BLOCK_SECONDS,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return f"took more than {BLOCK_SECONDS} s"
        return (done.stdout + done.stderr)[-1500:] if done.returncode else ""

    def _run_python(self, code: str) -> str:
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        print(json.dumps(code), file=self._python.stdin, flush=True)
        answer = self._python.stdout.readline()
        return str(json.loads(answer)) if answer else f"Python has ended\n{self._log.read_text()}"

    def close(self) -> None:
        """End the interpreter."""
        self._python.communicate(timeout=60)


def run_page(page: str, cache: Path) -> list[tuple[Block, str, float, str]]:
    """Run the blocks of a page; return each with its status, seconds, and reason or problem."""
    outcomes: list[tuple[Block, str, float, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "page"
        folder.mkdir()
        reader = Reader(folder, cache)
        try:
            for block in blocks((ROOT / page).read_text("utf-8")):
                if reasons := block.texts("skip"):
                    outcomes.append((block, "skipped", 0.0, reasons[0]))
                    continue
                start = time.monotonic()
                problem = reader.run(block)
                status = "FAILED" if problem else "ok"
                outcomes.append((block, status, time.monotonic() - start, problem))
        finally:
            reader.close()
    return outcomes


def drill(only: tuple[str, ...] = ()) -> int:
    """Run the blocks of all pages, or of some.

    Args:
      only: Pages to run, as paths from the root. Empty: all.
    """
    statuses: collections.Counter[str] = collections.Counter()
    problems = []
    with tempfile.TemporaryDirectory() as cache:
        for page in only or pages():
            for block, status, seconds, text in run_page(page, Path(cache)):
                statuses[status] += 1
                place, shown = f"{page}:{block.line}", f"{block.language:6} {status:7}"
                reason = text if status == "skipped" else ""
                print(f"{place:44} {shown} {seconds:5.0f} s  {reason}", flush=True)
                if status == "FAILED":
                    problems.append(f"\n== {place}\n{block.code}\n{text}")
    print(", ".join(f"{count} {status}" for status, count in statuses.items()))
    print("".join(problems), end="", file=sys.stderr)
    return min(statuses["FAILED"], 99)
