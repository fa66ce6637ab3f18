"""Whole classes of odd input, case by case: numbers, paths, files, types of fields, closed outputs.

Hypothesis samples in `bench.drills.fuzz`; these sweeps try all cases of a class.
"""

import contextlib
import copy
import dataclasses
import functools
import io
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from bench.drills import _fuzz_targets
from bench.drills._fuzz_numbers import Case, Use, numbers
from train.cli.main import main as command
from train.config.experiment_files import find_experiment
from train.data.bitext import BitextDataConfig, prepare_bitext
from train.data.corpus import prepare_text
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.data.text_labels import ClassificationDataConfig, prepare_classification
from train.data.token_labels import TokenLabelDataConfig, prepare_token_labels
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.estimate.plan import load_prices
from train.run_folder.folder import RunFolder

OTHERS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**63, 10**400, -0.0),
    *(float("nan"), float("inf"), "", "x", "NaN", [], [None], {}, {"a": None}),
)
"""JSON values of other types."""

MANY = 8
"""Maximum number of entries tried: of longer lists and objects, the first half of this."""


def sweeps(scratch: pathlib.Path) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return every sweep by name."""
    return {
        "numbers of settings": numbers,
        "paths": paths,
        "fields of JSON": lambda: fields(scratch / "checkpoints"),
        "standard output": lambda: outputs(scratch),
    }


# Paths.


def odd_path(kind: str, folder: pathlib.Path, ending: str) -> str:
    """Return a path of this kind, below a folder or elsewhere."""
    match kind:
        case "folder":
            (folder / f"odd{ending}").mkdir()
            return str(folder / f"odd{ending}")
        case "loop":
            loop = folder / f"odd{ending}"
            loop.symlink_to(loop)
            return str(loop)
    return {
        "no user": f"~nouser/x{ending}",
        "NUL": f"{folder}/a\0b{ending}",
        "newline": f"{folder}/a\nb{ending}",
        "long": f"{folder}/{'a' * 300}{ending}",
        "scheme": f"nothing://x{ending}",
    }[kind]


def paths() -> Iterator[Case]:
    """Yield every setting that is a path, with each odd path."""
    readers: dict[str, tuple[str, Callable[[str, pathlib.Path], object]]] = {
        "data.path": (".txt", lambda path, folder: _text(folder, path=path)),
        "data.path, JSON lines": (".jsonl", lambda path, folder: _text(folder, path=path)),
        "data.path, gzip": (".txt.gz", lambda path, folder: _text(folder, path=path)),
        "data.validation_path": (
            ".txt",
            lambda path, folder: _text(folder, validation_path=path),
        ),
        "data.test_path": (".txt", lambda path, folder: _text(folder, test_path=path)),
        "data.cache_dir": ("", lambda path, folder: _text(folder, cache_dir=path)),
        "data.tokenizer.path": (
            ".json",
            lambda path, folder: _text(folder, tokenizer=TokenizerConfig("file", path=path)),
        ),
        "vocab.txt": ("/vocab.txt", lambda path, _: Tokenizer.load(path)),
        "TSV": (".tsv", lambda path, _: prepare_classification(_labelled(path))),
        "CoNLL-U": (".conllu", lambda path, _: prepare_token_labels(_tagged(path))),
        "translations": (".en", lambda path, _: prepare_bitext(_parallel(path))),
        "config": (".py", lambda path, _: find_experiment(path)),
        "prices": (".toml", lambda path, _: load_prices(path)),
        "workdir to read": ("", lambda path, _: RunFolder.open_existing(path)),
        "workdir to write": ("", lambda path, _: RunFolder.create(path)),
    }
    kinds = ("folder", "loop", "no user", "NUL", "newline", "long", "scheme")
    for setting, (ending, read) in readers.items():
        for kind in kinds:
            yield Case(f"{setting}: {kind}", _reading(read, kind, ending))


def _reading(read: Callable[[str, pathlib.Path], object], kind: str, ending: str) -> Use:
    def use(folder: pathlib.Path) -> None:
        read(odd_path(kind, folder, ending if "/" not in ending else ".txt"), folder)

    return use


BYTES = TokenizerConfig("byte")


def _text(folder: pathlib.Path, **changes: Any) -> object:
    (folder / "good.txt").write_text("some words of a text\n" * 50)
    config = TextDataConfig(path=str(folder / "good.txt"), sequence_length=8, tokenizer=BYTES)
    changed = dataclasses.replace(config, **{"cache_dir": str(folder / "cache"), **changes})
    return prepare_text(changed)


def _labelled(path: str) -> ClassificationDataConfig:
    return ClassificationDataConfig(path=path, tokenizer=BYTES)


def _tagged(path: str) -> TokenLabelDataConfig:
    return TokenLabelDataConfig(path=path, tokenizer=BYTES)


def _parallel(path: str) -> BitextDataConfig:
    base = path.removesuffix(".en")
    return BitextDataConfig(path=base, source_lang="en", target_lang="de", tokenizer=BYTES)


# Fields of JSON.


def fields(scratch: pathlib.Path) -> Iterator[Case]:
    """Yield each field of each JSON file with each other type."""
    for target in _fuzz_targets.targets(scratch):
        if target.packed or target.arguments is not None or target.drawn is not None:
            continue
        for seed in target.seeds:
            for name, data in other_fields(seed):
                yield Case(f"{target.name}: {name}", functools.partial(_given, target, data))


def _given(target: _fuzz_targets.Target, data: bytes, folder: pathlib.Path) -> None:
    target.use(folder, data)


def other_fields(seed: bytes) -> Iterator[tuple[str, bytes]]:
    """Return the file with one field of another type (for JSON lines, in the last line)."""
    try:
        before, tree = b"", [json.loads(seed)]
    except ValueError:
        first, _, last = seed.rstrip(b"\n").rpartition(b"\n")
        try:
            before, tree = first + b"\n", [json.loads(last)]
        except ValueError:
            return
    for path in places(tree):
        for other in OTHERS:
            changed: Any = copy.deepcopy(tree)
            within = changed
            for key in path[:-1]:
                within = within[key]
            within[path[-1]] = other
            shown = ".".join(map(str, path[1:])) or "all"
            yield f"{shown} = {str(other)[:20]}", before + json.dumps(changed[0]).encode()


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value of a tree."""
    keys = list(tree if isinstance(tree, dict) else range(len(tree)))
    for key in keys if len(keys) <= MANY or not path else keys[: MANY // 2]:
        yield (*path, key)
        if isinstance(tree[key], dict | list):
            yield from places(tree[key], (*path, key))


# A tiny run.

SETTINGS = (
    *("--data.tokenizer.kind", "byte", "--model.d-model", "16", "--model.num-layers", "1"),
    *("--model.layer-pattern.0.mixer.num-heads", "2"),
    *("--model.layer-pattern.0.mixer.num-kv-heads", "1"),
    *("--data.sequence-length", "16", "--batch-size", "8", "--evaluation.num-batches", "1"),
    *(
        "--evaluation.no-compression-baselines",
        "--sample.every",
        "1",
        "--sample.max-new-tokens",
        "2",
    ),
    *("--checkpoint.every", "2", "--log-every", "1", "--optimizer.kind", "sgd", "--quiet"),
)


def train(folder: pathlib.Path, steps: int, workdir: pathlib.Path) -> None:
    """Train or resume a tiny run."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("some words of a text\n" * 200)
    data = ("--data.path", str(text), "--data.cache-dir", str(folder / "cache"))
    given = ("--workdir", str(workdir), "--steps", str(steps))
    _run("fit", "quickstart", *given, *data, *SETTINGS)


def _run(*arguments: str) -> None:
    """Run a command in this process; UserError means a one-line rejection."""
    errors, status = io.StringIO(), None
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            command(arguments)
        except SystemExit as stop:
            status = stop.code
    if status:
        said = [line for line in errors.getvalue().splitlines() if line.startswith("error: ")]
        assert len(said) == 1, errors.getvalue()
        raise UserError(said[0])


# Standard output.


def outputs(scratch: pathlib.Path) -> Iterator[Case]:
    """Yield each command with a full or closed output."""
    workdir = scratch / "whole"
    if not workdir.exists():
        train(scratch, 2, workdir)
    lines = [
        *(["--help"], ["fit", "--help"], ["fit", "quickstart", "--help"], ["doctor"]),
        *(["describe", "quickstart"], ["describe", "quickstart", "--json"]),
        *(["plan", "quickstart", "--target", "h100:1", "--compile-best", "0"],),
        *(["evaluate", str(workdir)], ["sample", str(workdir), "--prompt", "a"]),
        *(["goodput", str(workdir)], ["goodput", str(workdir), "--json"], ["nothing"]),
    ]
    for line in lines:
        for kind in ("full", "closed", "unbuffered"):
            yield Case(f"{' '.join(line)}: {kind}", _written(line, kind))


def _written(line: list[str], kind: str) -> Use:
    def use(folder: pathlib.Path) -> None:
        target = ">&-" if kind == "closed" else ">/dev/full"
        shell = f'exec "$0" -m train "$@" {target}'
        unbuffered = {"PYTHONUNBUFFERED": "1" if kind == "unbuffered" else ""}
        ran = subprocess.run(
            ["/bin/sh", "-c", shell, sys.executable, *line],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **unbuffered},
            check=False,
        )
        assert ran.returncode in (0, 1, 2), (ran.returncode, ran.stderr)
        assert "Traceback" not in ran.stderr, ran.stderr
        assert "Exception ignored" not in ran.stderr, ran.stderr
        if ran.returncode:
            raise UserError(ran.stderr)

    return use
