import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.train.support import LENGTH, tiny
from train.data.batches import host_rows
from train.data.token_file import TokenStream
from train.engines.engine import Engine
from train.errors import UsageError
from train.evaluation.evaluator import evaluate_split
from train.experiment import EvaluationConfig, Experiment
from train.parallel.mesh import MeshConfig, make_mesh
from train.state import TrainState
from train.step import Batch, Metrics
from transformer.losses import Loss


class FakeEngine(Engine):
    """Engine in which the loss of a token is its number, scaled by the parameters."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.model: Any = None
        self.batches: list[dict[str, np.ndarray]] = []

    def put_batch(self, rows: dict[str, np.ndarray]) -> Any:
        self.batches.append(rows)
        return rows

    def evaluate(self, params: Any, batch: Batch) -> dict[str, Any]:
        loss = params * np.sum(np.asarray(batch["targets"] * batch["weights"], np.float64))
        return {"loss": Loss(loss, np.sum(batch["weights"]))}

    def init(self, params: Any = None) -> TrainState:
        raise NotImplementedError

    def abstract_state(self) -> TrainState:
        raise NotImplementedError

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        raise NotImplementedError


def a_stream(tokens: int, size: int) -> TokenStream:
    numbers = np.random.RandomState(0).randint(1, 9, tokens).astype(np.uint16)
    numbers[[0, -1]] = 0
    return TokenStream("validation", numbers, np.array([0]), num_bytes=size)


def an_experiment(folder: Path, **evaluation: Any) -> Experiment:
    return tiny(folder, evaluation=EvaluationConfig(**evaluation))


class Streams:
    """Corpus of one text."""

    def __init__(self, stream: TokenStream):
        self.stream = stream

    def split(self, name: str) -> TokenStream:
        return self.stream


def evaluate_stream(
    engine: Engine, params: Any, stream: TokenStream, experiment: Experiment, *, whole: bool
) -> dict[str, float]:
    corpus: Any = Streams(stream)
    return evaluate_split(experiment, engine, params, corpus, "validation", whole=whole)


def on(devices: int) -> FakeEngine:
    return FakeEngine(make_mesh(MeshConfig(), jax.devices()[:devices]))


def test_every_token_counts_once(tmp_path: Path) -> None:
    """The metrics by hand, on a text that fills neither its last window nor its last batch."""
    stream = a_stream(tokens=1 + 21 * LENGTH + 5, size=700)
    experiment = an_experiment(tmp_path)
    result = evaluate_stream(on(1), 0.25, stream, experiment, whole=True)
    loss = 0.25 * float(stream.tokens[1:].mean(dtype=np.float64))
    assert result["loss"] == pytest.approx(loss, rel=1e-12)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-12)
    bits = loss * stream.num_targets / math.log(2) / 700
    assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert set(result) == {"loss", "perplexity", "bits_per_byte"}
    assert {type(value) for value in result.values()} == {float}


def test_evaluation_during_training_is_limited(tmp_path: Path) -> None:
    stream = a_stream(tokens=1 + 40 * LENGTH, size=700)
    for batches, whole, used in ((3, False, 3), (3, True, 5), (0, False, 5)):
        engine = on(1)
        experiment = an_experiment(tmp_path, num_batches=batches)
        evaluate_stream(engine, 1.0, stream, experiment, whole=whole)
        assert len(engine.batches) == used
        assert {len(rows["tokens"]) for rows in engine.batches} == {8}


@pytest.mark.parametrize(
    ("asked", "devices", "size"), [(0, 8, 8), (3, 1, 3), (3, 8, 8), (20, 8, 24)]
)
def test_batches_divide_among_devices(tmp_path: Path, asked: int, devices: int, size: int) -> None:
    """The metrics do not depend on batch size or window length."""
    stream = a_stream(tokens=1 + 40 * LENGTH, size=700)
    expected = evaluate_stream(on(1), 0.5, stream, an_experiment(tmp_path), whole=True)
    engine = on(devices)
    experiment = an_experiment(tmp_path, batch_size=asked)
    assert evaluate_stream(engine, 0.5, stream, experiment, whole=True) == expected
    assert {len(rows["tokens"]) for rows in engine.batches} == {size}


def test_overlapping_windows_count_no_token_twice(tmp_path: Path) -> None:
    stream = a_stream(tokens=1 + 9 * LENGTH + 3, size=100)
    full, strided = (
        evaluate_stream(on(1), 1.0, stream, an_experiment(tmp_path, stride=stride), whole=True)
        for stride in (0, 5)
    )
    assert strided == pytest.approx(full, rel=1e-12)


def test_perplexity_of_a_diverged_model_is_finite(tmp_path: Path) -> None:
    actual = evaluate_stream(on(1), 1e6, a_stream(100, 99), an_experiment(tmp_path), whole=True)
    assert math.isfinite(actual["perplexity"])


def test_each_host_reads_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = a_stream(tokens=1 + 21 * LENGTH + 5, size=700)
    full, quarter = on(1), on(1)
    evaluate_stream(full, 1.0, stream, an_experiment(tmp_path), whole=True)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    evaluate_stream(quarter, 1.0, stream, an_experiment(tmp_path), whole=True)
    assert host_rows(8, 2, 4) == (4, 6)
    for mine, all_rows in zip(quarter.batches, full.batches, strict=True):
        np.testing.assert_array_equal(mine["tokens"], all_rows["tokens"][4:6])


def test_stride_must_not_exceed_the_window(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"evaluation\.stride 17: is beyond data\.sequence_length"):
        dataclasses.replace(tiny(tmp_path), evaluation=EvaluationConfig(stride=17))
