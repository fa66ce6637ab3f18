import dataclasses
import json
from typing import Any

import pytest

from train.config.experiment_files import find_experiment
from train.config.io import (
    diff_experiments,
    experiment_from_dict,
    experiment_to_dict,
    experiment_to_text,
    flatten_experiment,
    forbidden_changes,
    is_within,
    non_resumable_fields,
)
from train.data.data_config import SourceConfig, TextDataConfig, TokenizerConfig
from train.errors import UserError
from train.experiment import Experiment
from train.optim.muon import Muon
from transformer import (
    AdditiveScore,
    ALiBi,
    AttentionConfig,
    BilinearScore,
    BlockConfig,
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
    RoPE,
    SinusoidalPositions,
    T5RelativeBias,
    TransformerConfig,
    YaRNScaling,
)

UNUSUAL = Experiment(
    name="unusual é",
    model=TransformerConfig(
        d_model=24,
        layer_pattern=(
            BlockConfig(
                mixer=AttentionConfig(num_heads=6, num_kv_heads=2, position=RoPE(theta=77.0))
            ),
            BlockConfig(
                mixer=AttentionConfig(num_heads=3, dropout=0.25),
                feed_forward=FeedForwardConfig(activation="silu", gated=True, bias=False),
                norm=NormConfig("rms"),
            ),
        ),
        position_embedding=LearnedPositions(512),
        final_norm=None,
        precision=Precision(compute="bfloat16", softmax="bfloat16"),
    ),
    data=TextDataConfig(path="a b.txt", tokenizer=TokenizerConfig("file", path="tokenizer.json")),
    optimizer=Muon(weight_decay=0.0),
)


def test_experiment_json_round_trip() -> None:
    """Unions, mixers, tuples, custom policies, and None."""
    text = json.dumps(experiment_to_dict(UNUSUAL))
    back = experiment_from_dict(json.loads(text), "here")
    assert back == UNUSUAL
    assert isinstance(back.model.layer_pattern[0].mixer, AttentionConfig)
    assert back.model.layer_pattern[0].mixer.position == RoPE(theta=77.0)


ATTENTION: tuple[AttentionConfig, ...] = (
    AttentionConfig(position=RelativePositions(3), score=BilinearScore()),
    AttentionConfig(position=T5RelativeBias(8, 20, bidirectional=True), score=AdditiveScore(5)),
    AttentionConfig(position=ALiBi(), score=DotScore(), qk_norm=NormConfig("rms")),
    *(
        AttentionConfig(position=RoPE(theta=77.0, scaling=scaling))
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
def test_positions_and_scores_json_round_trip(mixer: AttentionConfig) -> None:
    for position in (NoPosition(), LearnedPositions(512), SinusoidalPositions()):
        block = BlockConfig(mixer=mixer)
        model = TransformerConfig(d_model=24, layer_pattern=(block,), position_embedding=position)
        experiment = Experiment(name="positions", model=model)
        text = json.dumps(experiment_to_dict(experiment))
        assert experiment_from_dict(json.loads(text), "here") == experiment


def test_flattened_names_and_values() -> None:
    settings = flatten_experiment(UNUSUAL)
    assert settings["model.layer_pattern.0.mixer.kind"] == "full"
    assert settings["model.layer_pattern.0.mixer.num_heads"] == 6
    assert settings["model.layer_pattern.0.mixer.position.theta"] == 77.0
    assert settings["model.layer_pattern.1.norm.kind"] == "rms"
    assert settings["model.position_embedding.kind"] == "LearnedPositions"
    assert settings["model.final_norm"] is None
    assert settings["model.precision"] == (
        "parameters=float32,compute=bfloat16,softmax=bfloat16,norm=float32,loss=float32"
    )
    assert list(settings) == sorted(settings)


def test_text_has_one_line_per_field() -> None:
    lines = experiment_to_text(UNUSUAL).splitlines()
    assert len(lines) == len(flatten_experiment(UNUSUAL))
    assert 'data.path = "a b.txt"' in lines
    assert "optimizer.weight_decay = 0.0" in lines
    assert "model.tie_embeddings = true" in lines


def test_diff_by_field_name() -> None:
    other = dataclasses.replace(
        UNUSUAL,
        steps=7,
        model=dataclasses.replace(
            UNUSUAL.model, layer_pattern=UNUSUAL.model.layer_pattern[:1], d_model=48
        ),
    )
    actual = diff_experiments(UNUSUAL, other)
    assert actual["steps"] == (1000, 7)
    assert actual["model.d_model"] == (24, 48)
    assert actual["model.layer_pattern.1.mixer.num_heads"] == (3, None)
    assert diff_experiments(UNUSUAL, UNUSUAL) == {}
    assert "steps" not in forbidden_changes(actual, other)
    assert "model.d_model" in forbidden_changes(actual, other)


RESUMABLE = {
    *("name", "steps", "grad_accum_steps", "log_every", "profile", "debug_checks", "compile"),
    *("optimizer", "schedule", "mesh", "evaluation", "sample", "checkpoint"),
    *("early_stopping", "tracking", "ema.decay"),
    *("data.path", "data.validation_path", "data.test_path", "data.cache_dir"),
    *("model.layer_loop", "model.remat"),
    *("loss_scale.growth_interval", "loss_scale.max_scale"),
    *("recovery.threshold", "recovery.warmup", "recovery.loss_rise_tolerance"),
    *("recovery.patience", "recovery.rollback_steps", "recovery.skip_batches"),
    *("recovery.max_rollbacks", "recovery.lr_factor"),
}
"""Settings and whole parts that may change when a run is resumed. A digest tells whether other
paths hold the same data."""


@pytest.mark.parametrize("name", ["quickstart", "sst2", "multi30k", "gpt2"])
def test_resumable_settings(name: str) -> None:
    experiment = find_experiment(name)
    fields = flatten_experiment(experiment)
    allowed = {field for field in fields if is_within(field, *RESUMABLE)}
    allowed.discard("optimizer.kind")
    changes = dict.fromkeys(fields, (1, 2))
    assert forbidden_changes(changes, experiment).keys() == fields.keys() - allowed


def test_saved_settings_that_no_resume_may_change() -> None:
    fixed = non_resumable_fields(UNUSUAL)
    assert {name: fixed[name] for name in ("batch_size", "model.d_model")} == {
        "batch_size": 32,
        "model.d_model": 24,
    }
    # The kinds that decide which arrays a state has are compared on their own.
    assert not any(is_within(name, *RESUMABLE) for name in fixed)


def test_redraw_index_is_resumable() -> None:
    block = BlockConfig(mixer=PerformerConfig())
    model = TransformerConfig(d_model=16, num_layers=1, layer_pattern=(block,))
    before = Experiment(name="a", model=model, data=TextDataConfig())
    pattern = (BlockConfig(mixer=PerformerConfig(redraw_index=1)),)
    after = dataclasses.replace(before, model=dataclasses.replace(model, layer_pattern=pattern))
    assert diff_experiments(before, after) == {"model.layer_pattern.0.mixer.redraw_index": (0, 1)}
    assert not forbidden_changes(diff_experiments(before, after), after)


def test_sources_may_be_read_more_often_after_a_resume() -> None:
    sources = (SourceConfig("a"), SourceConfig("b"))
    experiment = dataclasses.replace(UNUSUAL, data=TextDataConfig(sources=sources))
    allowed = {"data.sources.1.max_epochs": (1, 2), "data.sources.0.path": ("a", "b")}
    forbidden = {"data.sources.1.weight": (1.0, 2.0)}
    assert forbidden_changes(allowed | forbidden, experiment) == forbidden


def test_settings_that_decide_the_arrays_of_a_state() -> None:
    for name in ("optimizer.momentum", "ema.decay"):
        assert forbidden_changes({name: (0.9, 0.0)}, UNUSUAL)
        assert forbidden_changes({name: (0.0, 0.9)}, UNUSUAL)
        assert not forbidden_changes({name: (0.9, 0.5)}, UNUSUAL)
    assert forbidden_changes({"optimizer.kind": ("adamw", "lion")}, UNUSUAL)


def damaged(**at_top: Any) -> dict[str, Any]:
    return {**experiment_to_dict(UNUSUAL), **at_top}


def with_mixer(mixer: dict[str, Any]) -> dict[str, Any]:
    plain = experiment_to_dict(UNUSUAL)
    plain["model"]["layer_pattern"][0]["mixer"] = mixer
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
        (with_mixer({"num_heads": 3}), "missing .*mixer"),
        (with_mixer({"kind": "full", "teeth": 3}), "teeth"),
        (with_mixer({"kind": "full", "num_heads": 0}), "num_heads 0: give 1 or more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_experiments(plain: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=r"W/config.json: .*" + reason) as caught:
        experiment_from_dict(plain, "W/config.json")
    assert "\n" not in str(caught.value)


def test_saved_data_is_not_executed() -> None:
    """A name selects one of the known classes; nothing is imported by name."""
    for kind in ("os.system", "train.fitting.fit", "__class__"):
        with pytest.raises(UserError, match="is not known"):
            experiment_from_dict(with_mixer({"kind": kind}), "here")
