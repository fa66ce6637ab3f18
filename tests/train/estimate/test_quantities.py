import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import LENGTH, tiny
from tests.train.support import light_compiler as light_compiler
from train.assembly import make_engine
from train.data.bitext import BitextDataConfig
from train.errors import UsageError
from train.estimate.compile import bytes_per_device
from train.estimate.quantities import StateShapes, trace_residuals
from train.experiment import Experiment
from train.optim.optimizer_registry import OPTIMIZERS
from train.parallel.mesh import MeshConfig
from train.state import EmaConfig
from train.tasks.translation import Translation
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    Hardware,
    Precision,
    SlidingWindowConfig,
    TransformerConfig,
)

HARDWARE = Hardware("cpu", count=8)


def sized(experiment: Experiment, **changes: Any) -> Experiment:
    """Return the experiment with a vocabulary of 24 tokens, and other changes of its model."""
    model = dataclasses.replace(experiment.model, vocab_size=24, **changes)
    return dataclasses.replace(experiment, model=model)


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("adamw", MeshConfig(data=8)),
        ("adamw8bit", MeshConfig(2, fsdp=4)),
        ("muon", MeshConfig(2, fsdp=4)),
        ("adafactor", MeshConfig(2, fsdp=4)),
        ("adafactor", MeshConfig(1, fsdp=2, tensor=4)),
        ("muon", MeshConfig(1, fsdp=2, tensor=4)),
    ],
)
def test_state_bytes_match_the_engine(tmp_path: Path, kind: Any, mesh: MeshConfig) -> None:
    experiment = sized(
        tiny(tmp_path, num_layers=1, optimizer=OPTIMIZERS[kind](), ema=EmaConfig(0.9), mesh=mesh)
    )
    result = StateShapes.from_experiment(experiment).bytes_per_chip(mesh)
    state = make_engine(experiment, HARDWARE).abstract_state()
    assert result.weights == bytes_per_device(state.params)
    assert result.optimizer == bytes_per_device(state.optimizer)
    assert result.other == bytes_per_device(state.ema)
    assert result.gradients == result.weights  # parameters are float32


def test_indivisible_mesh_is_an_error(tmp_path: Path) -> None:
    states = StateShapes.from_experiment(sized(tiny(tmp_path, num_layers=1)))
    with pytest.raises(UsageError, match="does not divide into 3 parts"):
        states.bytes_per_chip(MeshConfig(data=1, tensor=3))


def test_offload_is_planned_without_host_memory_space(tmp_path: Path) -> None:
    """`offload` is not supported on this CPU, but can be planned for an accelerator."""
    plain, kept = (
        StateShapes.from_experiment(sized(tiny(tmp_path, num_layers=1), remat=remat))
        for remat in ("none", "offload")
    )
    assert kept.bytes_per_chip(MeshConfig(2, fsdp=4)) == plain.bytes_per_chip(MeshConfig(2, fsdp=4))


@pytest.mark.parametrize(
    ("platform", "mixer"),
    [
        ("tpu", AttentionConfig(num_heads=4)),
        ("tpu", SlidingWindowConfig(num_heads=4, window=64)),
        ("gpu", SlidingWindowConfig(num_heads=4, window=64)),
    ],
)
def test_residuals_are_traced_without_the_hardware(
    tmp_path: Path, platform: Any, mixer: Any
) -> None:
    """Kernels in an encoder, in cross attention and in mixers that call `attend` themselves."""
    block = BlockConfig(mixer=mixer)
    encoder = EncoderConfig(num_layers=1, layer_pattern=(BlockConfig(AttentionConfig(4)),))
    pattern = (dataclasses.replace(block, cross_attention=AttentionConfig(num_heads=4)),)
    model = TransformerConfig(
        vocab_size=32,
        d_model=32,
        num_layers=1,
        layer_pattern=pattern,
        encoder=encoder,
        precision=Precision.parse("bfloat16"),
    )
    data = BitextDataConfig(max_length=256, batch_tokens=1024)
    experiment = Experiment(model=model, task=Translation(), data=data, batch_size=8)
    saved = trace_residuals(experiment, Hardware(platform, compute_capability="9.0"), "none")
    scores = 3 * 2 * 4 * 256 * 256  # of three attentions, in 16 bits
    # Splash has no cross attention, whose scores are saved.
    assert (saved.replicated_per_row + saved.sharded_per_row < scores) is (platform == "gpu")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_residuals_of_a_row_do_not_depend_on_the_number_of_devices(
    tmp_path: Path, platform: Any
) -> None:
    """A kernel serves on a mesh, which is not known while the model is traced."""
    experiment = sized(tiny(tmp_path, num_layers=1), precision=Precision.parse("bfloat16"))
    one, eight = (
        trace_residuals(experiment, Hardware(platform, count=n, compute_capability="9.0"), "none")
        for n in (1, 8)
    )
    assert one == eight


def test_residuals_shrink_with_remat(tmp_path: Path) -> None:
    chip = Hardware("tpu", "TPU v4")
    none, full = (trace_residuals(sized(tiny(tmp_path)), chip, r) for r in ("none", "full"))
    inputs = 2 * LENGTH * 16 * 4  # of two layers, D 16
    assert inputs <= sum(full) < inputs + LENGTH * 16 * 4 * 8
    assert sum(none) > 4 * sum(full)
