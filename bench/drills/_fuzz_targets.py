"""Readers of files and arguments that the fuzz drill tests, each with a strategy for its input."""

import dataclasses
import functools
import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from train.checkpoint.manager import CheckpointManager
from train.cli.config_verbs import FitArguments
from train.cli.parsing import Draft, parse
from train.config.experiment_files import find_experiment
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
from train.estimate.describe import describe
from train.experiment import Experiment
from train.resume import read_final_metrics
from train.rollback import Anomaly, RollbackRecord, plan_rollback
from train.run_folder.folder import RunFolder
from train.run_folder.run_config import read_auto_choices, read_experiment, read_labels
from train.telemetry.metrics_log import MetricsLog, read_metrics
from transformer.hardware import Hardware

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
