"""LoRA over a quantized base, and runs that are loaded in few bits."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from tests.train.lora.test_lora_runs import LORA, adapted, make_experiment
from tests.train.resumed_runs import preempted_after
from tests.train.support import (
    assert_same_bits,
    light_compiler,  # noqa: F401
    shared_programs,  # noqa: F401
)
from train.assembly import make_engine
from train.checkpoint.tree_paths import named_leaves
from train.engines.lora import LoRAConfig
from train.errors import UsageError
from train.estimate.quantities import StateShapes
from train.interop import lora_export
from train.parallel.mesh import MeshConfig
from train.run import Run, load
from transformer import Hardware
from transformer.layers.low_rank import LowRankWeight, merge_weights
from transformer.layers.quantized import QuantizedWeight
from transformer.quantization import quantize_weights

QUERY = ("layers", "place_0", "mixer", "query")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized_runs")


@pytest.fixture(scope="module")
def source(folder: Path) -> Run:
    experiment = make_experiment(folder, dropout=0.0, steps=4)
    return train.fit(experiment, str(folder / "source"), quiet=True)


def quantized(folder: Path, **changes: Any) -> Any:
    lora = LoRAConfig(LORA.rank, targets=LORA.targets, quantize="int4", **changes)
    return adapted(folder, lora=lora)


@pytest.fixture(scope="module")
def run(folder: Path, source: Run) -> Run:
    return train.fit(
        quantized(folder), str(folder / "lora"), init_from=str(folder / "source"), quiet=True
    )


def at(params: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        params = params[name]
    return params


def test_base_is_rounded_once_and_the_run_reloads(folder: Path, source: Run, run: Run) -> None:
    """Evaluated from its folder, a run gives the metrics with which its training ended."""
    loaded = load(str(folder / "lora"))
    weight = at(loaded.params, QUERY)
    assert isinstance(weight, LowRankWeight)
    assert isinstance(weight.base, QuantizedWeight)
    axes = source.model.logical_axes()
    expected = quantize_weights(source.params, axes, "int4")
    assert_same_bits(lora_export.base_params(loaded), expected)
    assert_same_bits(loaded.params, run.params)
    assert loaded.evaluate("validation") == run.final_metrics


def test_resume_is_exact(folder: Path, run: Run) -> None:
    with preempted_after(8):
        train.fit(
            quantized(folder), str(folder / "cut"), init_from=str(folder / "source"), quiet=True
        )
    resumed = train.fit(quantized(folder), str(folder / "cut"), quiet=True)
    assert_same_bits(resumed.params, run.params)


def test_fully_trained_matrices_stay_floats(folder: Path, source: Run) -> None:
    """A matrix of codes has no gradient: its updates would be lost without an error."""
    trained = ("layers/place_0/feed_forward/down",)
    experiment = quantized(folder, train_fully=trained)
    engine = make_engine(dataclasses.replace(experiment, model=source.experiment.model), Hardware())
    assert engine.lora is not None
    base = engine.abstract_base()
    assert not isinstance(base["layers"]["place_0"]["feed_forward"]["down"], QuantizedWeight)
    assert isinstance(at(base, QUERY), QuantizedWeight)


def test_plan_counts_the_bytes_of_the_base(run: Run) -> None:
    shapes = StateShapes.from_experiment(run.experiment)
    engine = make_engine(run.experiment, Hardware())
    num_bytes = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves((engine.abstract_frozen(), engine.abstract_state().params))
    )
    assert shapes.bytes_per_chip(MeshConfig(data=1)).weights == num_bytes


def test_merged_run_computes_what_was_trained(folder: Path, run: Run) -> None:
    merged = lora_export.merge_run(str(folder / "lora"), str(folder / "merged"))
    assert_same_bits(merged.params, merge_weights(run.params))


def test_adapter_starts_from_a_quantized_run(folder: Path, run: Run) -> None:
    """A source of codes and updates gives its merged weights to a run of floats."""
    experiment = make_experiment(folder, dropout=0.0, steps=1)
    started = train.fit(
        experiment, str(folder / "full"), init_from=str(folder / "lora"), quiet=True
    )
    query = np.asarray(at(started.params, QUERY))
    np.testing.assert_allclose(query, at(merge_weights(run.params), QUERY), atol=0.02)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_loaded_weights_are_those_of_the_run_in_few_bits(
    folder: Path, source: Run, kind: Any
) -> None:
    loaded = load(str(folder / "source"), quantize=kind)
    axes = source.model.logical_axes()
    assert_same_bits(loaded.params, quantize_weights(source.params, axes, kind))
    floats = {name for name, leaf in named_leaves(loaded.params).items() if leaf.dtype == "float32"}
    assert "embedding" in floats
    assert "layers/place_0/mixer/query/codes" not in floats
    loss = loaded.evaluate("validation")["loss"]
    assert loss == pytest.approx(source.final_metrics["loss"], abs=0.02)
    assert loaded.generate("a", max_new_tokens=3) is not None
    tokens = jnp.zeros((1, 4), jnp.int32)
    logits = loaded.model.apply({"params": loaded.params}, tokens).logits
    expected = loaded.model.apply({"params": merge_weights(loaded.params)}, tokens).logits
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_unknown_format_is_refused(folder: Path, source: Run) -> None:
    with pytest.raises(UsageError, match="quantize 'int3': is not known; give one of none, int8"):
        load(str(folder / "source"), quantize="int3")  # type: ignore[arg-type]
