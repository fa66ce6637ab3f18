"""A kernel that does not compile is replaced, and the run reports it."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

import train
from tests.train.support import NO_DETECTOR, lines_of, tiny
from tests.train.support import light_compiler as light_compiler
from train.data.bitext import BitextDataConfig
from train.experiment import Experiment
from train.runtime import backend_probes
from train.tasks.translation import Translation
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    FeedForwardConfig,
    Hardware,
    Precision,
    SlidingWindowConfig,
    TransformerConfig,
)
from transformer.baselines.recurrent import LSTMConfig

TPU = Hardware("tpu", "TPU v5 lite")


def without_dropout(folder: Path) -> Experiment:
    """Return an experiment whose model the kernels support."""
    block = BlockConfig(mixer=AttentionConfig(num_heads=4), feed_forward=FeedForwardConfig(d_ff=24))
    experiment = tiny(folder, steps=2, recovery=NO_DETECTOR)
    model = TransformerConfig(
        d_model=16, num_layers=1, layer_pattern=(block,), pad_vocab_to_multiple=32
    )
    return dataclasses.replace(experiment, model=model)


def mark_broken_kernels(experiment: Experiment, hardware: Hardware) -> Hardware:
    return backend_probes.mark_broken_kernels(
        experiment.model,
        experiment.sequence_length,
        hardware,
        segments=experiment.has_segments,
        on_mesh=experiment.compile == "jit" and hardware.count > 1,
    )


def fail() -> None:
    raise ValueError("Failed to deserialize the Mosaic module:\n expected <= 7 but got 8")


def test_only_used_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    for name in backend_probes.KERNEL_PROBES:
        monkeypatch.setitem(
            backend_probes.KERNEL_PROBES, name, functools.partial(compiled.append, name)
        )
    experiment = without_dropout(tmp_path)
    assert mark_broken_kernels(experiment, Hardware()) == Hardware()
    assert mark_broken_kernels(tiny(tmp_path), TPU) == TPU  # kernels do not support its dropout
    assert compiled == []
    assert mark_broken_kernels(experiment, TPU) == TPU
    assert compiled == ["splash"]


@pytest.mark.parametrize("place", ["layer_pattern", "encoder", "cross_attention"])
def test_kernels_of_every_attention_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A sliding window calls its kernel itself; encoders and cross attention have theirs."""
    monkeypatch.setitem(backend_probes.KERNEL_PROBES, "cudnn", fail)
    window = BlockConfig(mixer=SlidingWindowConfig(num_heads=2, window=8))
    recurrent: Any = BlockConfig(mixer=LSTMConfig())
    crossing = dataclasses.replace(recurrent, cross_attention=AttentionConfig(num_heads=2))
    experiment = without_dropout(tmp_path)
    changes: Any = {
        "layer_pattern": {"layer_pattern": (window,)},
        "encoder": {"layer_pattern": (recurrent,), "encoder": EncoderConfig(1, (window,))},
        "cross_attention": {
            "layer_pattern": (crossing,),
            "encoder": EncoderConfig(1, (recurrent,)),
        },
    }[place]
    precision = Precision.parse("bfloat16")
    model = dataclasses.replace(experiment.model, precision=precision, **changes)
    if place != "layer_pattern":
        data = BitextDataConfig(max_length=16, batch_tokens=256)
        experiment = dataclasses.replace(experiment, task=Translation(), data=data, model=model)
    experiment = dataclasses.replace(experiment, model=model)
    gpu = Hardware("gpu", "NVIDIA H200", 1, "9.0")
    why = "Failed to deserialize the Mosaic module: expected <= 7 but got 8"
    assert mark_broken_kernels(experiment, gpu).broken_kernels == (("cudnn", why),)


def test_cudnn_is_not_used_under_deterministic_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where the model would use it: never in float32."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    gpu = Hardware("gpu", "NVIDIA H200", 1, "9.0")
    float32 = without_dropout(tmp_path)
    model = dataclasses.replace(
        float32.model,
        layer_pattern=(BlockConfig(mixer=AttentionConfig(num_heads=2)),),
        precision=Precision.parse("bfloat16"),
    )
    bfloat16 = dataclasses.replace(float32, model=model)
    assert mark_broken_kernels(float32, gpu) == gpu
    marked = mark_broken_kernels(bfloat16, gpu)
    [(name, reason)] = marked.broken_kernels
    assert (name, "--xla_gpu_deterministic_ops" in reason) == ("cudnn", True)
    assert mark_broken_kernels(bfloat16, marked) == marked


def test_run_uses_fallback_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The TPU's real kernel, which no CPU compiles."""
    monkeypatch.setattr("train.fitting.local_hardware", lambda: TPU)
    train.fit(without_dropout(tmp_path), str(tmp_path / "run"))
    [event] = [
        each for each in lines_of(tmp_path / "run/logbook.jsonl") if each["event"] == "fell back"
    ]
    assert event["kernel"] == "splash"
    assert event["reason"]
    assert "mixer.backend = reference" in (tmp_path / "run/config.txt").read_text()
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("attention kernel splash: cannot be compiled here") == 1
