"""The LoRA step: memory of the compiled program, devices, precision, and estimates."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.train.support import (
    NO_DETECTOR,
    assert_close,
    light_compiler,  # noqa: F401
    random_rows,
    tiny,
)
from train.assembly import make_engine
from train.engines.engine import Engine
from train.engines.lora import LoRAConfig
from train.errors import UserError
from train.estimate.batch_shapes import sharded_batch_shapes
from train.estimate.describe import describe
from train.parallel.mesh import MeshConfig
from train.parallel.sharding import leaf_shardings
from train.run_folder.base_weights import BASE_KEY, base_digest, check_base
from train.run_folder.folder import RunFolder
from transformer import Hardware, Precision
from transformer.quantization import quantize_weights

VOCAB, STEPS = 30, 3


def make_experiment(folder: Path, **changes: Any) -> Any:
    lora = LoRAConfig(rank=2, targets=("all",))
    settings: dict[str, Any] = {"lora": lora, "recovery": NO_DETECTOR} | changes
    experiment = tiny(folder, **settings)
    model = dataclasses.replace(
        experiment.model, vocab_size=VOCAB, precision=Precision.parse("float32")
    )
    return dataclasses.replace(experiment, model=model)


def trained(engine: Engine) -> Any:
    """Return the adapter after some steps on base weights from another seed."""
    assert engine.lora is not None
    placed = jax.tree.map(lambda leaf: leaf.sharding, engine.abstract_state())
    params = jax.jit(engine.model.init_params)(jax.random.key(5))
    params = quantize_weights(params, engine.model.logical_axes(), engine.quantization)
    shardings = leaf_shardings(engine.abstract_frozen())
    engine.frozen = jax.device_put(engine.lora.freeze(params), shardings)
    state = jax.device_put(engine.init(), placed)
    for cursor in range(STEPS):
        rows = random_rows(8, VOCAB, cursor=cursor)
        state, metrics = engine.step(state, engine.put_batch(rows))
        assert np.isfinite(float(metrics["loss"]))
    return jax.tree.map(np.asarray, state.params)


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(make_engine(make_experiment(tmp_path_factory.mktemp("one")), Hardware()))


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": MeshConfig(data=1, fsdp=4, tensor=2)},
        {"mesh": MeshConfig(data=2, fsdp=2, tensor=2), "grad_accum_steps": 2},
        {"compile": "pmap"},
    ],
)
def test_eight_devices_equal_one(
    tmp_path: Path, on_one_device: Any, changes: dict[str, Any]
) -> None:
    eight = trained(make_engine(make_experiment(tmp_path, **changes), Hardware(count=8)))
    assert_close(eight, on_one_device, 1e-4)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_shards_of_a_quantized_base_equal_one_device(tmp_path: Path, kind: Any) -> None:
    lora, mesh = (
        LoRAConfig(2, targets=("all",), quantize=kind),
        MeshConfig(data=1, fsdp=4, tensor=2),
    )
    engine = make_engine(make_experiment(tmp_path, lora=lora, mesh=mesh), Hardware(count=8))
    query = engine.abstract_frozen()["layers"]["place_0"]["mixer"]["query"]
    assert query.codes.sharding.spec[1:3] == ("fsdp", "tensor")
    one = trained(make_engine(make_experiment(tmp_path, lora=lora), Hardware()))
    assert_close(trained(engine), one, 1e-4)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["bfloat16", "pure_bfloat16", "float16"])
def test_factors_are_float32_for_any_policy(tmp_path: Path, policy: str) -> None:
    experiment = make_experiment(tmp_path, num_layers=1, dropout=0.0)
    model = dataclasses.replace(experiment.model, precision=Precision.parse(policy))
    engine = make_engine(dataclasses.replace(experiment, model=model), Hardware())
    after = trained(engine)
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {np.dtype("float32")}
    place = after["layers"]["place_0"]["mixer"]["query"]
    assert np.any(place["lora_b"] != 0)


@pytest.mark.full
def test_compiled_step_has_no_gradients_or_moments_of_frozen_weights(tmp_path: Path) -> None:
    """Arguments shrink by two float32 moments, temporaries by the gradients of frozen weights."""
    sizes: dict[int, tuple[int, int, int, int]] = {}
    for rank in (0, 2):
        plain: Any = {"num_layers": 1, "dropout": 0.0, "batch_size": 1}
        experiment = make_experiment(tmp_path, lora=LoRAConfig(rank), **plain)
        model = dataclasses.replace(experiment.model, d_model=256)
        experiment = dataclasses.replace(experiment, model=model)
        engine = make_engine(experiment, Hardware())
        batch: Any = sharded_batch_shapes(experiment, engine.mesh)
        program = engine.lower_step(engine.abstract_state(), batch).compile()
        stats: Any = program.memory_analysis()
        arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
        described = describe(experiment)
        weights, optimizer = described.memory.weights, described.memory.optimizer
        # The rest is counters and the batch.
        assert 0 <= arguments - weights - optimizer < 20_000
        sizes[rank] = arguments, temporaries, described.memory.gradients, described.trainable
    (full, full_temp, gradients, count), (lora, lora_temp, _, trainable) = sizes.values()
    assert trainable == 2 * 2 * (256 + 256)
    assert full - lora > 1.9 * 4 * count
    assert full_temp - lora_temp > 0.5 * gradients


def test_base_weights_of_another_run_are_refused(tmp_path: Path) -> None:
    manifest = tmp_path / "base" / "0" / "manifest" / "metadata"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("digests of one run")
    folder = RunFolder(tmp_path)
    metadata = {BASE_KEY: base_digest(folder)}
    check_base(folder, metadata, 3)
    manifest.write_text("digests of another")
    with pytest.raises(UserError, match="not the weights that checkpoint 3 was trained on"):
        check_base(folder, metadata, 3)
