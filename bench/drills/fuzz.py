"""Feed broken input to every reader: each case must succeed or end in a one-line error.

    python -m bench fuzz [--cases 10000] [--only WORD]

Run folders, settings, models, datasets and tokenizers, in process. Each case is a damaged
file or an implausible setting, drawn by Hypothesis. Anything but success or a UserError is a
finding, as are a case that takes longer than `SECONDS` and a file written outside the folder of the
case. Then sweeps try all cases of a class: every number of the settings, every path, every field of
a run's JSON, every command's output.
"""

import contextlib
import copy
import dataclasses
import functools
import gzip
import io
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import hypothesis
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

import train
from bench.drills.faults import tiny
from train.checkpoint.manager import CheckpointManager
from train.cli.config_verbs import FitArguments
from train.cli.parsing import Draft, parse
from train.config.experiment_files import find_experiment, list_experiments
from train.config.io import (
    experiment_from_dict,
    experiment_to_dict,
    flatten_experiment,
    flatten_fields,
)
from train.data.bitext import BitextDataConfig, prepare_bitext
from train.data.corpus import prepare_text
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.data.text_labels import ClassificationDataConfig, prepare_classification
from train.data.token_labels import TokenLabelDataConfig, prepare_token_labels
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import train_tokenizer
from train.detector import RecoveryConfig
from train.errors import UserError
from train.estimate.describe import describe
from train.estimate.plan import load_prices
from train.experiment import Experiment
from train.resume import read_final_metrics
from train.rollback import Anomaly, RollbackRecord, plan_rollback
from train.run_folder.folder import RunFolder
from train.run_folder.run_config import read_auto_choices, read_experiment, read_labels
from train.telemetry.metrics_log import MetricsLog, read_metrics
from transformer.hardware import Hardware

SECONDS = 30
SWEPT_SECONDS = 60
"""For a case of a sweep, which may trace a whole model or train a run."""
MEMORY = 2**20
"""KiB that a case of a sweep may add to the peak of the process."""

Use = Callable[[Path, Any], object]
"""(empty folder, input) -> anything: use the input."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Reader under test."""

    name: str
    use: Use
    inputs: st.SearchStrategy[Any]
    seeds: Sequence[bytes] = ()
    """Valid files, if the input is a file that is not packed."""
    weight: int = 10
    """Relative number of cases."""


def targets(scratch: Path) -> list[Target]:
    """Return all targets; creates a small checkpoint in the scratch folder."""
    models = Target("models", describe_model, experiments(), weight=2)
    return [*run_folder(scratch), settings(), models, *datasets(), *tokenizers()]


# Broken files.

WORDS = st.sampled_from(["", "0", "-1", "1e400", "nan", "../../x", "/etc/passwd", "\0", "ü\u2028"])

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([10**30, -(2**63), 1e308]),
        st.floats(),
        st.text(max_size=9),
        WORDS,
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)
"""JSON values, and beyond JSON: NaN, infinities, half a surrogate pair."""


def places(tree: Any, path: str = "", max_entries: int = 0) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted path, the container and the key of each value in a tree.

    Of a container with more than `max_entries` below the root, the first half of them; 0: all.
    """
    if not isinstance(tree, dict | list):
        return
    keys = list(tree if isinstance(tree, dict) else range(len(tree)))
    for key in keys[: max_entries // 2] if path and 0 < max_entries < len(keys) else keys:
        name = f"{path}.{key}"
        yield name, tree, key
        yield from places(tree[key], name, max_entries)


@st.composite
def other_json(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the JSON with one value replaced, removed or joined by another (in one line)."""
    lines = data.splitlines()
    try:
        json.loads(data)
        chosen, lines = 0, [data]
    except ValueError:
        chosen = draw(st.integers(0, max(0, len(lines) - 1)))
    try:
        tree = [json.loads(lines[chosen])]
    except (ValueError, IndexError):
        return draw(st.binary(max_size=99))
    _, container, key = draw(st.sampled_from(list(places(tree))[:2000]))
    match draw(st.sampled_from(["replace", "delete", "add"])):
        case "replace":
            container[key] = draw(VALUES)
        case "delete":
            del container[key]
        case "add" if isinstance(container, dict):
            container[draw(st.text(max_size=9))] = draw(VALUES)
    lines[chosen] = json.dumps(tree[0] if tree else None).encode()
    return b"\n".join(lines)


@st.composite
def other_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the bytes truncated, or with some of them replaced."""
    start = draw(st.integers(0, len(data)))
    stop = draw(st.integers(start, min(len(data), start + 99)))
    new = draw(
        st.one_of(
            st.binary(max_size=99),
            st.text(max_size=30).map(lambda text: text.encode(errors="surrogatepass")),
            st.sampled_from([b"\0", b"\xff\xfe", b"\t", b"\r", b"\n\n", b"[" * 99_999, b'"']),
            st.sampled_from([b"9" * 5000, b"{}", b"a" * 999_999, "\u2028\ufeff".encode()]),
        )
    )
    rest = data[stop:] if draw(st.booleans()) else b""
    return data[:start] + new + rest


def broken(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return a strategy for files: some valid, most of them damaged."""
    seed = st.sampled_from(seeds)
    changed = seed.flatmap(lambda data: other_json(data) | other_bytes(data))
    return st.one_of(changed, changed, st.binary(max_size=300), seed)


def file_target(name: str, use: Use, *seeds: bytes, weight: int = 10) -> Target:
    """Return the target of a file."""
    return Target(name, use, broken(seeds), seeds, weight)


def packed_target(name: str, use: Use, *seeds: bytes) -> Target:
    """Return the target of a gzipped file."""
    packed = broken(seeds).map(lambda data: gzip.compress(data, 1))
    return Target(name, use, st.one_of(packed, packed.flatmap(other_bytes), broken(seeds)))


def reading(name: str, read: Callable[[Path], object]) -> Use:
    """Return the use of a file's content: write it to a file of this name, and read that."""

    def use(folder: Path, data: bytes) -> None:
        (folder / name).write_bytes(data)
        read(folder / name)

    return use


# Files of a run.


def run_folder(scratch: Path) -> list[Target]:
    """Return the files of a run, each damaged separately."""
    config = {
        "experiment": experiment_to_dict(Experiment()),
        "chosen": {"model.layer_loop": "scan"},
        "hardware": dataclasses.asdict(Hardware("cpu")),
    }
    metrics = [{"step": n, "split": "train", "loss": 3.0 - n / 10} for n in range(4)]
    events = [{"time": "t", "event": "finished", "step": 3, "loss": 1.5}]
    one = {"first": 3, "step": 5, "checkpoint": 2, "cursor": 9, "rate": 0.5, "attempts": 1}
    rollbacks = [{"rollbacks": [], "cleared": True}, {"rollbacks": [one], "cleared": False}]

    def target(
        name: str, read: Callable[[Path], object], *seeds: bytes, weight: int = 10
    ) -> Target:
        return file_target(name, reading(name, read), *seeds, weight=weight)

    def read_end(path: Path) -> None:
        read_final_metrics(RunFolder(path.parent), 3)

    return [
        target("config.json", read_config, json.dumps(config).encode(), weight=20),
        target("labels.json", lambda path: read_labels(RunFolder(path.parent)), b'["a", "b"]'),
        target("metrics.jsonl", read_and_set_aside, json_lines(metrics)),
        target("logbook.jsonl", read_end, json_lines(events)),
        target("recovery.json", read_rollbacks, *(json.dumps(each).encode() for each in rollbacks)),
        manifest(scratch),
    ]


def json_lines(records: Sequence[dict[str, Any]]) -> bytes:
    """Return the records as JSON lines."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def read_config(path: Path) -> None:
    """Read the experiment and the choices of a run."""
    folder = RunFolder.open_existing(path.parent)
    read_experiment(folder)
    read_auto_choices(folder, Hardware("cpu"))


def read_and_set_aside(path: Path) -> None:
    """Set metrics aside as a resumed run does, and read the others."""
    with MetricsLog(path, path.parent / "tensorboard") as log:
        log.set_aside_after(2)
    read_metrics(path)


def read_rollbacks(path: Path) -> None:
    """Read the record of rollbacks, and plan one more."""
    record = RollbackRecord.read(path)
    for each in record.rollbacks:
        np.int32(each.cursor), np.float32(each.rate)
    plan_rollback(Anomaly(8, 8, 12, "why"), record.last, [2, 4], RecoveryConfig())


def manifest(scratch: Path) -> Target:
    """Return the target for manifests: a damaged one must never be accepted as valid."""
    with CheckpointManager(scratch) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
    files = {path.relative_to(scratch): path for path in scratch.rglob("*") if path.is_file()}
    intact = (scratch / "1" / "manifest/metadata").read_bytes()

    def lists_fewer_files(data: bytes) -> bool:
        return bool(json.loads(data)["files"].items() <= json.loads(intact)["files"].items())

    def use(folder: Path, data: bytes) -> None:
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(path.read_bytes())
        (folder / "1" / "manifest/metadata").write_bytes(data)
        with CheckpointManager(folder) as checkpoints:
            newest = checkpoints.find_newest_valid().step
        assert newest == (1 if data == intact else None) or lists_fewer_files(data)

    return file_target("manifest", use, intact)


# Settings.


def settings() -> Target:
    """Return the target for command-line arguments."""
    default = find_experiment("quickstart")
    names = [f"--{name.replace('_', '-')}" for name in flatten_experiment(default)]
    names += ["--optimizer.kind", "--data.kind", "--task.kind", "--help", "--", "--model"]
    name = st.sampled_from(names) | st.text(max_size=9).map("--{}".format)
    value = WORDS | st.text(max_size=9) | st.sampled_from(["9" * 5000, "[" * 500, "1", "True"])
    word = st.one_of(name, value, st.tuples(name, value).map("=".join))

    def use(folder: Path, arguments: list[str]) -> None:
        parse(FitArguments, arguments, verb="fit", experiment=default)

    return Target("settings", use, st.lists(word, max_size=6), weight=4)


# Datasets and tokenizers.

BYTES = TokenizerConfig("byte")
VOCABULARY = b'{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}'


def read_text(folder: Path, **settings: Any) -> None:
    """Split and encode a text, `good.txt` or another."""
    cache = str(folder / "cache")
    config = TextDataConfig(path=str(folder / "good.txt"), sequence_length=8, tokenizer=BYTES)
    prepare_text(dataclasses.replace(config, **{"cache_dir": cache, **settings}))


def read_labelled(path: Path | str, **settings: Any) -> None:
    """Split and encode labelled texts."""
    prepare_classification(ClassificationDataConfig(path=str(path), tokenizer=BYTES, **settings))


def read_tagged(path: Path | str) -> None:
    """Split and encode tagged words."""
    prepare_token_labels(TokenLabelDataConfig(path=str(path), tokenizer=BYTES))


def read_pairs(path: Path | str) -> None:
    """Split and encode translations."""
    prepare_bitext(BitextDataConfig(path=str(path), tokenizer=BYTES))


def datasets() -> list[Target]:
    """Return targets for text and example files, read, split and encoded."""
    text = "".join(f"Line {n} of a text, naïve enough.\n" for n in range(20)).encode()
    documents = json_lines([{"text": f"document {n}"} for n in range(9)])
    tsv = b"label\ttext\n" + b"".join(b"%d\ttext %d\n" % (n % 2, n) for n in range(9))
    first = b"".join(b"%s a question %d\n" % (b"DESC:x HUM:y".split()[n % 2], n) for n in range(9))
    word = "{}\tword{}\tlemma\tNOUN\tNN\t_\t0\troot\t_\t_\n"
    conllu = "".join(f"# s\n{word.format(1, n)}{word.format(2, n)}\n" for n in range(5)).encode()
    columns = b"-DOCSTART- -X- O O\n\n" + b"word NN B-NP\nof IN O\n\n" * 4

    def text_file(name: str) -> Use:
        return reading(name, lambda path: read_text(path.parent, path=str(path)))

    def pairs(folder: Path, data: bytes) -> None:
        for name in ("a.en", "a.de"):
            (folder / name).write_bytes(data)
        read_pairs(folder / "a")

    questions = functools.partial(read_labelled, format="label_first")
    return [
        file_target("text", text_file("a.txt"), text),
        packed_target("text, gzip", text_file("a.txt.gz"), text, b"\0" * 10**6),
        file_target("JSON lines", text_file("a.jsonl"), documents),
        packed_target("JSON lines, gzip", text_file("a.jsonl.gz"), documents),
        file_target("TSV", reading("a.tsv", read_labelled), tsv),
        file_target("labels first", reading("a.tsv", questions), first),
        file_target("CoNLL-U", reading("a.conllu", read_tagged), conllu),
        file_target("columns", reading("a.conllu", read_tagged), columns),
        file_target("translations", pairs, text),
    ]


def tokenizers() -> list[Target]:
    """Return targets for foreign tokenizer files."""
    learned = train_tokenizer(TokenizerConfig("bpe", vocab_size=300), ["a few words of text"] * 3)
    vocabulary = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nword\n##s\n"

    def read(path: Path) -> None:
        tokenizer = Tokenizer.load(path)
        tokenizer.decode(tokenizer.encode("a word"))

    def read_gpt2(name: str) -> Use:
        def use(folder: Path, data: bytes) -> None:
            (folder / "vocab.json").write_bytes(VOCABULARY)
            (folder / "merges.txt").write_bytes(b"a b\n")
            (folder / name).write_bytes(data)
            Tokenizer.load(folder)

        return use

    return [
        file_target("tokenizer.json", reading("tokenizer.json", read), learned.to_json().encode()),
        file_target("vocab.txt", reading("vocab.txt", read), vocabulary),
        file_target("vocab.json", read_gpt2("vocab.json"), VOCABULARY),
        file_target("merges.txt", read_gpt2("merges.txt"), b"#version: 0.2\na b\n"),
    ]


# Experiments whose settings have the right types.

BASES = (
    "quickstart",
    "gpt2:small",
    "versus:transformer",
    "llama:3-8b",
    "transformer_base",
    "bert:base",
)
"""Experiments that can be described without data."""

INTEGERS = st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 7, 8, 12, 64, 100, 1000])
FLOATS = st.sampled_from([-1.0, 0.0, 1e-9, 0.1, 0.5, 1.0, 2.0, 1e9, float("nan"), float("inf")])


def kind_options(experiment: Experiment) -> Iterator[tuple[str, Mapping[str, type]]]:
    """Yield the path of every part that may be of several classes, and these by kind."""
    queue = [Draft.of(Experiment, vars(experiment))]
    for draft in queue:
        if draft.kinds:
            yield draft.path, {kind: each for kind, each in draft.kinds.items() if kind != "None"}
        queue += [part for part in draft.values.values() if isinstance(part, Draft)]


@functools.cache
def words() -> tuple[str, ...]:
    """Return every string value and kind that occurs in some base."""
    bases = [find_experiment(base) for base in BASES]
    values = [value for base in bases for value in flatten_experiment(base).values()]
    kinds = {kind for base in bases for _, known in kind_options(base) for kind in known}
    return tuple(sorted(kinds.union(value for value in values if isinstance(value, str))))


def other_values(value: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for other values of the same type."""
    match value:
        case bool():
            return st.booleans()
        case int():
            return INTEGERS
        case float():
            return FLOATS
        case str():
            return st.sampled_from(words())
        case _:
            return st.none() | INTEGERS | FLOATS | st.booleans()


@st.composite
def experiments(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a base with some kinds and values replaced, in the form of `config.json`."""
    base = find_experiment(draw(st.sampled_from(BASES)))
    plain = experiment_to_dict(base)
    for name, kinds in draw(st.lists(st.sampled_from(list(kind_options(base))), max_size=2)):
        put(plain, name, {"kind": draw(st.sampled_from(sorted(kinds)))})
    present = {name: value for name, value in flatten_fields(plain) if not name.endswith("kind")}
    for name in draw(st.lists(st.sampled_from(sorted(present)), max_size=3)):
        put(plain, name, draw(other_values(present[name]) | st.none()))
    return plain


def put(tree: Any, name: str, value: Any) -> None:
    """Set a value by its path, if the path exists."""
    *path, last = name.split(".")
    for key in path:
        tree = tree[int(key)] if isinstance(tree, list) else tree.get(key)
        if not isinstance(tree, dict | list):
            return
    tree[int(last) if isinstance(tree, list) else last] = value


def describe_model(folder: Path, plain: dict[str, Any]) -> None:
    """Describe the experiment: build the model and trace its step."""
    describe(experiment_from_dict(plain, "an experiment"))


# Run cases.


class HangError(Exception):
    """A case took too long."""


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise HangError after this many seconds."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    # Repeated, because Python ignores exceptions raised in a callback of the garbage collector.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(use: Use, root: Path, given: Any, seconds: int = SECONDS) -> bool:
    """Run one case. Return True if the input was refused; raise unexpected errors."""
    folder = root / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    refused = False
    shown = io.StringIO()
    with (
        within(seconds),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
    ):
        try:
            use(folder, given)
        except UserError:
            refused = True
        except SystemExit as stop:
            if stop.code not in (0, 2):  # --help, and what tyro refuses
                raise
            refused = stop.code == 2
    assert [path.name for path in root.iterdir()] == ["folder"], "there is a file outside"
    return refused


def fuzz(target: Target, root: Path, cases: int) -> dict[str, int]:
    """Run many random cases and count them. The first finding is shrunk and raised."""
    counts = {"cases": 0, "refused": 0}

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(target.inputs)
    def case(given: Any) -> None:
        counts["cases"] += 1
        counts["refused"] += attempt(target.use, root, given)

    case()
    return counts


class Case(NamedTuple):
    """One input of a sweep: the name, its use, and what that is given."""

    name: str
    use: Use
    given: Any


def sweep(cases: Iterable[Case], root: Path) -> tuple[dict[str, int], list[str]]:
    """Run all cases of a class; return the counts and the findings."""
    counts, findings = {"cases": 0, "refused": 0}, []
    for name, use, given in cases:
        counts["cases"] += 1
        before = peak_memory()
        try:
            counts["refused"] += attempt(use, root, given, SWEPT_SECONDS)
        except (Exception, SystemExit) as error:  # noqa: BLE001, each is a finding
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            findings.append(
                f"{name}: {type(error).__name__} {text} ({where.filename}:{where.lineno})"
            )
        if (grown := peak_memory() - before) > MEMORY:
            findings.append(f"{name}: takes {grown // 1024} MiB")
    return counts, findings


def peak_memory() -> int:
    """Return the peak of this process in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# Sweep: every integer and float of the settings at extreme values.

EXTREME_INTEGERS = (-(2**63), -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**40)
EXTREME_FLOATS = (float("inf"), float("-inf"), float("nan"), 1e308, -1e308, -0.0)


def numbers() -> Iterator[Case]:
    """Yield every integer and float of every config, set to extreme values."""
    seen: set[tuple[str, str]] = set()
    tried: set[type] = set()
    files = sorted({name.partition(":")[0] for name in list_experiments()})
    for base in (shallow(find_experiment(name)) for name in files):
        for experiment in itertools.chain([base], other_kinds(base, tried)):
            plain = experiment_to_dict(experiment)
            for kind, path, value in numbers_of(experiment):
                key = kind, path.rpartition(".")[2]
                if key in seen:
                    continue
                seen.add(key)
                for other in EXTREME_INTEGERS if isinstance(value, int) else EXTREME_FLOATS:
                    changed = copy.deepcopy(plain)
                    put(changed, path, other)
                    name = f"{kind}: {path} = {other}"
                    yield Case(name, describe_model, changed)


def shallow(experiment: Experiment) -> Experiment:
    """Return the experiment with each block once, which traces faster."""
    model = experiment.model
    model = dataclasses.replace(model, num_layers=len(model.layer_pattern))
    if model.encoder is not None:
        encoder = dataclasses.replace(model.encoder, num_layers=len(model.encoder.layer_pattern))
        model = dataclasses.replace(model, encoder=encoder)
    return dataclasses.replace(experiment, model=model)


def other_kinds(base: Experiment, tried: set[type], within: str = "") -> Iterator[Experiment]:
    """Yield the experiment with each part replaced by each other kind, recursively.

    Args:
      base: The experiment.
      tried: Kinds to skip; those that are tried are added.
      within: Change only parts of the part of this name.
    """
    for path, known in kind_options(base):
        for kind, current_kind in known.items() if path.startswith(within) else ():
            if current_kind in tried:
                continue
            plain = experiment_to_dict(base)
            put(plain, path, {"kind": kind})
            try:
                other_experiment = experiment_from_dict(plain, "an experiment")
            except UserError:
                continue
            tried.add(current_kind)
            yield other_experiment
            yield from other_kinds(other_experiment, tried, f"{path}.")


def numbers_of(config: Any, path: str = "") -> Iterator[tuple[str, str, int | float]]:
    """Yield (class, dotted name, value) of every number."""
    if isinstance(config, tuple):
        for index, each in enumerate(config):
            yield from numbers_of(each, f"{path}.{index}")
    elif dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            value, name = getattr(config, field.name), f"{path}.{field.name}".lstrip(".")
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield type(config).__name__, name, value
            else:
                yield from numbers_of(value, name)


# Sweep: every setting that is a path, with each odd path.

ODD_PATHS: dict[str, Callable[[Path, str], str]] = {
    "folder": lambda folder, ending: make_folder(folder / f"odd{ending}"),
    "loop": lambda folder, ending: make_loop(folder / f"odd{ending}"),
    "no user": lambda folder, ending: f"~nouser/x{ending}",
    "NUL": lambda folder, ending: f"{folder}/a\0b{ending}",
    "newline": lambda folder, ending: f"{folder}/a\nb{ending}",
    "long": lambda folder, ending: f"{folder}/{'a' * 300}{ending}",
    "scheme": lambda folder, ending: f"nothing://x{ending}",
}


def make_folder(path: Path) -> str:
    """Make a folder."""
    path.mkdir()
    return str(path)


def make_loop(path: Path) -> str:
    """Make a link to itself."""
    path.symlink_to(path)
    return str(path)


def text_reader(name: str) -> Callable[[str, Path], object]:
    """Return a reader of a text with this setting."""
    return lambda path, folder: read_text(folder, **{name: path})


def read_with_tokenizer(path: str, folder: Path) -> None:
    """Read a text with a tokenizer's file."""
    read_text(folder, tokenizer=TokenizerConfig("file", path=path))


PATH_READERS: dict[str, tuple[str, Callable[[str, Path], object]]] = {
    "data.path": (".txt", text_reader("path")),
    "data.path, JSON lines": (".jsonl", text_reader("path")),
    "data.path, gzip": (".txt.gz", text_reader("path")),
    "data.validation_path": (".txt", text_reader("validation_path")),
    "data.test_path": (".txt", text_reader("test_path")),
    "data.cache_dir": ("", text_reader("cache_dir")),
    "data.tokenizer.path": (".json", read_with_tokenizer),
    "vocab.txt": (".txt", lambda path, _: Tokenizer.load(path)),
    "TSV": (".tsv", lambda path, _: read_labelled(path)),
    "CoNLL-U": (".conllu", lambda path, _: read_tagged(path)),
    "translations": (".en", lambda path, _: read_pairs(path.removesuffix(".en"))),
    "config": (".py", lambda path, _: find_experiment(path)),
    "prices": (".toml", lambda path, _: load_prices(path)),
    "workdir to read": ("", lambda path, _: RunFolder.open_existing(path)),
    "workdir to write": ("", lambda path, _: RunFolder.create(path)),
}
"""The ending of a path, and what reads it, of each setting."""


def paths() -> Iterator[Case]:
    """Yield each setting that is a path, with each odd path."""
    for setting in PATH_READERS:
        for kind in ODD_PATHS:
            yield Case(f"{setting}: {kind}", read_path, (setting, kind))


def read_path(folder: Path, given: tuple[str, str]) -> None:
    """Read an odd path as a setting."""
    setting, kind = given
    ending, read = PATH_READERS[setting]
    (folder / "good.txt").write_text("some words of a text\n" * 50)
    read(ODD_PATHS[kind](folder, ending), folder)


# Sweep: each field of each JSON file, of each other type.

OTHERS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**63, 10**400, -0.0),
    *(float("nan"), float("inf"), "", "x", "NaN", [], [None], {}, {"a": None}),
)
"""JSON values of other types."""

MAX_ENTRIES = 8
"""Of longer lists and objects, half as many entries are tried."""


def fields(scratch: Path) -> Iterator[Case]:
    """Yield each field of each JSON file with each other type."""
    for target in targets(scratch):
        for seed in target.seeds:
            for name, data in other_fields(seed):
                yield Case(f"{target.name}: {name}", target.use, data)


def other_fields(seed: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the file with one field of another type (for JSON lines, in the last line)."""
    try:
        before, tree = b"", [json.loads(seed)]
    except ValueError:
        first, _, last = seed.rstrip(b"\n").rpartition(b"\n")
        try:
            before, tree = first + b"\n", [json.loads(last)]
        except ValueError:
            return
    for path, container, key in list(places(tree, max_entries=MAX_ENTRIES)):
        value = container[key]
        for other in OTHERS:
            container[key] = other
            name = path.removeprefix(".0").removeprefix(".") or "all"
            yield f"{name} = {str(other)[:20]}", before + json.dumps(tree[0]).encode()
        container[key] = value


# Sweep: each command, with a full or closed standard output.


def outputs(scratch: Path) -> Iterator[Case]:
    """Yield each command with a full or closed output."""
    workdir = str(scratch / "whole")
    train.fit(tiny(scratch), workdir, quiet=True)
    commands = [
        *(["--help"], ["fit", "--help"], ["fit", "quickstart", "--help"], ["doctor"]),
        *(["describe", "quickstart"], ["describe", "quickstart", "--json"]),
        *(["plan", "quickstart", "--target", "h100:1", "--compile-best", "0"],),
        *(["evaluate", workdir], ["sample", workdir, "--prompt", "a"]),
        *(["goodput", workdir], ["goodput", workdir, "--json"], ["nothing"]),
    ]
    for command in commands:
        for kind in ("full", "closed", "unbuffered"):
            yield Case(f"{' '.join(command)}: {kind}", write_output, (command, kind))


def write_output(folder: Path, given: tuple[list[str], str]) -> None:
    """Run a command whose output cannot be written."""
    command, kind = given
    shell = f'exec "$0" -m train "$@" {">&-" if kind == "closed" else ">/dev/full"}'
    ran = subprocess.run(
        ["/bin/sh", "-c", shell, sys.executable, *command],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1" if kind == "unbuffered" else ""},
    )
    assert ran.returncode in (0, 1, 2), (ran.returncode, ran.stderr)
    assert "Traceback" not in ran.stderr, ran.stderr
    assert "Exception ignored" not in ran.stderr, ran.stderr
    if ran.returncode:
        raise UserError(ran.stderr)


def drill(cases: int = 10_000, only: str = "") -> int:
    """Print a table; end with a traceback of the first random finding.

    Findings of the sweeps are listed at the end, and then the exit status is 1.

    Args:
      cases: Number of cases, divided over the targets by their speed.
      only: Run only the targets and sweeps with this in their names.
    """
    findings: list[str] = []
    table = Table("input", "cases", "refused", "peak memory, MiB")

    def add_row(name: str, counts: dict[str, int]) -> None:
        table.add_row(name, *map(str, counts.values()), str(peak_memory() // 1024))

    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        chosen = [each for each in targets(base / "run") if only in each.name]
        weight = sum(each.weight for each in chosen)
        for number, target in enumerate(chosen):
            root = base / f"root-{number}"
            root.mkdir()
            add_row(target.name, fuzz(target, root, -(-cases * target.weight // weight)))
        scratch = base / "scratch"
        scratch.mkdir()
        sweeps = {
            "numbers of settings": numbers(),
            "paths": paths(),
            "fields of JSON": fields(scratch / "checkpoints"),
            "standard output": outputs(scratch),
        }
        for name, swept in sweeps.items():
            if only in name:
                root = base / f"sweep-{name.replace(' ', '-')}"
                root.mkdir()
                counts, found = sweep(swept, root)
                findings += found
                add_row(f"all {name}", counts)
    Console().print(table)
    print("\n".join(findings))
    return int(bool(findings))
