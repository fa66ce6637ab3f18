"""Measure the reading paths of docs/architecture.md: the files whose functions run.

    python -m tests.docs.reading_paths           # print the three paths as JSON
    python -m tests.docs.reading_paths --write   # and write them into docs/architecture.md

Three paths, in the order in which their files are first entered:

- forward: `model.apply` of the README's library example;
- step: one training step of a tiny language model, without the files of the forward path;
- resume: `restore_newest`, from an existing run folder to a restored state.

It runs in its own process, because functions that other code has called before may be cached.
"""

import ast
import dataclasses
import json
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = (str(ROOT / "transformer"), str(ROOT / "train"))


class Recorder:
    """Profile function that records the project's files that run inside some entry functions."""

    def __init__(self, is_entry: Callable[[CodeType], bool]) -> None:
        self._is_entry = is_entry
        self._depths: dict[int, int] = {}  # by thread
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGES):
            return
        thread = threading.get_ident()
        depth = self._depths.get(thread, 0)
        if event == "call":
            self._depths[thread] = depth = depth + self._is_entry(code)
            name = str(Path(code.co_filename).relative_to(ROOT))
            if depth and code.co_name != "<module>" and name not in self.files:
                self.files.append(name)
        elif event == "return" and depth:
            self._depths[thread] = depth - self._is_entry(code)


def record(run: Callable[[], Any], is_entry: Callable[[CodeType], bool]) -> list[str]:
    """Return the files that `run` enters, from the first function on that `is_entry` tells."""
    recorder = Recorder(is_entry)
    threading.setprofile(recorder)  # the step may be compiled in a thread of its own
    sys.setprofile(recorder)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return recorder.files


def forward_path() -> list[str]:
    """Return the files of a forward pass: the README's `model.apply` after `init`."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = next(block for block in blocks if ".apply(" in block).splitlines()
    cut = next(i for i, line in enumerate(lines) if ".apply(" in line)
    names: dict[str, Any] = {}
    exec("\n".join(lines[:cut]), names)
    return record(
        lambda: exec("\n".join(lines[cut:]), names), lambda code: code.co_name == "__call__"
    )


def training_paths(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files of a training step, and of a resume, of a tiny language model."""
    import train
    from train.config.experiment_files import find_experiment

    text = folder / "text.txt"
    text.write_text("one two three four five six\n" * 400)
    base, change = find_experiment("quickstart"), dataclasses.replace
    tokenizer = change(base.text_data.tokenizer, kind="byte")
    data = change(
        base.text_data,
        path=str(text),
        sequence_length=16,
        cache_dir=str(folder / "cache"),
        tokenizer=tokenizer,
    )
    experiment = change(
        base,
        steps=2,
        batch_size=2,
        log_every=1,
        model=change(base.model, d_model=24, num_layers=2),
        data=data,
        evaluation=change(base.evaluation, every=0),
        sample=change(base.sample, every=0),
        checkpoint=change(base.checkpoint, every=1),
    )
    workdir = str(folder / "run")
    step = record(
        lambda: train.fit(experiment, workdir, quiet=True),
        lambda code: (
            (Path(code.co_filename).name, code.co_name)
            in (("engine.py", "put_batch"), ("engine.py", "step"), ("compiled_step.py", "_compile"))
        ),
    )
    resume = record(
        lambda: train.fit(change(experiment, steps=3), workdir, quiet=True),
        lambda code: (
            code.co_filename.endswith("train/resume.py") and code.co_name == "restore_newest"
        ),
    )
    return step, resume


def measure() -> dict[str, list[str]]:
    """Return the three paths by name."""
    forward = forward_path()
    with tempfile.TemporaryDirectory() as name:
        step, resume = training_paths(Path(name))
    return {
        "forward": forward,
        "step": [name for name in step if name not in forward],
        "resume": [name for name in resume if name.startswith("train/")],
    }


def count_lines(name: str) -> int:
    """Return the number of lines of a file of the project."""
    return len((ROOT / name).read_text().splitlines())


def table(files: list[str]) -> str:
    """Return a path as a table: file, lines, first line of its docstring."""
    rows = ["| file | lines | contents |", "| --- | --- | --- |"]
    for name in files:
        text = ast.get_docstring(ast.parse((ROOT / name).read_text())) or ""
        contents = text.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        rows.append(f"| [`{name}`](../{name}) | {count_lines(name)} | {contents} |")
    total = sum(map(count_lines, files))
    return "\n".join([*rows, "", f"{len(files)} files, {total:,} lines."])


def documented(name: str) -> list[str]:
    """Return the files that docs/architecture.md lists for a path."""
    return re.findall(r"\| \[`([\w/.]+)`\]", _section(PAGE.read_text(), name))


def _section(text: str, name: str) -> str:
    start, end = f"<!-- path: {name} -->\n", f"<!-- end: {name} -->"
    return text[text.index(start) : text.index(end) + len(end)]


def write(paths: dict[str, list[str]]) -> None:
    """Replace the three tables of docs/architecture.md."""
    text = PAGE.read_text()
    for name, files in paths.items():
        section = f"<!-- path: {name} -->\n{table(files)}\n<!-- end: {name} -->"
        text = text.replace(_section(text, name), section)
    PAGE.write_text(text)


def main() -> None:
    """Measure, and write the page on request."""
    paths = measure()
    if "--write" in sys.argv:
        write(paths)
    print(json.dumps(paths))


if __name__ == "__main__":
    main()
