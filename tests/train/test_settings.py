import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import tiny
from train.data.config import DataConfig, TokenizerConfig
from train.errors import UserError
from train.experiment import Experiment
from train.optimizers import Muon
from train.settings import as_text, changes, flat, forbidden, from_plain, to_plain
from transformer import (
    AdditiveScore,
    ALiBi,
    AttentionConfig,
    BilinearScore,
    BlockConfig,
    BucketedBias,
    DotScore,
    FeedForwardConfig,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    NoPosition,
    NormConfig,
    NoScaling,
    NTKScaling,
    PerformerConfig,
    Precision,
    RelativePositions,
    Rotary,
    SinusoidalPositions,
    TransformerConfig,
    YaRNScaling,
)

UNUSUAL = Experiment(
    name="unusual é",
    model=TransformerConfig(
        width=24,
        pattern=(
            BlockConfig(mixer=AttentionConfig(heads=6, kv_heads=2, position=Rotary(base=77.0))),
            BlockConfig(
                mixer=AttentionConfig(heads=3, dropout=0.25),
                feed_forward=FeedForwardConfig(activation="silu", gated=True, bias=False),
                norm=NormConfig("rms"),
            ),
        ),
        position=LearnedPositions(512),
        final_norm=None,
        precision=Precision(compute="bfloat16", softmax="bfloat16"),
    ),
    data=DataConfig(path="a b.txt", tokenizer=TokenizerConfig("file", path="tokenizer.json")),
    optimizer=Muon(weight_decay=0.0),
)


def test_an_experiment_survives_json() -> None:
    """Unions, mixers, tuples, policies of one's own, and what is None."""
    text = json.dumps(to_plain(UNUSUAL))
    back = from_plain(json.loads(text), "here")
    assert back == UNUSUAL
    assert isinstance(back.model.pattern[0].mixer, AttentionConfig)
    assert back.model.pattern[0].mixer.position == Rotary(base=77.0)


ATTENTION: tuple[AttentionConfig, ...] = (
    AttentionConfig(position=RelativePositions(3), score=BilinearScore()),
    AttentionConfig(position=BucketedBias(8, 20, bidirectional=True), score=AdditiveScore(5)),
    AttentionConfig(position=ALiBi(), score=DotScore(), qk_norm=NormConfig("rms")),
    *(
        AttentionConfig(position=Rotary(base=77.0, scaling=scaling))
        for scaling in (
            NoScaling(),
            LinearScaling(2.0),
            NTKScaling(3.0),
            YaRNScaling(5.0, 77),
            Llama3Scaling(7.0, 2.0, 5.0, 99),
        )
    ),
)


@pytest.mark.parametrize("mixer", ATTENTION)
@pytest.mark.parametrize("position", [NoPosition(), LearnedPositions(512), SinusoidalPositions()])
def test_every_kind_of_position_and_score_survives_json(mixer: Any, position: Any) -> None:
    block = BlockConfig(mixer=mixer)
    model = TransformerConfig(width=24, pattern=(block,), position=position)
    experiment = Experiment(name="positions", model=model)
    text = json.dumps(to_plain(experiment))
    assert from_plain(json.loads(text), "here") == experiment


def test_names_and_values() -> None:
    settings = flat(UNUSUAL)
    assert settings["model.pattern.0.mixer.kind"] == "full"
    assert settings["model.pattern.0.mixer.heads"] == 6
    assert settings["model.pattern.0.mixer.position.base"] == 77.0
    assert settings["model.pattern.1.norm.kind"] == "rms"
    assert settings["model.position.kind"] == "LearnedPositions"
    assert settings["model.final_norm"] is None
    assert settings["model.precision"] == (
        "parameters=float32,compute=bfloat16,softmax=bfloat16,norm=float32,loss=float32"
    )
    assert list(settings) == sorted(settings)


def test_text_has_a_line_for_each_setting() -> None:
    lines = as_text(UNUSUAL).splitlines()
    assert len(lines) == len(flat(UNUSUAL))
    assert 'data.path = "a b.txt"' in lines
    assert "optimizer.weight_decay = 0.0" in lines
    assert "model.tied = true" in lines


def test_changes_are_told_by_name() -> None:
    other = dataclasses.replace(
        UNUSUAL,
        steps=7,
        model=dataclasses.replace(UNUSUAL.model, pattern=UNUSUAL.model.pattern[:1], width=48),
    )
    found = changes(UNUSUAL, other)
    assert found["steps"] == (1000, 7)
    assert found["model.width"] == (24, 48)
    assert found["model.pattern.1.mixer.heads"] == (3, None)
    assert changes(UNUSUAL, UNUSUAL) == {}
    assert "steps" not in forbidden(found)
    assert "model.width" in forbidden(found)


@pytest.mark.parametrize(
    "name",
    [
        "accumulate",
        "checkpoint.every",
        "compile",
        "data.cache",
        "data.path",
        "evaluation.batches",
        "log_every",
        "mesh.fsdp",
        "model.loop",
        "model.remat",
        "loss_scale.largest",
        "name",
        "optimizer.beta1",
        "optimizer.clip",
        "schedule.kind",
        "schedule.learning_rate",
        "sample.prompt",
        "steps",
    ],
)
def test_a_run_may_be_resumed_with_another(name: str) -> None:
    assert not forbidden({name: (1, 2)})
    assert name in flat(UNUSUAL)


@pytest.mark.parametrize(
    "name",
    [
        "batch_size",
        "data.segments",
        "data.sequence_length",
        "data.tokenizer.kind",
        "loss_scale.initial",
        "model.dropout",
        "model.pattern.0.mixer.heads",
        "model.precision",
        "seed",
    ],
)
def test_a_run_may_not_be_resumed_with_another(name: str) -> None:
    assert forbidden({name: (1, 2)}) == {name: (1, 2)}
    assert name in flat(UNUSUAL)


def test_random_features_may_be_drawn_anew() -> None:
    block = BlockConfig(mixer=PerformerConfig())
    model = TransformerConfig(width=16, layers=1, pattern=(block,))
    before = Experiment(name="a", model=model, data=DataConfig())
    pattern = (BlockConfig(mixer=PerformerConfig(redraw=1)),)
    after = dataclasses.replace(before, model=dataclasses.replace(model, pattern=pattern))
    assert changes(before, after) == {"model.pattern.0.mixer.redraw": (0, 1)}
    assert not forbidden(changes(before, after))


@pytest.mark.parametrize("name", ["optimizer.momentum", "ema.decay"])
def test_what_the_state_holds_may_not_change(name: str) -> None:
    assert forbidden({name: (0.9, 0.0)})
    assert forbidden({name: (0.0, 0.9)})
    assert not forbidden({name: (0.9, 0.5)})
    assert forbidden({"optimizer.kind": ("adamw", "lion")})


def damaged(**at_top: Any) -> dict[str, Any]:
    return {**to_plain(UNUSUAL), **at_top}


def with_mixer(mixer: dict[str, Any]) -> dict[str, Any]:
    plain = to_plain(UNUSUAL)
    plain["model"]["pattern"][0]["mixer"] = mixer
    return plain


@pytest.mark.parametrize(
    ("plain", "reason"),
    [
        (damaged(stepz=3), "stepz"),
        (damaged(steps="many"), "steps"),
        (damaged(steps=0), "steps 0: give 1 or more"),
        (damaged(model=None), "model"),
        (damaged(optimizer={"kind": "newton"}), "newton"),
        (with_mixer({"kind": "hyena"}), "kind hyena: is not known; it may be .*full"),
        (with_mixer({"heads": 3}), "missing .*mixer"),
        (with_mixer({"kind": "full", "teeth": 3}), "teeth"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_experiment(plain: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=r"W/config.json: .*" + reason) as caught:
        from_plain(plain, "W/config.json")
    assert "\n" not in str(caught.value)


def test_nothing_saved_is_executed() -> None:
    """A name chooses among the classes that are known: it is never imported."""
    for kind in ("os.system", "train.loop.fit", "__class__"):
        with pytest.raises(UserError, match="is not known"):
            from_plain(with_mixer({"kind": kind}), "here")


def test_experiments_on_disk_are_those_of_the_text(tmp_path: Path) -> None:
    first, second = tiny(tmp_path), tiny(tmp_path, steps=13)
    one, other = as_text(first).splitlines(), as_text(second).splitlines()
    assert set(other) - set(one) == {"steps = 13"}
