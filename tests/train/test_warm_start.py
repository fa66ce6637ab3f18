"""Runs that start with weights of another run, or from Python."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import train
from tests.train.resumed_runs import preempted_after
from tests.train.support import (
    NO_DETECTOR,
    assert_close,
    assert_same_bits,
    command,
    light_compiler,  # noqa: F401
    lines_of,
    shared_programs,  # noqa: F401
    tiny,
    write_config,
    write_text,
)
from train.checkpoint.tree_paths import named_leaves
from train.data.data_config import TokenizerConfig
from train.errors import UserError
from train.experiment import EmaConfig, Experiment
from train.run import Run
from train.run_folder.folder import RunFolder
from train.warm_start import VOCABULARY_TABLES, WarmStart, WarmStartSource, merge_params
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
    return tiny(folder, num_layers=1, dropout=0.0, recovery=NO_DETECTOR, **changes)


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
    (actual,) = [line for line in lines if line["event"] == name]
    return actual


@pytest.mark.slow
def test_init_from_all_weights_of_a_run(folder: Path, source: Run) -> None:
    run = started_with(folder, "all", make_experiment(folder), init_from=str(folder / "source"))
    assert_close(run.params, source.params, 1e-12)
    line = event(folder, "all", "warm start")
    assert line["source"] == str(folder / "source")
    assert len(line["taken"]) == len(jax.tree.leaves(source.params))
    assert line["left"] == line["new"] == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_resumed_run_does_not_need_its_source(folder: Path, source: Run) -> None:
    copy = shutil.copytree(folder / "source", folder / "copy")
    experiment = make_experiment(folder, steps=8)
    full = train.fit(experiment, str(folder / "whole"), quiet=True, init_from=str(copy))
    with preempted_after(4):
        train.fit(experiment, str(folder / "parts"), quiet=True, init_from=str(copy))
    shutil.rmtree(copy)
    parts = train.fit(experiment, str(folder / "parts"), quiet=True, init_from=str(copy))
    assert_same_bits(parts.params, full.params)


@pytest.mark.slow
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


@pytest.mark.slow
def test_other_tokenizer_takes_rows_of_shared_tokens(folder: Path, source: Run) -> None:
    data = dataclasses.replace(
        as_any(make_experiment(folder).data), tokenizer=TokenizerConfig("byte")
    )
    experiment = make_experiment(folder, data=data)
    run = started_with(folder, "bytes", experiment, init_from=str(folder / "source"))
    assert run.tokenizer is not None
    assert source.tokenizer is not None
    new, old = run.tokenizer.vocabulary, source.tokenizer.vocabulary
    assert "a" in new
    assert "a" in old
    rows = run.params[EMBEDDING], source.params[EMBEDDING]
    np.testing.assert_allclose(rows[0][new["a"]], rows[1][old["a"]])
    assert rows[0].shape != rows[1].shape


def test_rows_beyond_the_source_keep_their_initial_values() -> None:
    initial = {"embedding": jax.numpy.zeros((4, 3)), "output": jax.numpy.zeros((3, 4))}
    kwargs = {"embedding": np.ones((2, 3)), "output": np.ones((3, 2)), "extra": np.ones(2)}
    params, report = merge_params(initial, WarmStart(kwargs), None)
    assert params["embedding"][:, 0].tolist() == [1, 1, 0, 0]
    assert params["output"][0].tolist() == [1, 1, 0, 0]
    assert report.left == ("extra",)
    assert report.resized == {"embedding": 2, "output": 2}


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
def test_every_vocabulary_table_is_resized(name: str) -> None:
    axis = VOCABULARY_TABLES[name]
    shape = (5,) if "bias" in name else (5, 5)
    initial = {name: jax.numpy.zeros(shape)}
    kwargs = {name: np.ones(shape).take(range(3), axis)}
    params, report = merge_params(initial, WarmStart(kwargs), None)
    taken = np.moveaxis(np.asarray(params[name]), axis, -1).reshape(-1, 5)[0]
    assert taken.tolist() == [1, 1, 1, 0, 0]
    assert report.resized == {name: 3}


def test_other_shapes_raise_by_name() -> None:
    initial = {"layers": {"query": jax.numpy.zeros((4, 3))}, "bias": jax.numpy.zeros(2)}
    kwargs = {"layers": {"query": np.ones((2, 3))}, "bias": np.ones(2)}
    message = r"params: layers/query is \(2, 3\) there and \(4, 3\) in this model; give the sizes"
    with pytest.raises(UserError, match=message):
        merge_params(initial, WarmStart(kwargs), None)
    params, report = merge_params(initial, WarmStart(kwargs, only="bias"), None)
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
        (dict(params={"x": "text"}), "params: .*; give nested dicts of arrays"),
    ],
)
def test_invalid_sources_raise(options: Any, message: str, tmp_path: Path) -> None:
    def start() -> None:
        source = WarmStartSource(**options).read(RunFolder.create(tmp_path))
        assert source is not None
        merge_params({"bias": jax.numpy.zeros(2)}, source, None)

    with pytest.raises(UserError, match=message):
        start()


@pytest.mark.slow
def test_command_line(
    folder: Path, source: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_text(tmp_path / "text.txt")
    config = write_config(tmp_path, steps="1", num_layers="1", dropout="0.0")
    options = ["--init-from", str(folder / "source"), "--init-only", "layers"]
    done = command(capsys, "fit", config, "--workdir", str(tmp_path / "run"), *options)
    assert done.status == 0, done.error
    assert "initialized from the seed: " in done.output + done.error
