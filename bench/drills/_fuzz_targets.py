"""Readers of files and arguments that the fuzz drill tests."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from bench.drills import _fuzz_models
from train.checkpoint.manager import CheckpointManager
from train.cli.config_verbs import FitArguments
from train.cli.parsing import parse
from train.config.experiment_files import find_experiment
from train.config.io import experiment_to_dict, flatten_experiment
from train.data.bitext import BitextDataConfig, prepare_bitext
from train.data.corpus import prepare_text
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.data.text_labels import ClassificationDataConfig, prepare_classification
from train.data.token_labels import TokenLabelDataConfig, prepare_token_labels
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import train_tokenizer
from train.detector import RecoveryConfig
from train.experiment import Experiment
from train.resume import read_final_metrics
from train.rollback import Anomaly, RollbackRecord, plan_rollback
from train.run_folder.folder import RunFolder
from train.run_folder.run_config import read_auto_choices, read_experiment, read_labels
from train.telemetry.metrics_log import MetricsLog, read_metrics
from transformer.hardware import Hardware

Use = Callable[[pathlib.Path, Any], None]
"""(empty folder, input) -> None: use the input."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Reader under test, with valid examples of its input."""

    name: str
    use: Use
    seeds: Sequence[bytes] = (b"",)
    """Valid files."""
    weight: int = 10
    """Relative number of cases."""
    packed: bool = False
    """True if the files are gzipped."""
    arguments: Sequence[str] | None = None
    """Names of settings, if the input is command-line arguments."""
    drawn: st.SearchStrategy[Any] | None = None
    """Strategy for other inputs."""


def targets(scratch: pathlib.Path) -> list[Target]:
    """Return all targets; creates a small checkpoint in the scratch folder."""
    models = Target("models", _fuzz_models.use, weight=2, drawn=_fuzz_models.experiments())
    return [*run_folder(scratch), settings(), models, *datasets(), *tokenizers()]


def run_folder(scratch: pathlib.Path) -> list[Target]:
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
    return [
        Target("config.json", _config, [json.dumps(config).encode()], weight=20),
        Target("labels.json", _labels, [b'["a", "b"]']),
        Target("metrics.jsonl", _metrics, [_lines(metrics)]),
        Target("logbook.jsonl", _logbook, [_lines(events)]),
        Target("recovery.json", _recovery, [json.dumps(each).encode() for each in rollbacks]),
        _checkpoint(scratch),
    ]


def _lines(records: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _config(folder: pathlib.Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    run_folder = RunFolder.open_existing(folder)
    read_experiment(run_folder)
    read_auto_choices(run_folder, Hardware("cpu"))


def _labels(folder: pathlib.Path, data: bytes) -> None:
    (folder / "labels.json").write_bytes(data)
    read_labels(RunFolder(folder))


def _metrics(folder: pathlib.Path, data: bytes) -> None:
    (folder / "metrics.jsonl").write_bytes(data)
    with MetricsLog(folder / "metrics.jsonl", folder / "tensorboard") as log:
        log.set_aside_after(2)
    read_metrics(folder / "metrics.jsonl")


def _logbook(folder: pathlib.Path, data: bytes) -> None:
    (folder / "logbook.jsonl").write_bytes(data)
    read_final_metrics(RunFolder(folder), 3)


def _recovery(folder: pathlib.Path, data: bytes) -> None:
    (folder / "recovery.json").write_bytes(data)
    record = RollbackRecord.read(folder / "recovery.json")
    for each in record.rollbacks:
        np.int32(each.cursor), np.float32(each.rate)
    anomaly = Anomaly(8, 8, 12, "why")
    plan_rollback(anomaly, record.last, [2, 4], RecoveryConfig())


def _checkpoint(scratch: pathlib.Path) -> Target:
    """Return the target for manifests: a damaged one must never be accepted as valid."""
    with CheckpointManager(scratch) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
    files = {path.relative_to(scratch): path for path in scratch.rglob("*") if path.is_file()}
    intact = (scratch / "1" / "manifest/metadata").read_bytes()

    def use(folder: pathlib.Path, data: bytes) -> None:
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(path.read_bytes())
        (folder / "1" / "manifest/metadata").write_bytes(data)
        with CheckpointManager(folder) as checkpoints:
            newest = checkpoints.find_newest_valid().step
        assert newest == (1 if data == intact else None) or _fewer(data, intact)

    return Target("manifest", use, [intact])


def _fewer(data: bytes, intact: bytes) -> bool:
    """Return True for a manifest that lists a subset of the files of `intact`."""
    return json.loads(data)["files"].items() <= json.loads(intact)["files"].items()


def settings() -> Target:
    """Return the target for command-line arguments."""
    default = find_experiment("quickstart")
    names = [f"--{name.replace('_', '-')}" for name in flatten_experiment(default)]
    names += ["--optimizer.kind", "--data.kind", "--task.kind", "--help", "--", "--model"]

    def use(folder: pathlib.Path, arguments: list[str]) -> None:
        parse(FitArguments, arguments, verb="fit", experiment=default)

    return Target("settings", use, weight=4, arguments=names)


BYTES = TokenizerConfig("byte")
VOCABULARY = b'{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}'


def datasets() -> list[Target]:
    """Return targets for text and example files, read, split and encoded."""
    text = "".join(f"Line {n} of a text, naïve enough.\n" for n in range(20)).encode()
    json_lines = _lines([{"text": f"document {n}"} for n in range(9)])
    tsv = b"label\ttext\n" + b"".join(b"%d\ttext %d\n" % (n % 2, n) for n in range(9))
    first = b"".join(b"%s a question %d\n" % (b"DESC:x HUM:y".split()[n % 2], n) for n in range(9))
    word = "{}\tword{}\tlemma\tNOUN\tNN\t_\t0\troot\t_\t_\n"
    conllu = "".join(f"# s\n{word.format(1, n)}{word.format(2, n)}\n" for n in range(5)).encode()
    columns = b"-DOCSTART- -X- O O\n\n" + b"word NN B-NP\nof IN O\n\n" * 4
    return [
        Target("text", _text("a.txt"), [text]),
        Target("text, gzip", _text("a.txt.gz"), [text, b"\0" * 10**6], packed=True),
        Target("JSON lines", _text("a.jsonl"), [json_lines]),
        Target("JSON lines, gzip", _text("a.jsonl.gz"), [json_lines], packed=True),
        Target("TSV", _labelled("tsv"), [tsv]),
        Target("labels first", _labelled("label_first"), [first]),
        Target("CoNLL-U", _tagged, [conllu]),
        Target("columns", _tagged, [columns]),
        Target("translations", _parallel, [text]),
    ]


def _text(name: str) -> Use:
    def use(folder: pathlib.Path, data: bytes) -> None:
        (folder / name).write_bytes(data)
        config = TextDataConfig(path=str(folder / name), sequence_length=8, tokenizer=BYTES)
        prepare_text(dataclasses.replace(config, cache_dir=str(folder / "cache")))

    return use


def _labelled(kind: Any) -> Use:
    def use(folder: pathlib.Path, data: bytes) -> None:
        (folder / "a.tsv").write_bytes(data)
        path = str(folder / "a.tsv")
        prepare_classification(ClassificationDataConfig(path=path, format=kind, tokenizer=BYTES))

    return use


def _tagged(folder: pathlib.Path, data: bytes) -> None:
    (folder / "a.conllu").write_bytes(data)
    prepare_token_labels(TokenLabelDataConfig(path=str(folder / "a.conllu"), tokenizer=BYTES))


def _parallel(folder: pathlib.Path, data: bytes) -> None:
    for name in ("a.en", "a.de"):
        (folder / name).write_bytes(data)
    prepare_bitext(BitextDataConfig(path=str(folder / "a"), tokenizer=BYTES))


def tokenizers() -> list[Target]:
    """Return targets for foreign tokenizer files."""
    learned = train_tokenizer(TokenizerConfig("bpe", vocab_size=300), ["a few words of text"] * 3)
    vocabulary = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nword\n##s\n"
    return [
        Target("tokenizer.json", _tokenizer("tokenizer.json"), [learned.to_json().encode()]),
        Target("vocab.txt", _tokenizer("vocab.txt"), [vocabulary]),
        Target("vocab.json", _gpt2("vocab.json"), [VOCABULARY]),
        Target("merges.txt", _gpt2("merges.txt"), [b"#version: 0.2\na b\n"]),
    ]


def _tokenizer(name: str) -> Use:
    def use(folder: pathlib.Path, data: bytes) -> None:
        (folder / name).write_bytes(data)
        tokenizer = Tokenizer.load(folder / name)
        tokenizer.decode(tokenizer.encode("a word"))

    return use


def _gpt2(name: str) -> Use:
    def use(folder: pathlib.Path, data: bytes) -> None:
        (folder / "vocab.json").write_bytes(VOCABULARY)
        (folder / "merges.txt").write_bytes(b"a b\n")
        (folder / name).write_bytes(data)
        Tokenizer.load(folder)

    return use
