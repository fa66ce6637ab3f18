"""Damaged, hostile and unsupported folders raise one-line errors that name the problem."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LearnedPositions,
    NormConfig,
    RoPE,
    TransformerConfig,
)
from transformer.attention.rope_scaling import YaRNScaling
from transformer.interop.family_registry import FAMILIES, REFUSED
from transformer.interop.fields import InteropError
from transformer.interop.pretrained import (
    express,
    make_model,
    read_config,
    read_model,
    write_model,
)
from transformer.interop.safetensors_file import SafetensorsFile, TensorSpec, write_safetensors
from transformer.models.language_model import LanguageModel

PUBLISHED = "published_configs.json"

SOURCE = Path(__file__).parent / "fixtures" / "llama-grouped"


def set_field(**fields: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


def rewrite(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return a function that changes the tensors of the weights file."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        file = SafetensorsFile(path)
        tensors = {name: np.array(file.read(name)) for name in file.tensors}
        change(tensors)
        specs = [TensorSpec(name, value.shape, "float32") for name, value in tensors.items()]
        write_safetensors(path, specs, tensors.__getitem__)

    return damage


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def long_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])


def lying_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape":[51,24]', b'"shape":[52,24]', 1))


def flipped_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[9] ^= 0x80
    path.write_bytes(data)


def outside_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "../../secret.safetensors"}})
    )


def missing_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}})
    )


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


CASES = {
    "unknown architecture": (set_field(model_type="deepseek_v3"), "deepseek_v3.*known are gpt2"),
    "unknown head": (set_field(architectures=["LlamaForImages"]), "LlamaForCausalLM"),
    "unknown head as a string": (set_field(architectures="LlamaForQA"), "LlamaForCausalLM"),
    "field of the cache": (set_field(sliding_window=8), "sliding_window 8 is not supported"),
    "both sides of a token": (set_field(is_causal=False), "is_causal False .* only True"),
    "quantized": (set_field(quantization_config={"bits": 4}), "quantization_config"),
    "unsupported value": (set_field(hidden_act="quick_gelu"), "hidden_act 'quick_gelu'"),
    "unsupported rope": (
        set_field(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "rope_parameters.*only the types default, linear, llama3, yarn and longrope",
    ),
    "wrong type": (set_field(hidden_size="24"), "hidden_size '24'"),
    "wrong size": (set_field(num_attention_heads=5), "num_kv_heads|num_attention_heads"),
    "tensor missing": (
        rewrite(lambda tensors: tensors.pop("model.norm.weight")),
        r"lacks 1 tensor, first model.norm.weight of shape \[24\]",
    ),
    "tensor left over": (
        rewrite(lambda tensors: tensors.update(extra=np.zeros(3, np.float32))),
        "has 1 tensor that the model of config.json lacks, first extra",
    ),
    "wrong shape": (set_field(intermediate_size=44), r"has shape \[.*config.json says \[.*44"),
    "truncated": (cut, "damaged or truncated"),
    "long header": (long_header, "a header that claims 1099511627776"),
    "lying header": (lying_header, r"of shape \[52, 24\]"),
    "flipped bit": (flipped_header, "header that is not valid"),
    "index outside": (
        outside_index,
        "'../../secret.safetensors', which is not a file of its folder",
    ),
    "shard missing": (missing_shard, "model-00001-of-00002.safetensors: is missing"),
    "pickled": (pickled, "pytorch_model.bin: is pickled.*save_pretrained"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: does not exist"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_damaged_folder_raises_a_one_line_error(case: str, tmp_path: Path) -> None:
    damage, expected = CASES[case]
    folder = tmp_path / "model"
    shutil.copytree(SOURCE, folder)
    damage(folder)
    with pytest.raises(InteropError, match=expected) as caught:
        read_model(folder)
    assert "\n" not in str(caught.value)


def from_fixture(name: str, tmp_path: Path, **fields: Any) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(SOURCE.parent / name, folder)
    set_field(**fields)(folder)
    return folder


@pytest.mark.parametrize("name", ["bert-mlm", "modernbert-local", "t5-gated", "bart-scaled"])
def test_causal_encoders_are_refused(name: str, tmp_path: Path) -> None:
    """`is_causal` masks the future of an encoder too in `transformers`."""
    with pytest.raises(InteropError, match="is_causal True is not supported"):
        read_model(from_fixture(name, tmp_path, is_causal=True))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_architectures_raise_by_name(name: str, tmp_path: Path) -> None:
    folder = from_fixture("llama-grouped", tmp_path, model_type=name)
    with pytest.raises(InteropError) as caught:
        read_model(folder)
    assert f"model_type '{name}' is not supported ({REFUSED[name]}); known are" in str(caught.value)
    assert name not in FAMILIES


VALUES: dict[str, tuple[str, dict[str, Any], str]] = {
    "mxfp4": (
        "gptoss-clamped",
        {"quantization_config": {"quant_method": "mxfp4"}},
        r"quantization_config mxfp4: packed weights.*Mxfp4Config\(dequantize=True\)",
    ),
    "one expert": ("gptoss-clamped", {"num_experts_per_tok": 1}, "normalize_gates"),
    "random blocks": (
        "bigbird-mlm",
        {"attention_type": "block_sparse"},
        "attention_type 'block_sparse'.*only 'original_full'.*drawn by NumPy",
    ),
    "odd window": ("longformer-mlm", {"attention_window": [4, 3]}, r"attention_window \[4, 3\]"),
    "one window": ("longformer-mlm", {"attention_window": [4]}, "2 even numbers"),
    "offset": ("longformer-mlm", {"pad_token_id": 0}, "pad_token_id 0"),
    "other layers": ("modernbert-local", {"layer_types": ["chunked"] * 4}, "layer_types.*chunked"),
    "head activation": ("modernbert-local", {"classifier_activation": "tanh"}, "tanh"),
    "factors": (
        "phi3-long",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": [1.0, 2.0],
                "original_max_position_embeddings": 8,
            }
        },
        "long_rope_scaling.long_factors: has 2 numbers, and short_factors has 1",
    ),
    "embedded norms": (
        "marian-separate",
        {"normalize_embedding": True},
        "normalize_embedding True",
    ),
    "T5 activation": ("t5-gated", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj"),
}


@pytest.mark.parametrize("case", list(VALUES))
def test_unsupported_values_raise_by_name(case: str, tmp_path: Path) -> None:
    name, fields, expected = VALUES[case]
    with pytest.raises(InteropError, match=expected) as caught:
        read_model(from_fixture(name, tmp_path, **fields))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llama-grouped", "t5-gated", "t5-tied", "bart-scaled"])
def test_other_logit_scales_cannot_be_exported(name: str, tmp_path: Path) -> None:
    tied = name == "t5-tied"
    name = "t5-gated" if tied else name
    pretrained, params = read_model(SOURCE.parent / name)
    config = pretrained.config
    # A tied T5 scales by 1 / sqrt(D) only; an untied one does not scale.
    own = config.d_model**-0.5 if tied else 1.0
    for scale in (own, 0.37):
        changed = dataclasses.replace(
            config, logit_scale=scale, tie_embeddings=tied or config.tie_embeddings
        )
        model = make_model(pretrained.architecture, changed)
        if scale == own:
            express(model, pretrained.family.model_type)
            continue
        with pytest.raises(InteropError, match=r"model\.logit_scale 0\.37 \(it has"):
            write_model(tmp_path, model, params, family=pretrained.family.model_type)
    assert not list(tmp_path.iterdir())


def test_model_outside_all_families_raises_by_setting(tmp_path: Path) -> None:
    block = BlockConfig(residual=False)
    positions = LearnedPositions(16)
    config = TransformerConfig(
        vocab_size=11,
        d_model=8,
        num_layers=1,
        layer_pattern=(block,),
        position_embedding=positions,
    )
    with pytest.raises(InteropError, match=r"gpt2: model\.layer_pattern\.0\.residual False"):
        write_model(tmp_path, LanguageModel(config), {}, family="gpt2")
    assert not list(tmp_path.iterdir())


def test_weights_that_were_there_are_not_read(tmp_path: Path) -> None:
    """The index of many files would lead to them."""
    source, params = read_model(SOURCE)
    model = source.make_model()
    write_model(tmp_path, model, jax.tree.map(np.zeros_like, params), max_shard_bytes=4096)
    assert (tmp_path / "model.safetensors.index.json").exists()
    write_model(tmp_path, model, params)
    _, again = read_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert not list(tmp_path.glob("model-*"))


@pytest.mark.parametrize("first", ["type", "rope_type"])
def test_rope_type_is_the_newer_field(tmp_path: Path, first: str) -> None:
    fields = {"type": "linear", "rope_type": "llama3"}
    scaling = {first: fields[first], **fields, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    shutil.copytree(SOURCE, tmp_path / "model")
    set_field(rope_parameters=scaling)(tmp_path / "model")
    config = read_config(tmp_path / "model").config
    assert "Llama3" in repr(config.layer_pattern[0].mixer)


def test_integers_may_be_written_with_a_point(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "model")
    set_field(num_key_value_heads=2.0)(tmp_path / "model")
    mixer: Any = read_config(tmp_path / "model").config.layer_pattern[0].mixer
    assert mixer.num_kv_heads == 2
    set_field(num_key_value_heads=float("inf"))(tmp_path / "model")
    with pytest.raises(InteropError, match="num_key_value_heads"):
        read_config(tmp_path / "model")


@pytest.mark.parametrize(
    ("fixture", "name", "value"),
    [
        ("mistral-window", "sliding_window", "window=4096"),
        ("mixtral-experts", "rms_norm_eps", "epsilon=1e-05"),
        ("phi3-partial", "rms_norm_eps", "epsilon=1e-05"),
        ("gptoss-clamped", "rope_parameters", "scaling=YaRNScaling(factor=32.0"),
        ("gemma2-tight", "attn_logit_softcapping", "soft_cap=50.0"),
        ("gemma2-tight", "final_logit_softcapping", "logit_soft_cap=30.0"),
        ("neox-parallel", "rope_parameters", "fraction=0.25"),
    ],
)
def test_fields_that_a_config_leaves_out_have_the_defaults_of_transformers(
    tmp_path: Path, fixture: str, name: str, value: str
) -> None:
    values = json.loads((SOURCE.parent / fixture / "config.json").read_text())
    del values[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert value in repr(read_config(tmp_path).config)


def test_published_configs_are_read(tmp_path: Path) -> None:
    """A field that no code of the type reads is no obstacle; one note names all of them."""
    published = json.loads((Path(__file__).parents[2] / "fixtures" / PUBLISHED).read_text())
    notes: dict[str, tuple[str, ...]] = {}
    for name, values in published.items():
        (tmp_path / "config.json").write_text(json.dumps(values))
        if "bigbird" in name:  # random blocks, which another generator draws
            with pytest.raises(InteropError, match="attention_type 'block_sparse'"):
                read_config(tmp_path)
            continue
        pretrained = read_config(tmp_path)
        notes[name] = pretrained.notes
        assert len(pretrained.notes) <= 1
    assert notes["meta-llama/Llama-3.2-1B-Instruct"] == ()
    [note] = notes["HuggingFaceTB/SmolLM2-135M"]
    assert note.endswith("llama reads: is_llama_config, rope_interleaved")
    [note] = notes["microsoft/Phi-3-mini-128k-instruct"]
    assert "own code (auto_map) is not run" in note


def test_other_names_of_a_field_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bloom", "n_head": 2, "num_attention_heads": 4, "n_layer": 3})
    )
    config = read_config(tmp_path).config
    mixer: Any = config.layer_pattern[0].mixer
    assert (mixer.num_heads, config.num_layers, config.d_model) == (4, 3, 64)


def with_tensors(name: str, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(SOURCE.parent / name, folder)
    rewrite(change)(folder)
    return folder


def test_a_class_with_another_head_is_read_as_far_as_its_body_goes(tmp_path: Path) -> None:
    """The head that the files lack is drawn, theirs is left out, and a note says so."""

    def classify(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("cls.")]:
            del tensors[name]
        tensors["qa_outputs.weight"] = np.zeros((2, 24), np.float32)

    folder = with_tensors("bert-mlm", tmp_path / "model", classify)
    set_field(architectures=["BertForQuestionAnswering"])(folder)
    pretrained, params = read_model(folder)
    [note] = pretrained.notes
    assert "is read as BertForMaskedLM; without qa_outputs.weight; not in the files" in note
    _, whole = read_model(SOURCE.parent / "bert-mlm")
    assert params.keys() == whole.keys()
    jax.tree.map(np.testing.assert_array_equal, params["layers"], whole["layers"])
    assert 0 < np.abs(params["head"]).max() < 0.2

    def without_a_layer(tensors: dict[str, Any]) -> None:
        del tensors["bert.encoder.layer.1.output.dense.bias"]

    rewrite(without_a_layer)(folder)
    with pytest.raises(InteropError, match=r"lacks 1 tensor, first bert\.encoder\.layer\.1"):
        read_model(folder)


def test_the_files_decide_what_is_tied(tmp_path: Path) -> None:
    """As in transformers: equal tables are one, others are two, whatever the config says."""

    def copy(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()

    def differ(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1

    def only_the_head(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")

    _, tied = read_model(SOURCE.parent / "gpt2-tied")
    for case in (copy, only_the_head):
        _, params = read_model(with_tensors("gpt2-tied", tmp_path / case.__name__, case))
        jax.tree.map(np.testing.assert_array_equal, params, tied)
    _, params = read_model(with_tensors("gpt2-tied", tmp_path / "differ", differ))
    np.testing.assert_array_equal(params["output"][:, :51], params["embedding"][:51].T + 1)

    def shared(tensors: dict[str, Any]) -> None:
        """As transformers 4 saves it: one table of source and target, and an output matrix."""
        del tensors["model.encoder.embed_tokens.weight"]
        del tensors["model.decoder.embed_tokens.weight"]

    pretrained, params = read_model(with_tensors("bart-scaled", tmp_path / "bart", shared))
    assert pretrained.config.encoder is not None
    assert (pretrained.config.encoder.vocab_size, "output" in params) == (0, True)
    # Written as transformers 5 reads it: three tables.
    (tmp_path / "out").mkdir()
    write_model(tmp_path / "out", pretrained.make_model(), params, family="bart")
    written = SafetensorsFile(tmp_path / "out" / "model.safetensors")
    tables = [f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    assert {*tables, "model.shared.weight", "lm_head.weight"} <= written.tensors.keys()
    again, params_again = read_model(tmp_path / "out")
    assert again.config == pretrained.config
    jax.tree.map(np.testing.assert_array_equal, params_again, params)


def test_fields_that_a_family_needs_are_written(tmp_path: Path) -> None:
    """Layers without a window, scaled RoPE in NeoX, and a window below the table of positions."""
    pretrained, params = read_model(SOURCE.parent / "gpt2-tied")
    write_model(tmp_path, pretrained.make_model(), params, fields={"max_position_embeddings": 7})
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["n_positions"] == 96
    assert "max_position_embeddings" not in values

    def written(fixture: str, **changes: Any) -> dict[str, Any]:
        source = read_config(SOURCE.parent / fixture)
        block = source.config.layer_pattern[-1]
        mixer = dataclasses.replace(block.mixer, **changes)
        config = dataclasses.replace(
            source.config, layer_pattern=(dataclasses.replace(block, mixer=mixer),)
        )
        return express(make_model(source.architecture, config), source.family.model_type)[2]

    for fixture in ("gemma2-tight", "gemma3-linear", "gptoss-clamped"):
        values = json.loads((SOURCE.parent / fixture / "config.json").read_text())
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
        (tmp_path / "config.json").write_text(json.dumps(values))
        full = read_config(tmp_path)
        fields = express(full.make_model(), full.family.model_type)[2]
        assert "sliding_window" not in fields  # null would be an error in the forward pass
    scaling = YaRNScaling(factor=4.0, original_max_length=16)
    position = RoPE(fraction=0.25, scaling=scaling)
    assert written("neox-parallel", position=position)["rope_scaling"]["rope_type"] == "yarn"


def llama(**changes: Any) -> LanguageModel:
    """Return a model of Llama's architecture, but for some of its attention or norm."""
    norm = NormConfig("rms", epsilon=1e-6, bias=changes.pop("norm_bias", True))
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=2, bias=False, position=RoPE(**changes)),
        feed_forward=FeedForwardConfig(activation="silu", gated=True, bias=False),
        norm=norm,
    )
    sizes: Any = dict(vocab_size=32, d_model=16, num_layers=2)
    return LanguageModel(TransformerConfig(layer_pattern=(block,), final_norm=norm, **sizes))


def test_only_some_families_rotate_a_part_of_a_head(tmp_path: Path) -> None:
    """`transformers` reads `partial_rotary_factor` in Phi-3 and GPT-NeoX, not in Llama."""
    assert express(llama())[0].model_type == "llama"
    model = llama(fraction=0.5)
    assert express(model)[0].model_type == "phi3"
    for family in ("llama", "mistral", "qwen2"):
        with pytest.raises(InteropError, match="partial_rotary_factor"):
            express(model, family)
    folder = from_fixture("llama-grouped", tmp_path, partial_rotary_factor=0.5)
    with pytest.raises(InteropError, match=r"partial_rotary_factor 0\.5 is not supported; only 1"):
        read_model(folder)


def test_settings_without_effect_do_not_prevent_an_export() -> None:
    """RMSNorm has no bias, whatever `norm.bias` says."""
    assert express(llama(norm_bias=False))[0].model_type == "llama"
