"""Every mesh trains like one device, with exactly the expected collectives."""

import dataclasses
import functools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.train.parallel.hlo import Program, array_shapes, find_collectives
from tests.train.parallel.meshes import (
    KINDS,
    Outcome,
    an_experiment,
    kinds_by_axis,
    largest_weight,
    train,
)
from tests.train.support import light_compiler as light_compiler
from train.assembly import make_engine
from train.errors import UsageError
from train.parallel.context_parallel import check_context_parallelism
from train.parallel.mesh import MeshConfig, make_mesh
from transformer import ALiBi, Hardware
from transformer.attention.variants.bigbird import BigBirdConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[str], Outcome]:
    """Results of training a model on one device."""
    return functools.cache(lambda model: train(folder, model, None))


@pytest.mark.sampled("[decoder-MeshConfig(data=2, fsdp=2")
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("decoder", MeshConfig(data=8)),
        ("decoder", MeshConfig(data=2, fsdp=2, tensor=2)),
        ("decoder", MeshConfig(data=2, context=4)),
        ("decoder", MeshConfig(data=1, fsdp=2, context=2, tensor=2)),
        ("encoder-decoder", MeshConfig(data=2, fsdp=2, tensor=2)),
        ("experts", MeshConfig(data=2, expert=2, context=2)),
        ("experts", MeshConfig(data=1, fsdp=2, expert=2, tensor=2)),
        ("capacity", MeshConfig(data=2, fsdp=2, expert=2)),
        ("capacity", MeshConfig(data=4, context=2)),
        ("windows", MeshConfig(data=2, context=4)),
        ("shared", MeshConfig(data=2, fsdp=2, tensor=2)),
        ("shared", MeshConfig(data=2, context=4)),
    ],
    ids=str,
)
def test_mesh_equals_one_device(
    folder: Path, alone: Callable[[str], Outcome], model: str, mesh: MeshConfig
) -> None:
    result, expected = train(folder, model, mesh), alone(model)
    np.testing.assert_allclose(result.losses, expected.losses, rtol=0, atol=1e-5)
    assert abs(expected.losses[-1] - expected.losses[0]) > 1e-3  # weights that are gathered
    several = {axis: size for axis, size in result.mesh.shape.items() if size > 1}
    expected_leaf = {axis: KINDS[axis] for axis in several}
    if model == "capacity" and mesh.expert > 1:
        expected_leaf["expert"] = {"all-reduce", "all-to-all"}
    if model == "capacity" and mesh.context > 1:  # slots are given in the order of all tokens
        expected_leaf["context"] = KINDS["context"] | {"all-gather"}
    assert kinds_by_axis(result.collectives) == expected_leaf
    for one in result.collectives:
        if one.kind == "all-gather" and "fsdp" in one.axes:
            assert one.axes == ("fsdp",)
            assert one.bytes <= largest_weight(result)
        if one.kind == "collective-permute":
            # Per layer, forward or backward. All layers share positions and segments, which may be
            # sent around the ring before the first layer.
            tokens = all(len(shape) == 2 for shape in one.shapes)
            assert one.count in ({mesh.context} if tokens else set()) | {3 * mesh.context}


@pytest.mark.nightly
def test_sixteen_devices_equal_one(folder: Path) -> None:
    """Four axes at once, in a process with sixteen devices."""
    program = "from tests.train.parallel.meshes import sixteen; sixteen()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


@pytest.mark.full
def test_weights_are_initialized_in_shards(folder: Path) -> None:
    """The program for the initial state has no collectives, and no device holds a whole weight."""
    mesh = MeshConfig(data=1, fsdp=2, tensor=4)
    engine = make_engine(an_experiment(folder, "decoder", mesh, width=64), Hardware(count=8))
    text = jax.jit(engine.init).lower().compile().as_text() or ""
    assert not find_collectives(text, engine.mesh)
    program = Program.parse(text)
    arrays = {
        shape
        for name, count in program.execution_counts().items()
        for instruction in program.computations[name].values()
        for shape in array_shapes(instruction.type)
        if count
    }
    largest = max(leaf.size for leaf in jax.tree.leaves(engine.abstract_state().params))
    assert max(math.prod(shape) for shape in arrays) <= largest // 4


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("decoder", {"mixer": BigBirdConfig(num_heads=4)}, "is bigbird, which cannot"),
        ("decoder", {"position": ALiBi()}, "dot products only, without a bias"),
        ("decoder", {"backend": "reference"}, "cannot serve tokens that are spread"),
        ("decoder", {"sequence_length": 14}, "does not divide into 4 pieces"),
        ("encoder-decoder", {}, "sequences of several lengths"),
    ],
)
def test_unsupported_context_parallelism(
    folder: Path, model: str, changes: dict[str, Any], message: str
) -> None:
    mesh = MeshConfig(context=2)
    experiment = an_experiment(folder, model, mesh, **changes)
    with pytest.raises((UsageError, ValueError), match=message):
        check_context_parallelism(experiment.model, experiment.data, make_mesh(mesh), Hardware())


def test_cpu_rejects_host_placement(folder: Path) -> None:
    experiment = an_experiment(folder, "decoder", MeshConfig(optimizer_placement="host"))
    with pytest.raises(UsageError, match="optimizer_placement host"):
        make_engine(experiment, Hardware(count=8))
    experiment = an_experiment(folder, "decoder", MeshConfig())
    model = dataclasses.replace(experiment.model, remat="offload")
    with pytest.raises(UsageError, match="remat offload"):
        make_engine(dataclasses.replace(experiment, model=model), Hardware(count=8))


def test_host_placement_of_moments(folder: Path) -> None:
    """Each moment is sharded like its weight, in host memory; counters stay on the device."""
    experiment = an_experiment(folder, "decoder", MeshConfig(fsdp=2, optimizer_placement="host"))
    shapes = make_engine(experiment, Hardware("tpu", "TPU v5e", 8)).abstract_state()
    moments = shapes.optimizer[0].mu
    for leaf, weight in zip(jax.tree.leaves(moments), jax.tree.leaves(shapes.params), strict=True):
        assert leaf.sharding.memory_kind == "pinned_host"
        assert leaf.sharding.spec == weight.sharding.spec
        assert weight.sharding.memory_kind != "pinned_host"
    assert shapes.step.sharding.memory_kind != "pinned_host"
