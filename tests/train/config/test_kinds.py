import dataclasses
from typing import Any

import pytest

import train
from tests.train.support import Outcome, command, write_config
from train.cli.parsing import kind_options, kinds_help, parse, select_kinds
from train.config.io import classes_by_kind, kind_name
from train.errors import UsageError
from train.experiment import Experiment
from train.optim.elementwise import AdamW, Lion
from train.optim.optimizer import Optimizer
from train.optim.optimizer_registry import OPTIMIZERS
from transformer import BlockConfig, LearnedPositions, NoPosition, NormConfig, TransformerConfig
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


def test_new_kind_has_its_own_defaults() -> None:
    flags = ["--steps", "3", "--optimizer.kind", "lion", "--optimizer.beta2=0.9"]
    changed, left = select_kinds(TWO, flags)
    assert changed.optimizer == Lion()
    assert changed.model == TWO.model
    assert left == ["--steps", "3", "--optimizer.beta2=0.9"]


def test_same_kind_keeps_its_settings() -> None:
    for arguments in (["--optimizer.kind=adamw"], ["--optimizer.kind", "adamw"]):
        assert select_kinds(TWO, arguments) == (TWO, [])


def test_nested_kinds() -> None:
    arguments = [
        "--model.layer-pattern.1.mixer.kind=convolution",
        "--model.layer-pattern.0.mixer.position.kind=RoPE",
        "--model.layer-pattern.0.mixer.position.scaling.kind=YaRNScaling",
        "--model.layer-pattern.0.feed-forward.kind=mixture",
    ]
    changed, left = select_kinds(TWO, arguments)
    first, second = changed.model.layer_pattern
    assert (first.mixer.kind, second.mixer.kind) == ("full", "convolution")
    assert isinstance(first.mixer, AttentionConfig)
    assert type(first.mixer.position).__name__ == "RoPE"
    assert type(getattr(first.mixer.position, "scaling", None)).__name__ == "YaRNScaling"
    assert getattr(first.feed_forward, "kind", None) == "mixture"
    assert left == []


@dataclasses.dataclass(frozen=True)
class Left:
    size: int = 1


@dataclasses.dataclass(frozen=True)
class Right:
    size: int = 2


@dataclasses.dataclass(frozen=True)
class Pair:
    one: Left | Right = Left()
    other: Left | Right = Left()

    def __post_init__(self) -> None:
        if type(self.one) is not type(self.other):
            raise ValueError("one and other: are not of a kind")


def test_dependent_kinds_change_together() -> None:
    flags = ["--one.kind=Right", "--other.kind", "Right"]
    assert select_kinds(Pair(), flags) == (Pair(Right(), Right()), [])
    selected, left = select_kinds(Pair(), flags[:1])
    with pytest.raises(UsageError, match="not of a kind"):
        parse(Pair, left, verb="fit", default=selected)


def test_validation_of_a_new_kind_waits_for_its_other_flags() -> None:
    """The new data's default length, 128, exceeds the model's position table."""
    model = TransformerConfig(position_embedding=LearnedPositions(64), num_layers=1)
    text = train.TextDataConfig(sequence_length=64)
    start = Experiment(model=model, data=text)
    kinds = ["--task.kind=Classification", "--data.kind=ClassificationDataConfig"]

    def parsed(*flags: str) -> Experiment:
        selected, left = select_kinds(start, [*kinds, "--model.no-causal", *flags])
        return parse(Experiment, left, verb="fit", default=selected)

    assert parsed("--data.max-length", "32").data == train.ClassificationDataConfig(max_length=32)
    with pytest.raises(UsageError, match=r"^data\.max_length 128: the model's table of positions"):
        parsed()


def test_a_boolean_flag_takes_a_value() -> None:
    def parsed(*flags: str) -> Experiment:
        return parse(Experiment, flags, verb="fit", default=TWO)

    assert not parsed("--model.causal", "False", "--steps", "3").model.causal
    assert not parsed("--model.no-causal").model.causal
    assert parsed("--debug_checks", "true").debug_checks
    assert parsed("--debug-checks").debug_checks
    with pytest.raises(UsageError, match=r"^1: no such setting; see"):
        parsed("--debug-checks", "1")


def test_other_arguments_are_left_and_unknown_kinds_refused() -> None:
    for arguments in (
        ["--data.tokenizer.kind", "bpe"],
        ["--optimizer.kind"],
        ["--no.kind", "lion"],
    ):
        assert select_kinds(TWO, arguments) == (TWO, arguments)
    with pytest.raises(UsageError, match=r"optimizer.kind lyon: is unknown; give one of sgd, "):
        select_kinds(TWO, ["--optimizer.kind", "lyon"])


def test_help_lists_the_kinds_of_all_fields() -> None:
    fields = {"optimizer", "task", "model.position_embedding", "model.layer_pattern.1.mixer"}
    assert fields <= dict(kind_options(TWO)).keys()
    assert f"--optimizer.kind {{{','.join(OPTIMIZERS)}}}" in kinds_help(TWO)
    assert kinds_help(NormConfig()) == ""


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
