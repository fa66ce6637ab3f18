"""PEFT adapters against PEFT's own logits, and one-line errors for unsupported ones.

`python -m bench peft --fixtures` writes the adapters; reading them needs no torch.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from transformer.interop.fields import InteropError
from transformer.interop.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter, write_adapter
from transformer.interop.pretrained import read_model
from transformer.lora import LoRALayout

BASES, ADAPTERS = (Path(__file__).parent / name for name in ("fixtures", "adapters"))
NAMES = sorted(path.parent.name for path in ADAPTERS.glob("*/adapter_config.json"))


def read_base(name: str) -> tuple[Any, Any, str]:
    pretrained, params = read_model(BASES / name)
    return pretrained.make_model(), params, pretrained.family.model_type


def plain_and_adapted_logits(
    model: Any, layout: LoRALayout, trainable: Any, params: Any, tokens: Any
) -> Any:
    @jax.jit
    def run(trainable: Any, params: Any, tokens: Any) -> Any:
        combined = layout.combine(trainable, layout.freeze(params))
        both = (model.apply({"params": each}, tokens).logits for each in (params, combined))
        return tuple(both)

    return jax.device_get(run(trainable, params, tokens))


def copy_adapter(tmp_path: Path, name: str, **fields: Any) -> Path:
    folder = tmp_path / "adapter"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ADAPTERS / name, folder)
    config = json.loads((folder / ADAPTER_CONFIG).read_text()) | fields
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    return folder


@pytest.mark.sampled("gpt2-tied", "neox-parallel")
@pytest.mark.parametrize("name", NAMES)
def test_adapter_matches_peft_logits_and_round_trips(name: str, tmp_path: Path) -> None:
    model, params, family = read_base(name)
    draw = np.random.RandomState(0)
    draw.randint(3, 51, (2, 11))  # skip the source that the drill draws first
    tokens = draw.randint(3, 51, (2, 14))
    adapter = read_adapter(ADAPTERS / name, model, family=family)
    plain, logits = plain_and_adapted_logits(
        model, adapter.layout, adapter.trainable, params, tokens
    )
    reference = np.load(ADAPTERS / name / "reference.npz")["logits"]
    assert np.abs(logits - reference).max() < 1e-4 * max(1, np.abs(reference).max())
    assert np.abs(plain - reference).max() > 0.1

    write_adapter(tmp_path, model, adapter.layout, adapter.trainable, family=family)
    first, second = (load_file(x / ADAPTER_WEIGHTS) for x in (ADAPTERS / name, tmp_path))
    assert first.keys() == second.keys()
    for tensor in first:
        assert np.array_equal(first[tensor], second[tensor]), tensor


def drawn_factors(model: Any, params: Any) -> tuple[LoRALayout, Any]:
    """Return a layout of the queries and values, with random factors."""
    layout = LoRALayout.create(model.logical_axes(), rank=2, alpha=3, targets=("query", "value"))
    draw = np.random.RandomState(0)
    shapes = jax.eval_shape(layout.init, jax.random.key(0), params)
    return layout, jax.tree.map(lambda x: draw.randn(*x.shape).astype(np.float32), shapes)


def test_fused_projections_share_one_adapter(tmp_path: Path) -> None:
    """Queries and values of GPT-2 are in `c_attn`: rank 2 each, 4 together, with keys unchanged."""
    model, params, family = read_base("gpt2-tied")
    layout, trainable = drawn_factors(model, params)
    write_adapter(tmp_path, model, layout, trainable, family=family)
    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    assert (config["target_modules"], config["rank_pattern"]) == (["c_attn"], {"c_attn": 4})
    assert config["alpha_pattern"] == {"c_attn": 6}
    assert config["fan_in_fan_out"]
    stored = load_file(tmp_path / ADAPTER_WEIGHTS)
    root = "base_model.model.transformer.h.1.attn.c_attn"
    a, b = (stored[f"{root}.lora_{factor}.weight"] for factor in "AB")
    # [inputs, 3 D]: PEFT's update of the whole module, and our update of each matrix.
    update = 1.5 * (b @ a).T
    place = {name: trainable["layers"]["place_0"]["mixer"][name] for name in ("query", "value")}
    for name, part in zip(("query", "key", "value"), np.split(update, 3, axis=1), strict=True):
        expected: Any = np.zeros(part.shape)
        if name in place:
            b_own = place[name]["lora_b"][1].reshape(2, -1)
            expected = 1.5 * place[name]["lora_a"][1].reshape(-1, 2) @ b_own
        np.testing.assert_allclose(part, expected, atol=1e-5)
    again = read_adapter(tmp_path, model, family=family)
    assert (again.layout.rank, again.alpha, again.targets) == (2, 3, ("query", "value"))
    jax.tree.map(np.testing.assert_array_equal, again.trainable, trainable)


def test_layers_of_a_module_have_one_rank(tmp_path: Path) -> None:
    """Factors that are equal in one layer alone, all zero, are stacked as in the others."""
    model, params, family = read_base("gpt2-tied")
    layout, trainable = drawn_factors(model, params)
    for factors in trainable["layers"]["place_0"]["mixer"].values():
        factors["lora_a"][1] = 0
    write_adapter(tmp_path, model, layout, trainable, family=family)
    stored = load_file(tmp_path / ADAPTER_WEIGHTS)
    ranks = {len(values) for name, values in stored.items() if "lora_A" in name}
    assert ranks == {4}
    again = read_adapter(tmp_path, model, family=family)
    jax.tree.map(np.testing.assert_array_equal, again.trainable, trainable)


def test_trained_head_is_saved_in_modules_to_save(tmp_path: Path) -> None:
    model, params, family = read_base("bert-classifier")
    trained = ("head", "head_bias", "pooler", "pooler_bias")
    layout = LoRALayout.create(model.logical_axes(), rank=2, trained=trained)
    trainable = layout.init(jax.random.key(0), params)
    trainable["head"] = trainable["head"] + 1.0
    write_adapter(tmp_path, model, layout, trainable, family=family)
    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    assert config["modules_to_save"] == ["bert.pooler.dense", "classifier"]
    assert config["task_type"] == "SEQ_CLS"
    again = read_adapter(tmp_path, model, family=family)
    assert set(again.trained) == set(trained)
    np.testing.assert_array_equal(again.trainable["head"], trainable["head"])
    half = LoRALayout.create(model.logical_axes(), rank=2, trained=("head",))
    with pytest.raises(InteropError, match=r"train_fully head: .* classifier.bias is not trained"):
        write_adapter(tmp_path, model, half, half.init(jax.random.key(0), params), family=family)


def test_experts_cannot_be_exported(tmp_path: Path) -> None:
    model, params, family = read_base("mixtral-experts")
    layout = LoRALayout.create(model.logical_axes(), rank=2, targets=("up",))
    trainable = layout.init(jax.random.key(0), params)
    with pytest.raises(InteropError, match="feed_forward/up: is not a separate linear layer"):
        write_adapter(tmp_path, model, layout, trainable, family=family)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "use_dora True"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"bias": "all"}, "bias 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"r": 0}, "r 0 and lora_alpha .* not a valid rank"),
        ({"r": 4}, "rank_pattern gives .* rank 3 and others 4"),
        ({"lora_alpha": 10**400}, "lora_alpha 1000* are not a valid rank"),
        ({"alpha_pattern": {"h.0.attn.c_attn": 1}}, "alpha_pattern scales .*c_attn"),
        # A pattern that would take for ever to match.
        ({"alpha_pattern": {"(.*)*x": 1}}, "is not the name of a module"),
        ({"alpha_pattern": {"c_attn": "1"}}, "is not the name of a module with a number"),
    ],
)
def test_unsupported_settings_raise(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    folder = copy_adapter(tmp_path, "gpt2-tied", **fields)
    model, _, family = read_base("gpt2-tied")
    with pytest.raises(InteropError, match=words) as caught:
        read_adapter(folder, model, family=family)
    assert "\n" not in str(caught.value)


def test_mismatched_base_model_raises(tmp_path: Path) -> None:
    model, _, family = read_base("llama-grouped")
    with pytest.raises(InteropError, match=r"adapts transformer.h.0.attn.c_attn, which this llama"):
        read_adapter(ADAPTERS / "gpt2-tied", model, family=family)
    folder = copy_adapter(tmp_path, "gpt2-tied")
    values = load_file(folder / ADAPTER_WEIGHTS)
    model, _, family = read_base("gpt2-tied")

    def write(changed: dict[str, Any]) -> None:
        arrays = {name: np.ascontiguousarray(array) for name, array in changed.items()}
        save_file(arrays, folder / ADAPTER_WEIGHTS)

    name = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
    write(values | {name: values[name][:, 1:]})
    with pytest.raises(
        InteropError, match=r"factors \[3, 19\] .* do not fit its 60 outputs and 20"
    ):
        read_adapter(folder, model, family=family)
    write({each: array for each, array in values.items() if each != name})
    with pytest.raises(InteropError, match=r"has one of two factors of .*h.0.attn.c_attn"):
        read_adapter(folder, model, family=family)
    head = "base_model.model.lm_head.lora_{}.weight"
    both = {head.format("A"): values[name], head.format("B"): np.ones((51, 3), np.float32)}
    write(values | both)
    with pytest.raises(InteropError, match="adapts lm_head"):
        read_adapter(folder, model, family=family)
    (folder / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(InteropError, match=r"adapter_model.safetensors: cannot be read"):
        read_adapter(folder, model, family=family)
