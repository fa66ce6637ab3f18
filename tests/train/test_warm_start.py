"""Runs that start with weights of another run, or from Python."""

import dataclasses
import gc
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import train
from bench.drills.faults import Fault, planted
from tests.train.resumed_runs import preempted_after
from tests.train.support import (
    NO_DETECTOR,
    assert_close,
    assert_same_bits,
    light_compiler,  # noqa: F401
    lines_of,
    shared_programs,  # noqa: F401
    tiny,
)
from train.assembly import make_engine
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.tree_paths import named_leaves
from train.detector import RecoveryConfig
from train.errors import UserError
from train.experiment import CheckpointConfig, Experiment
from train.run import Run
from train.run_folder.folder import RunFolder
from train.run_setup import RunSetup
from train.runtime.local_hardware import local_hardware
from train.state import EmaConfig
from train.telemetry.event_log import EventLog
from train.warm_start.sources import (
    VOCABULARY_TABLES,
    WarmStart,
    WarmStartReport,
    WarmStartSource,
    check_same_weights,
    copy_as,
    explain_unread_source,
    merge_params,
    seeded_weights,
)
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    EncoderDecoder,
    LanguageModel,
    MaskedLanguageModel,
    Model,
    TransformerConfig,
)
from transformer.layers.logical_axes import LogicalAxes

EMBEDDING = "embedding"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def make_experiment(folder: Path, **changes: Any) -> Experiment:
    settings = {"num_layers": 1, "dropout": 0.0, "recovery": NO_DETECTOR, **changes}
    return tiny(folder, **settings)


@pytest.fixture(scope="module")
def source(folder: Path) -> Run:
    return train.fit(make_experiment(folder, steps=4), str(folder / "source"), quiet=True)


def as_any(value: Any) -> Any:
    """Return a setting untyped, for a class that the type checker does not know."""
    return value


def started_with(folder: Path, name: str, experiment: Experiment, **options: Any) -> Run:
    """Return a one-step run with a negligible learning rate: its weights are its initial ones."""
    schedule: Any = dataclasses.replace(as_any(experiment.schedule), learning_rate=1e-20)
    experiment = dataclasses.replace(experiment, steps=1, schedule=schedule)
    return train.fit(experiment, str(folder / name), quiet=True, **options)


def event(folder: Path, run: str, name: str) -> dict[str, Any]:
    lines = lines_of(folder / run / "logbook.jsonl")
    [found] = [line for line in lines if line["event"] == name]
    return found


def test_init_from_all_weights_of_a_run(folder: Path, source: Run) -> None:
    run = started_with(folder, "all", make_experiment(folder), init_from=str(folder / "source"))
    assert_close(run.params, source.params, 1e-12)
    line = event(folder, "all", "warm start")
    assert line["source"] == str(folder / "source")
    assert len(line["taken"]) == len(jax.tree.leaves(source.params))
    assert line["left"] == line["new"] == []


@pytest.mark.full
def test_init_only_a_pattern_from_python(folder: Path, source: Run) -> None:
    """The source is not donated: it can be used afterwards."""
    experiment = make_experiment(folder, ema=EmaConfig(0.9))
    run = started_with(folder, "some", experiment, params=source.params, init_only="*/mixer/*")
    mixer = {name for name in named_leaves(source.params) if "/mixer/" in name}
    actual: Any = named_leaves(run.params)
    given: Any = named_leaves(source.params)
    for name, leaf in given.items():
        if name in mixer:
            np.testing.assert_allclose(actual[name], leaf, atol=1e-12)
    assert not np.allclose(actual[EMBEDDING], source.params[EMBEDDING], atol=1e-3)


@pytest.mark.parametrize(
    ("begun", "request_", "note"),
    [
        ({"source": "a"}, WarmStartSource(init_from="a"), ""),
        ({"source": "a"}, WarmStartSource(init_from="./a"), ""),
        ({"source": "a"}, WarmStartSource(), ""),
        ({"source": "a"}, WarmStartSource(init_from="b"), "began with the weights of a."),
        (None, WarmStartSource(init_from="b"), "did not begin with another's."),
        (
            {"source": "a"},
            WarmStartSource(init_from="a", init_only="layers"),
            "of a, but not with the same part of them.",
        ),
    ],
)
def test_a_resumed_run_tells_that_another_source_is_not_read(
    tmp_path: Path, begun: Any, request_: WarmStartSource, note: str
) -> None:
    folder = RunFolder.create(tmp_path / "run")
    log = EventLog(folder.event_log)
    log.write("started", step=0)
    if begun is not None:
        log.write("warm start", only="", adapter="", **begun)
    found = explain_unread_source(folder, request_)
    assert (found == "") == (note == "")
    assert note.removesuffix(".") in found


@pytest.mark.full
def test_resumed_run_does_not_need_its_source(folder: Path, source: Run) -> None:
    copy = shutil.copytree(folder / "source", folder / "copy")
    experiment = make_experiment(folder, steps=8)
    full = train.fit(experiment, str(folder / "whole"), quiet=True, init_from=str(copy))
    with preempted_after(4):
        train.fit(experiment, str(folder / "parts"), quiet=True, init_from=str(copy))
    shutil.rmtree(copy)
    parts = train.fit(experiment, str(folder / "parts"), quiet=True, init_from=str(copy))
    assert_same_bits(parts.params, full.params)


@pytest.mark.full
def test_tokenizer_comes_from_the_source(folder: Path, source: Run) -> None:
    other = folder / "other.txt"
    other.write_text("the cat sat on the mat.\n" * 60)
    data = dataclasses.replace(as_any(make_experiment(folder).data), path=str(other))
    experiment = make_experiment(folder, data=data)
    run = started_with(folder, "kept", experiment, init_from=str(folder / "source"))
    assert run.tokenizer is not None
    assert source.tokenizer is not None
    assert run.tokenizer.digest == source.tokenizer.digest
    assert_close(run.params, source.params, 1e-12)


@pytest.mark.full
def test_rollback_to_the_start_begins_with_the_source_again(folder: Path, source: Run) -> None:
    recovery = RecoveryConfig(window=16, warmup=8, patience=2, rollback_steps=4, skip_batches=3)
    experiment = make_experiment(
        folder, steps=30, recovery=recovery, checkpoint=CheckpointConfig(every=0)
    )
    with planted(Fault(first=20, count=3, words=20)):
        train.fit(experiment, str(folder / "back"), quiet=True, init_from=str(folder / "source"))
    assert event(folder, "back", "rolled back")["checkpoint"] == 0
    engine = make_engine(train.load(str(folder / "back")).experiment, local_hardware())
    with CheckpointManager(folder / "back" / "checkpoints") as checkpoints:
        start = checkpoints.restore(0, engine.abstract_state()).state
    assert_same_bits(start.params, source.params)


@pytest.mark.full
def test_freed_weights_are_read_again_for_the_start(
    folder: Path, source: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of the source holds in any working folder, and in another process."""
    experiment = make_experiment(folder, steps=2)
    request = WarmStartSource(init_from="source")
    monkeypatch.chdir(folder)
    train.fit(experiment, str(folder / "freed"), quiet=True, init_from="source")
    with RunFolder.created(str(tmp_path / "new")) as new:
        setup = RunSetup(experiment, new, local_hardware(), request)
        weights = weakref.ref(setup.warm_start)
        assert weights() is not None
        setup.release_warm_start()
        if weights() is not None:  # a cycle; it takes a second in a process with many objects
            gc.collect()
        assert weights() is None
    monkeypatch.chdir(tmp_path)
    freed = RunFolder.open_existing(str(folder / "freed"))
    setup = RunSetup(experiment, freed, local_hardware(), WarmStartSource())
    assert_same_bits(setup.init_state().params, source.params)


def test_source_of_an_earlier_start_is_that_of_this_run(tmp_path: Path) -> None:
    folder = RunFolder.created(str(tmp_path / "run"))
    with folder as run:
        log = EventLog(run.event_log)
        log.write("started", step=0, new=True)
        log.write("warm start", source="/a", source_step=7, only="", adapter="")
        log.write("started", step=0, new=False)
        assert WarmStartSource.of_earlier_start(run).init_from == "/a"
        check_same_weights(run, None)
        check_same_weights(run, WarmStart({}, "/a", step=7))
        with pytest.raises(UserError, match="init_from /a: has weights of step 9 now, and this"):
            check_same_weights(run, WarmStart({}, "/a", step=9))
        log.write("started", step=0, new=True)  # its checkpoints were deleted
        log.write("resumed", step=3, new=False)
        assert WarmStartSource.of_earlier_start(run) == WarmStartSource()
        assert "did not begin with another's" in explain_unread_source(
            run, WarmStartSource(init_from="/a")
        )


def merged(
    initial: Any, warm_start: WarmStart, tokenizer: Any = None
) -> tuple[Any, WarmStartReport, list[str]]:
    """Return what `merge_params` does, and the weights that it draws, from a tree."""
    own, drawn = named_leaves(initial), list[str]()

    def draw(wanted: Mapping[str, Any]) -> dict[str, Any]:
        drawn.extend(wanted)
        return {name: as_any(own[name]) for name in wanted}

    return *merge_params(initial, draw, warm_start, tokenizer), drawn


def test_only_missing_weights_are_drawn() -> None:
    initial = {name: jax.numpy.zeros((3, 2)) for name in ("body", "embedding", "head")}
    source = {"body": np.ones((3, 2)), "embedding": np.ones((2, 2)), "extra": np.ones(2)}
    params, report, drawn = merged(initial, WarmStart(source))
    assert drawn == ["head", "embedding"]
    assert report == WarmStartReport(
        taken=("body", "embedding"), left=("extra",), new=("head",), resized={"embedding": 2}
    )
    assert {name: float(leaf.sum()) for name, leaf in params.items()} == {
        "body": 6,
        "embedding": 4,
        "head": 0,
    }
    assert report.as_dict()["left"] == ["extra"]
    assert [line.rpartition(": ")[2] for line in report.lines("runs/x")] == [
        "body, embedding",
        "of embedding the rows of 2 tokens, which runs/x has too",
        "head",
        "extra",
    ]
    assert report._replace(left=tuple("abcde")).lines("x")[-1].endswith(": a, b, c, d and 1 more")


def test_rows_of_tokens_that_both_vocabularies_have_are_taken() -> None:
    """Also where the tables have one shape."""
    old = as_any(SimpleNamespace(digest="old", vocabulary={"a": 0, "b": 2, "c": 1}))
    new = SimpleNamespace(digest="new", vocabulary={"c": 0, "d": 1, "a": 2})
    source = {"embedding": np.arange(6.0).reshape(3, 2), "output": np.arange(6.0).reshape(2, 3)}
    initial = {"embedding": jax.numpy.full((3, 2), -1.0), "output": jax.numpy.full((2, 3), -1.0)}
    params, report, _ = merged(initial, WarmStart(source, tokenizer=old), new)
    assert params["embedding"].tolist() == [[2, 3], [-1, -1], [0, 1]]
    assert params["output"].tolist() == [[1, -1, 0], [4, -1, 3]]
    assert report.resized == {"embedding": 2, "output": 2}
    params, report, _ = merged(initial, WarmStart(source, tokenizer=old), old)
    assert params["embedding"].tolist() == source["embedding"].tolist()
    assert report.resized == {}


def test_head_of_another_task_or_number_of_labels_is_new() -> None:
    initial = {"body": jax.numpy.zeros(2), "head": jax.numpy.zeros((2, 3))}
    for labels, other_task, taken in (
        (3, False, ("body", "head")),
        (3, True, ("body",)),
        (5, False, ("body",)),
    ):
        source = {"body": np.ones(2), "head": np.ones((2, labels))}
        _, report, _ = merged(initial, WarmStart(source, has_other_task=other_task))
        assert report.taken == taken


def test_some_weights_are_drawn_as_with_all_others() -> None:
    config = TransformerConfig(vocab_size=7, d_model=8, num_layers=1)
    model = LanguageModel(config)
    placed = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    key, _ = jax.random.split(jax.random.key(3))
    every: Any = named_leaves(model.init_params(key))
    name = max(every, key=lambda each: every[each].size)
    shape = jax.ShapeDtypeStruct(every[name].shape, every[name].dtype, sharding=placed)
    drawn = seeded_weights(model, 3)({name: shape})
    assert_same_bits(drawn, {name: every[name]})


@pytest.mark.parametrize("kind", [np.asarray, jax.numpy.asarray], ids=["numpy", "jax"])
def test_copies_have_memory_of_their_own(kind: Callable[..., Any]) -> None:
    """A CPU device may use the memory of an array of NumPy. The step writes into it."""
    value = kind(np.arange(1024, dtype=np.float32))
    like = jax.numpy.zeros(1024)
    copied = copy_as(value, like)
    again = jax.jit(lambda x: x + 1, donate_argnums=0)(copied)
    assert float(again[-1]) == 1024
    assert float(value[-1]) == 1023
    low = copy_as(value, jax.numpy.zeros(1024, "bfloat16"))
    assert (low.dtype.name, float(low[1])) == ("bfloat16", 1)


def models_with_vocabularies() -> list[Model]:
    """Return models that together have every parameter with an entry per token."""
    config = TransformerConfig(vocab_size=7, d_model=8, num_layers=1, tie_embeddings=False)
    blocks = (BlockConfig(cross_attention=AttentionConfig()),)
    encoder = EncoderConfig(num_layers=1, vocab_size=5)
    return [
        LanguageModel(config),
        MaskedLanguageModel(dataclasses.replace(config, causal=False)),
        EncoderDecoder(
            dataclasses.replace(config, layer_pattern=blocks, encoder=encoder, logit_bias=True)
        ),
    ]


def test_every_vocabulary_table_is_known() -> None:
    """By the logical axes; a missed table would fail with a shape error."""
    result = set()
    for model in models_with_vocabularies():
        leaves, _ = jax.tree.flatten_with_path(
            model.logical_axes(), is_leaf=lambda each: isinstance(each, LogicalAxes)
        )
        for path, axes in leaves:
            if "vocab" in axes.names:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                assert axes.names[VOCABULARY_TABLES[name]] == "vocab"
                result.add(name)
    assert result == set(VOCABULARY_TABLES)


@pytest.mark.parametrize("name", VOCABULARY_TABLES)
def test_rows_beyond_the_source_keep_their_initial_values(name: str) -> None:
    axis = VOCABULARY_TABLES[name]
    shape = (5,) if "bias" in name else (5, 5)
    source = {name: np.ones(shape).take(range(3), axis)}
    params, report, _ = merged({name: jax.numpy.zeros(shape)}, WarmStart(source))
    rows = np.moveaxis(np.asarray(params[name]), axis, -1).reshape(-1, 5)
    assert rows.tolist() == [[1, 1, 1, 0, 0]] * len(rows)
    assert report.resized == {name: 3}


def test_other_shapes_raise_by_name() -> None:
    initial = {"layers": {"query": jax.numpy.zeros((4, 3))}, "bias": jax.numpy.zeros(2)}
    kwargs = {"layers": {"query": np.ones((2, 3))}, "bias": np.ones(2)}
    message = r"params: layers/query is \(2, 3\) there and \(4, 3\) in this model; take that run's"
    with pytest.raises(UserError, match=message):
        merged(initial, WarmStart(kwargs))
    params, report, _ = merged(initial, WarmStart(kwargs, only="bias"))
    assert params["bias"].tolist() == [1, 1]
    assert (report.taken, report.left, report.new) == (
        ("bias",),
        ("layers/query",),
        ("layers/query",),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(init_only="layers"), "init_only layers: give init_from or params"),
        (dict(params={}, init_from="runs/x"), "init_from runs/x: params are given too"),
        (dict(params={"x": np.ones(2)}), "params: has no weights of this model"),
        (dict(params={"x": "text"}), "params: x is of type str; give nested dicts of arrays"),
        (
            dict(params={"a": {"b": np.ones(2)}, "a/b": np.ones(2)}),
            "params: a/b names two arrays; rename one of them",
        ),
    ],
)
def test_invalid_sources_raise(options: Any, message: str, tmp_path: Path) -> None:
    def start() -> None:
        source = WarmStartSource(**options).read(RunFolder.create(tmp_path))
        assert source is not None
        merged({"bias": jax.numpy.zeros(2)}, source)

    with pytest.raises(UserError, match=message):
        start()
