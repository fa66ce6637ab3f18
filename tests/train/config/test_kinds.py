import dataclasses
from typing import Any, ClassVar

import pytest

import train
from tests.train.support import Outcome, command, write_config
from train.cli.config_verbs import ConfigArguments
from train.cli.parsing import parse
from train.config.io import classes_by_kind, kind_name
from train.errors import UsageError
from train.experiment import Experiment
from train.optim.elementwise import AdamW, Lion
from train.optim.optimizer import Optimizer
from train.optim.optimizer_registry import OPTIMIZERS
from train.optim.schedules import SCHEDULES, LearningRateSchedule, ScheduleConfig
from transformer import (
    BlockConfig,
    LearnedPositions,
    NoPosition,
    NormConfig,
    RoPE,
    TransformerConfig,
    YaRNScaling,
)
from transformer.attention.full import AttentionConfig
from transformer.attention.mixer import MIXERS, MixerConfig

TWO = Experiment(
    model=TransformerConfig(num_layers=2, layer_pattern=(BlockConfig(), BlockConfig())),
    optimizer=AdamW(beta2=0.7),
)


def test_classes_by_kind() -> None:
    assert classes_by_kind(Optimizer) == OPTIMIZERS
    assert classes_by_kind(NoPosition | LearnedPositions | None) == {
        "NoPosition": NoPosition,
        "LearnedPositions": LearnedPositions,
    }
    for mixer in (MixerConfig, MixerConfig | None):
        assert classes_by_kind(mixer)["full"] is AttentionConfig
        assert set(classes_by_kind(mixer)) == set(MIXERS)
    for other in (NormConfig, NormConfig | None, int, str | None, tuple[BlockConfig, ...]):
        assert classes_by_kind(other) == {}


def test_class_with_kind_field_uses_class_name() -> None:
    assert kind_name(NormConfig) == "NormConfig"
    assert kind_name(Lion) == "lion"


def parsed(base: Experiment, *flags: str) -> Experiment:
    return parse(ConfigArguments, flags, verb="fit", experiment=base).experiment


def test_new_kind_has_its_own_defaults() -> None:
    flags = ["--steps", "3", "--optimizer.kind", "lion", "--optimizer.beta2=0.9"]
    changed = parsed(TWO, *flags)
    assert changed == dataclasses.replace(TWO, steps=3, optimizer=Lion(beta2=0.9))


def test_same_kind_keeps_its_settings() -> None:
    for arguments in (["--optimizer.kind=adamw"], ["--optimizer.kind", "adamw"], []):
        assert parsed(TWO, *arguments) == TWO


def test_nested_kinds() -> None:
    changed = parsed(
        TWO,
        "--model.layer-pattern.1.mixer.kind=convolution",
        "--model.layer-pattern.0.mixer.position.scaling.kind=YaRNScaling",
        "--model.layer-pattern.0.mixer.position.scaling.factor=3",
        "--model.layer-pattern.0.mixer.position.kind=RoPE",
        "--model.layer-pattern.0.feed-forward.kind=mixture",
        "--model.layer-pattern.1.feed-forward.kind=None",
    )
    first, second = changed.model.layer_pattern
    assert (first.mixer.kind, second.mixer.kind) == ("full", "convolution")
    assert isinstance(first.mixer, AttentionConfig)
    assert isinstance(first.mixer.position, RoPE)
    assert isinstance(first.mixer.position.scaling, YaRNScaling)
    assert first.mixer.position.scaling.factor == 3
    assert getattr(first.feed_forward, "kind", None) == "mixture"
    assert second.feed_forward is None


def test_a_part_that_is_missing_can_be_given() -> None:
    flag = "--model.layer-pattern.0.cross-attention.kind"
    assert parsed(TWO, flag, "full").model.layer_pattern[0].cross_attention == AttentionConfig()
    assert parsed(TWO, flag, "None") == TWO


def test_a_schedule_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Steep(LearningRateSchedule):
        kind: ClassVar[str] = "steep"
        slope: float = 2.0

        def make(self, *, steps: int, width: int) -> Any:
            raise NotImplementedError

    monkeypatch.setitem(SCHEDULES, "steep", Steep)
    steep = parsed(TWO, "--schedule.kind", "steep", "--schedule.slope", "3")
    assert steep.schedule == Steep(3.0)
    back = parsed(steep, "--schedule.kind", "linear", "--schedule.warmup-steps", "7")
    assert back.schedule == ScheduleConfig("linear", warmup_steps=7)


def test_validation_of_a_new_kind_waits_for_its_other_flags() -> None:
    """The new data's default length, 128, exceeds the model's position table."""
    model = TransformerConfig(position_embedding=LearnedPositions(64), num_layers=1)
    start = Experiment(model=model, data=train.TextDataConfig(sequence_length=64))
    flags: tuple[str, ...] = ("--task.kind=Classification", "--data.kind=ClassificationDataConfig")
    flags += ("--model.no-causal",)
    short = parsed(start, *flags, "--data.max-length", "32")
    assert short.data == train.ClassificationDataConfig(max_length=32)
    with pytest.raises(UsageError, match=r"^data\.max_length 128: the model's table of positions"):
        parsed(start, *flags)


def test_switches() -> None:
    assert not parsed(TWO, "--model.no-causal").model.causal
    assert parsed(TWO, "--debug-checks").debug_checks
    assert parsed(TWO, "--model.causal") == TWO


def test_kind_flags_on_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)

    def described(*arguments: str) -> Outcome:
        return command(capsys, "describe", config, "--model.vocab-size", "30", *arguments)

    adamw, lion = described("--json"), described("--json", "--optimizer.kind", "lion")
    assert (adamw.status, lion.status) == (0, 0)
    assert adamw.output != lion.output
    ignored = described("--optimizer.kind", "sgd", "--optimizer.beta1", "0.5")
    assert (ignored.status, "--optimizer.beta1" in ignored.error) == (2, True)


def test_a_class_of_ones_own_takes_no_kind_of_another() -> None:
    @dataclasses.dataclass(frozen=True)
    class Mine(AdamW):
        pass

    @dataclasses.dataclass(frozen=True)
    class TextDataConfig(train.TextDataConfig):
        pass

    with pytest.raises(ValueError, match=r"optimizer adamw: is the kind of .*AdamW"):
        train.register_optimizer(Mine)
    with pytest.raises(ValueError, match=r"dataset TextDataConfig: is the kind of"):
        train.register_dataset(TextDataConfig)
    assert OPTIMIZERS["adamw"] is AdamW
