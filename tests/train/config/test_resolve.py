import dataclasses
from typing import Any

import pytest

from train.config.resolve import pin_auto, resolve_auto, resolve_precision, unavailable_backends
from train.data.data_config import TextDataConfig
from train.experiment import Experiment
from transformer import AttentionConfig, BlockConfig, Hardware, Precision, TransformerConfig
from transformer.attention.backends.choose import Backend

BACKEND = "model.layer_pattern.0.mixer.backend"


def make_experiment(
    *,
    layers: int = 12,
    length: int = 1024,
    segments: bool = False,
    attention: AttentionConfig | None = None,
    **model: Any,
) -> Experiment:
    block = BlockConfig(mixer=attention or AttentionConfig(num_heads=8))
    settings = {"d_model": 512, "precision": Precision.parse("bfloat16"), **model}
    return Experiment(
        model=TransformerConfig(num_layers=layers, layer_pattern=(block,), **settings),
        data=TextDataConfig(sequence_length=length, document_masking=segments),
    )


def test_choices_by_platform() -> None:
    assert resolve_auto(make_experiment(length=512), Hardware("cpu")) == {
        BACKEND: "query_blocks (the fastest on cpu)",
        "model.layer_loop": "unroll",
        "flattened tokens": "yes",
    }
    assert resolve_auto(make_experiment(), Hardware("gpu")) == {
        BACKEND: "cudnn (the fastest on gpu)",
        "model.layer_loop": "unroll",
        "flattened tokens": "no",
    }
    long = resolve_auto(make_experiment(length=1024), Hardware("cpu"))
    assert long[BACKEND] == "blockwise (the fastest on cpu)"
    assert resolve_auto(make_experiment(), Hardware("cpu"), 2)["flattened tokens"] == "no"


def test_choice_names_the_obstacle() -> None:
    def backend_on(platform: Any, **settings: Any) -> str:
        return resolve_auto(make_experiment(**settings), Hardware(platform))[BACKEND]

    assert backend_on("cpu", length=16).startswith(
        "reference (query_blocks cannot serve: 16 queries"
    )
    assert backend_on("gpu", segments=True).startswith("cudnn")
    assert "it computes in 16 bits" in backend_on("gpu", precision=Precision())
    dropped = AttentionConfig(num_heads=8, dropout=0.1)
    assert "drops" in backend_on("gpu", attention=dropped)
    assert "head width 512" in backend_on("gpu", attention=AttentionConfig(num_heads=1))


def test_requested_backend_is_used() -> None:
    requested = AttentionConfig(num_heads=8, backend="reference")
    actual = resolve_auto(make_experiment(attention=requested, layer_loop="scan"), Hardware("gpu"))
    assert actual[BACKEND] == "reference (asked for)"
    assert actual["model.layer_loop"] == "scan"


@pytest.mark.parametrize(("platform", "most"), [("cpu", 16), ("gpu", 24), ("tpu", 16)])
def test_layer_loop_depends_on_depth(platform: Any, most: int) -> None:
    shallow, deep = (
        resolve_auto(make_experiment(layers=layers), Hardware(platform))["model.layer_loop"]
        for layers in (most, most + 1)
    )
    assert (shallow, deep) == ("unroll", "scan")


def test_each_pattern_place_has_its_own_backend() -> None:
    blocks = (
        BlockConfig(mixer=AttentionConfig(num_heads=8)),
        BlockConfig(mixer=AttentionConfig(num_heads=8, dropout=0.1)),
    )
    experiment = make_experiment()
    model = dataclasses.replace(experiment.model, layer_pattern=blocks)
    actual = resolve_auto(dataclasses.replace(experiment, model=model), Hardware("gpu"))
    assert actual["model.layer_pattern.0.mixer.backend"].startswith("cudnn")
    assert actual["model.layer_pattern.1.mixer.backend"].startswith("blockwise")


def test_pin_auto() -> None:
    experiment, hardware = make_experiment(length=512), Hardware("cpu")
    same = resolve_auto(experiment, hardware)
    assert pin_auto(experiment, same, hardware) == experiment
    assert pin_auto(experiment, {}, hardware) == experiment
    result = pin_auto(
        experiment, {BACKEND: "blockwise (as it was)", "model.layer_loop": "scan"}, hardware
    )
    assert result.model.layer_pattern[0].mixer == AttentionConfig(num_heads=8, backend="blockwise")
    assert result.model.layer_loop == "scan"
    requested = make_experiment(
        attention=AttentionConfig(num_heads=8, backend="reference"), layer_loop="unroll"
    )
    assert (
        pin_auto(requested, {BACKEND: "blockwise", "model.layer_loop": "scan"}, hardware)
        == requested
    )
    with pytest.raises(ValueError, match=r"AttentionConfig.backend swift: .*"):
        pin_auto(experiment, {BACKEND: "swift (as it was)"}, hardware)


def test_unavailable_backends() -> None:
    cases: tuple[tuple[Backend, set[str]], ...]
    cases = (("splash", {BACKEND}), ("reference", set()), ("auto", set()))
    for form, expected in cases:
        requested = AttentionConfig(num_heads=8, backend=form)
        experiment = make_experiment(length=16, attention=requested)
        result = unavailable_backends(resolve_auto(experiment, Hardware("cpu")), experiment)
        assert set(result) == expected
        assert all("splash cannot serve: it runs on TPUs" in why for why in result.values())


def test_precision_is_resolved_once() -> None:
    """The hardware of the first start decides; a run resumed elsewhere keeps the choice."""
    experiment = make_experiment(precision=Precision.parse("float32"))
    model = dataclasses.replace(experiment.model, precision=Precision.parse("auto"))
    auto = dataclasses.replace(experiment, model=model)
    t4 = Hardware("gpu", "Tesla T4", compute_capability="7.5")
    begun = resolve_precision(auto, t4)
    assert begun.model.precision == Precision.parse("float16")
    resumed = resolve_precision(auto, Hardware("tpu", "TPU v5 lite"), begun)
    assert resumed == begun
    assert resolve_precision(experiment, t4, begun) == experiment


def test_replica_of_pmap_is_for_one_device() -> None:
    pods = Hardware("tpu", "TPU v5 lite", 8)
    by_pmap = dataclasses.replace(make_experiment(), compile="pmap")
    assert resolve_auto(by_pmap, pods)[BACKEND] == "splash (the fastest on tpu)"
