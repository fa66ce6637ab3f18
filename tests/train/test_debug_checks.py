"""`debug_checks` names values that are not finite or out of range."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from bench.drills.faults import Fault, planted
from tests.train.support import assert_same_bits, lines_of, tiny
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from tests.train.test_step import STEP, make_batch, make_state
from train.assembly import engine_config
from train.engines.compiled_step import make_train_step
from train.engines.debug_checks import (
    CheckedTrainStep,
    check_batch_tokens,
    check_finite,
    finite_flags,
)
from train.errors import UserError
from train.experiment import Experiment
from train.run_setup import RunSetup
from train.state import LossScale, LossScaleConfig
from train.step import TrainStep
from transformer import EncoderConfig, TransformerConfig

NAN = float("nan")


def stages(**changed: float) -> dict[str, Any]:
    """Return the arrays of a step; `changed` names the stages with one bad entry."""

    def tree(value: float) -> dict[str, Any]:
        return {
            "b": {"weight": np.array([1.0, value], np.float32)},
            "a": np.zeros(3, np.float32),
        }

    names = ("params", "losses", "grads", "updated_params")
    return {name: tree(changed.get(name, 2.0)) for name in names}


@jax.jit
def flags_of(arrays: dict[str, Any]) -> dict[str, jax.Array]:
    return finite_flags(**arrays)


def test_flags_are_removed_from_the_metrics() -> None:
    metrics = {"loss": jnp.float32(1), **flags_of(stages())}
    assert len(metrics) == 1 + 8
    assert check_finite(3, 2, metrics) == {"loss": 1}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"grads": NAN}, "grads/b/weight"),
        ({"updated_params": np.inf}, "updated_params/b/weight"),
        ({"updated_params": NAN, "grads": NAN, "losses": -np.inf}, "losses/b/weight"),
        ({"losses": NAN, "params": NAN}, "params/b/weight"),
    ],
)
def test_first_bad_array_is_named(changed: dict[str, float], name: str) -> None:
    with pytest.raises(UserError, match=f"^debug_checks: step 3, batch 2: {name} is not finite; "):
        check_finite(3, 2, flags_of(stages(**changed)))


@pytest.mark.parametrize("scale", [None, LossScale.create(LossScaleConfig(init_scale=8.0))])
def test_checked_step_makes_the_same_update(scale: LossScale | None) -> None:
    fields = {field.name: getattr(STEP, field.name) for field in dataclasses.fields(STEP)}
    step, batch = CheckedTrainStep(**fields), make_batch()
    both = jax.jit(lambda *given: (STEP(*given), step(*given)))
    (expected, usual), (state, metrics) = both(make_state(scale=scale), batch)
    assert_same_bits(state.params, expected.params)
    # With a loss scale gradients may overflow: they have no flag.
    assert len(metrics) - len(usual) == (5 if scale is None else 4)
    assert check_finite(1, 0, metrics).keys() == usual.keys()
    bad = batch | {"targets": batch["targets"].at[1, 0].set(NAN)}
    with pytest.raises(UserError, match="step 1, batch 0: losses/error is not finite"):
        check_finite(1, 0, both(make_state(scale=scale), bad)[1][1])
    for checked, kind in ((True, CheckedTrainStep), (False, TrainStep)):
        config = engine_config(Experiment(debug_checks=checked))
        assert type(make_train_step(config, STEP.loss_fn, {}, width=1)) is kind


@pytest.mark.parametrize(
    ("name", "ids", "message"),
    [
        ("tokens", [3, 11], "tokens has id 11, and the vocabulary has 11"),
        ("tokens", [-1, 3], "tokens has id -1, and the vocabulary has 11"),
        ("source", [17, 0], "source has id 17, and the vocabulary has 17"),
    ],
)
def test_ids_beyond_the_vocabulary(name: str, ids: list[int], message: str) -> None:
    config = TransformerConfig(vocab_size=11, encoder=EncoderConfig(num_layers=1, vocab_size=17))
    rows = {"tokens": np.array([[0, 10]]), "source": np.array([[0, 16]])}
    check_batch_tokens(5, rows, config)
    check_batch_tokens(5, {"targets": np.array([-100])}, config)
    with pytest.raises(UserError, match=f"^debug_checks: batch 5: {message}; prepare the data"):
        check_batch_tokens(5, rows | {name: np.array([ids])}, config)


def experiment_with_checks(folder: Path) -> Experiment:
    return tiny(folder, num_layers=1, dropout=0.0, steps=5, debug_checks=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checks")


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "name"),
    [(Fault(3, weight=NAN), "losses/loss"), (Fault(3, factor=NAN), "grads/embedding")],
    ids=["loss", "gradients"],
)
def test_planted_nan_is_named(folder: Path, tmp_path: Path, fault: Fault, name: str) -> None:
    message = f"^debug_checks: step 4, batch 3: {name} is not finite"
    with planted(fault), pytest.raises(UserError, match=message):
        train.fit(experiment_with_checks(folder), str(tmp_path / "run"), quiet=True)
    assert [line["step"] for line in lines_of(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.full
def test_planted_token_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RunSetup.__init__

    def plant(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        host_batch = self.batches.host_batch

        def bad_batch(cursor: int, *hosts: int) -> Any:
            rows = host_batch(cursor, *hosts)
            return rows | {"tokens": rows["tokens"] + 1000 * (cursor == 2)}

        monkeypatch.setattr(self.batches, "host_batch", bad_batch)

    monkeypatch.setattr(RunSetup, "__init__", plant)
    with pytest.raises(UserError, match=r"^debug_checks: batch 2: tokens has id 10\d\d, and the"):
        train.fit(experiment_with_checks(folder), str(tmp_path / "run"), quiet=True)
