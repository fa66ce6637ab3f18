"""Damaged and unsupported folders are refused; what a config leaves out has its true default."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    NormConfig,
    RoPE,
    TransformerConfig,
)
from transformer.attention.rope import YaRNScaling
from transformer.interop.families import FAMILIES, REFUSED, express
from transformer.interop.fields import InteropError
from transformer.interop.pretrained import (
    make_model,
    read_config,
    read_model,
    write_model,
)
from transformer.models.language_model import LanguageModel

FIXTURES = Path(__file__).parent / "fixtures"
PUBLISHED = Path(__file__).parents[2] / "fixtures" / "published_configs.json"

Tensors = dict[str, Any]


def copy_of(fixture: str, tmp_path: Path, **fields: Any) -> Path:
    """Return a copy of a fixture's folder with other fields in its config.json."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / fixture, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def with_tensors(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """Change the tensors of a folder's weights file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return folder


def assert_refused(folder: Path, words: str) -> None:
    with pytest.raises(InteropError, match=words) as caught:
        read_model(folder)
    assert "\n" not in str(caught.value)


LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0],
    "long_factor": [1.0, 2.0],
    "original_max_position_embeddings": 8,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("fixture", "fields", "words"),
    [
        ("llama-grouped", {"model_type": "mamba"}, "known are gpt2"),
        ("llama-grouped", {"architectures": ["LlamaForImages"]}, "LlamaForCausalLM"),
        ("llama-grouped", {"architectures": "LlamaForQA"}, "LlamaForCausalLM"),
        ("llama-grouped", {"sliding_window": 8}, "sliding_window 8 is not supported"),
        ("llama-grouped", {"is_causal": False}, "is_causal False .* only True"),
        ("llama-grouped", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama-grouped", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu'"),
        ("llama-grouped", {"rope_parameters": {"rope_type": "dynamic"}}, "only the types default"),
        ("llama-grouped", {"rope_parameters": YARN | {"mscale": 0.7}}, "mscale_all_dim"),
        ("deepseekv3-groups", {"scoring_func": "softmax"}, "scoring_func 'softmax' .* 'sigmoid'"),
        ("deepseekv3-groups", {"num_key_value_heads": 1}, "num_key_value_heads 1 .* only 4"),
        ("deepseekv2-groups", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("llama-grouped", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("llama-grouped", {"hidden_size": "24"}, "hidden_size '24'"),
        ("llama-grouped", {"num_key_value_heads": float("inf")}, "num_key_value_heads"),
        ("llama-grouped", {"num_attention_heads": 5}, "num_kv_heads|num_attention_heads"),
        ("llama-grouped", {"intermediate_size": 44}, r"has shape \[.*config.json says \[.*44"),
        ("gptoss-clamped", {"num_experts_per_tok": 1}, "normalize_gates"),
        ("bigbird-mlm", {"attention_type": "block_sparse"}, "only 'original_full'"),
        ("longformer-mlm", {"attention_window": [4, 3]}, r"attention_window \[4, 3\]"),
        ("longformer-mlm", {"attention_window": [4]}, "2 even numbers"),
        ("longformer-mlm", {"pad_token_id": 0}, "pad_token_id 0"),
        ("modernbert-local", {"layer_types": ["chunked"] * 4}, "layer_types.*chunked"),
        ("modernbert-local", {"classifier_activation": "tanh"}, "tanh"),
        ("phi3-long", {"rope_parameters": LONG_ROPE}, "long_factors: has 2 numbers"),
        ("marian-separate", {"normalize_embedding": True}, "normalize_embedding True"),
        ("t5-gated", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj"),
        # `is_causal` masks the future of an encoder too in `transformers`.
        ("bert-mlm", {"is_causal": True}, "is_causal True"),
        ("modernbert-local", {"is_causal": True}, "is_causal True"),
        ("t5-gated", {"is_causal": True}, "is_causal True"),
        ("bart-scaled", {"is_causal": True}, "is_causal True"),
    ],
)
def test_unsupported_values_are_refused(
    fixture: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert_refused(copy_of(fixture, tmp_path, **fields), words)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_architectures_name_the_reason(name: str, tmp_path: Path) -> None:
    assert name not in FAMILIES
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(InteropError) as caught:
        read_config(tmp_path)
    assert f"model_type '{name}' is not supported ({REFUSED[name]})" in str(caught.value)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def claim_a_long_header(file: Path) -> None:
    file.write_bytes((2**40).to_bytes(8, "little") + file.read_bytes()[8:])


def lie_about_a_shape(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"shape":[51,24]', b'"shape":[52,24]', 1))


def claim_many_axes(file: Path) -> None:
    data, shape = file.read_bytes(), b'"shape":[51,24]'
    more = shape[:-1] + b",1" * 100 + b"]"
    length = (int.from_bytes(data[:8], "little") + len(more) - len(shape)).to_bytes(8, "little")
    file.write_bytes(length + data[8:].replace(shape, more, 1))


def flip_a_bit_of_the_header(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[9] ^= 0x80
    file.write_bytes(data)


def name_a_shard(file: Path, shard: str) -> None:
    index = {"weight_map": {"lm_head.weight": shard}}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index))


def drop_a_norm(file: Path) -> None:
    with_tensors(file.parent, lambda tensors: tensors.pop("model.norm.weight"))


def add_a_tensor(file: Path) -> None:
    with_tensors(file.parent, lambda tensors: tensors.update(extra=np.zeros(3, np.float32)))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop_a_norm, r"lacks 1 tensor, first model.norm.weight of shape \[24\]"),
        (add_a_tensor, "lacks, first extra"),
        (truncate, "model.safetensors: cannot be read"),
        (claim_a_long_header, "model.safetensors: cannot be read"),
        (lie_about_a_shape, "model.safetensors: cannot be read"),
        (flip_a_bit_of_the_header, "model.safetensors: cannot be read"),
        (claim_many_axes, "model.safetensors: cannot be read"),
        (lambda file: name_a_shard(file, "../../secret.safetensors"), "not a file of its folder"),
        (
            lambda file: name_a_shard(file, "model-1.safetensors"),
            "model-1.safetensors: cannot be read",
        ),
        (lambda file: file.rename(file.with_name("pytorch_model.bin")), "is pickled"),
        (lambda file: file.with_name("config.json").unlink(), "config.json: No such file"),
        (lambda file: file.with_name("config.json").write_text("{"), "is not JSON"),
    ],
)
def test_damaged_folders_are_refused(
    damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    folder = copy_of("llama-grouped", tmp_path)
    damage(folder / "model.safetensors")
    assert_refused(folder, words)


# Defaults and other names of fields.


@pytest.mark.parametrize(
    ("fixture", "name", "value"),
    [
        ("mistral-window", "sliding_window", "window=4096"),
        ("mixtral-experts", "rms_norm_eps", "epsilon=1e-05"),
        ("phi3-partial", "rms_norm_eps", "epsilon=1e-05"),
        ("gptoss-clamped", "rope_parameters", "scaling=YaRNScaling(factor=32.0"),
        ("gptoss-clamped", "rope_parameters", "round_bounds=False"),
        ("gemma2-tight", "attn_logit_softcapping", "soft_cap=50.0"),
        ("gemma2-tight", "final_logit_softcapping", "logit_soft_cap=30.0"),
        ("neox-parallel", "rope_parameters", "fraction=0.25"),
    ],
)
def test_fields_that_a_config_leaves_out_have_the_defaults_of_transformers(
    tmp_path: Path, fixture: str, name: str, value: str
) -> None:
    values = json.loads((FIXTURES / fixture / "config.json").read_text())
    del values[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert value in repr(read_config(tmp_path).config)


def test_null_is_no_window(tmp_path: Path) -> None:
    values = json.loads((FIXTURES / "mistral-window" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"sliding_window": None}))
    mixer: Any = read_config(tmp_path).config.layer_pattern[0].mixer
    assert getattr(mixer, "window", 0) == 0


def test_window_of_qwen_that_is_switched_off_is_none(tmp_path: Path) -> None:
    """`layer_types` is derived from the other fields where a file lacks it."""
    values = json.loads((FIXTURES / "qwen2-window" / "config.json").read_text())
    del values["layer_types"]
    windows = {}
    for used in (True, False):
        (tmp_path / "config.json").write_text(json.dumps(values | {"use_sliding_window": used}))
        windows[used] = [
            getattr(block.mixer, "window", 0)
            for block in read_config(tmp_path).config.layer_pattern
        ]
    assert windows == {True: [0, 5], False: [0]}


def test_width_of_heads_that_neox_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = copy_of("neox-parallel", tmp_path, head_dim=16)
    with pytest.raises(InteropError, match="head_dim 16"):
        read_config(folder)


def rope_of(folder: Path) -> Any:
    mixer: Any = read_config(folder).config.layer_pattern[0].mixer
    return mixer.position


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, YaRNScaling(4.0, 16, beta_fast=32, beta_slow=1, round_bounds=True)),
        (
            {"beta_fast": 29.0, "beta_slow": 3.0, "attention_factor": 0.7, "truncate": False},
            YaRNScaling(4.0, 16, 29.0, 3.0, attention_factor=0.7, round_bounds=False),
        ),
        ({"truncate": True}, YaRNScaling(4.0, 16, round_bounds=True)),
    ],
)
def test_yarn_is_read_as_transformers_reads_it(
    tmp_path: Path, given: dict[str, Any], expected: YaRNScaling
) -> None:
    """The bounds are rounded unless `truncate` says no; what is written is read again."""
    folder = copy_of("llama-grouped", tmp_path, rope_parameters=YARN | given)
    assert rope_of(folder).scaling == expected
    written = express(read_config(folder).make_model())[2]
    assert written["rope_scaling"].get("truncate", True) == expected.round_bounds


@pytest.mark.parametrize("first", ["type", "rope_type"])
def test_rope_type_is_the_newer_field(tmp_path: Path, first: str) -> None:
    fields = {"type": "linear", "rope_type": "llama3"}
    scaling = {first: fields[first], **fields, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    folder = copy_of("llama-grouped", tmp_path, rope_parameters=scaling)
    assert "Llama3" in repr(rope_of(folder))


def test_integers_may_be_written_with_a_point(tmp_path: Path) -> None:
    folder = copy_of("llama-grouped", tmp_path, num_key_value_heads=2.0)
    mixer: Any = read_config(folder).config.layer_pattern[0].mixer
    assert mixer.num_kv_heads == 2


def test_other_names_of_a_field_win(tmp_path: Path) -> None:
    values = {"model_type": "bloom", "n_head": 2, "num_attention_heads": 4, "n_layer": 3}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_config(tmp_path).config
    mixer: Any = config.layer_pattern[0].mixer
    assert (mixer.num_heads, config.num_layers, config.d_model) == (4, 3, 64)


def test_published_configs_are_read(tmp_path: Path) -> None:
    """A field that no code of the type reads is no obstacle; one note names all of them."""
    notes: dict[str, tuple[str, ...]] = {}
    for name, values in json.loads(PUBLISHED.read_text()).items():
        if "bigbird" in name:  # random blocks, which another generator draws
            continue
        (tmp_path / "config.json").write_text(json.dumps(values))
        notes[name] = read_config(tmp_path).notes
        assert len(notes[name]) <= 1
    assert notes["meta-llama/Llama-3.2-1B-Instruct"] == ()
    [note] = notes["HuggingFaceTB/SmolLM2-135M"]
    assert note.endswith("llama reads: is_llama_config, rope_interleaved")
    [note] = notes["microsoft/Phi-3-mini-128k-instruct"]
    assert "own code (auto_map) is not run" in note


# Heads and tied tables.


def test_a_class_with_another_head_is_read_as_far_as_its_body_goes(tmp_path: Path) -> None:
    """The head that the files lack is drawn, theirs is left out, and a note says so."""

    def give_another_head(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("cls.")]:
            del tensors[name]
        tensors["relation.weight"] = np.zeros((2, 24), np.float32)

    folder = copy_of("bert-mlm", tmp_path, architectures=["BertForNextSentencePrediction"])
    pretrained, params = read_model(with_tensors(folder, give_another_head))
    [note] = pretrained.notes
    assert "is read as BertForMaskedLM; without relation.weight; not in the files" in note
    _, whole = read_model(FIXTURES / "bert-mlm")
    assert params.keys() == whole.keys()
    jax.tree.map(np.testing.assert_array_equal, params["layers"], whole["layers"])
    assert 0 < np.abs(params["head"]).max() < 0.2
    with_tensors(folder, lambda tensors: tensors.pop("bert.encoder.layer.1.output.dense.bias"))
    assert_refused(folder, r"lacks 1 tensor, first bert\.encoder\.layer\.1")


def test_the_files_decide_what_is_tied(tmp_path: Path) -> None:
    """As in transformers: equal tables are one, others are two, whatever the config says."""

    def copy(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()

    def differ(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1

    def only_the_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")

    def read_changed(change: Callable[[Tensors], None]) -> Any:
        return read_model(with_tensors(copy_of("gpt2-tied", tmp_path / change.__name__), change))[1]

    _, tied = read_model(FIXTURES / "gpt2-tied")
    for change in (copy, only_the_head):
        jax.tree.map(np.testing.assert_array_equal, read_changed(change), tied)
    params = read_changed(differ)
    np.testing.assert_array_equal(params["output"][:, :51], params["embedding"][:51].T + 1)


def test_a_shared_table_beside_an_output_matrix_is_written_as_three(tmp_path: Path) -> None:
    """As transformers 4 saves BART, and as transformers 5 reads it."""
    tables = [f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")]

    def share(tensors: Tensors) -> None:
        for table in tables:
            del tensors[table]

    pretrained, params = read_model(with_tensors(copy_of("bart-scaled", tmp_path), share))
    assert pretrained.config.encoder is not None
    assert (pretrained.config.encoder.vocab_size, "output" in params) == (0, True)
    (tmp_path / "out").mkdir()
    write_model(tmp_path / "out", pretrained.make_model(), params, family="bart")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {*tables, "model.shared.weight", "lm_head.weight"} <= written.keys()
    again, params_again = read_model(tmp_path / "out")
    assert again.config == pretrained.config
    jax.tree.map(np.testing.assert_array_equal, params_again, params)


# Export.


@pytest.mark.parametrize("name", ["llama-grouped", "t5-gated", "t5-tied", "bart-scaled"])
def test_other_logit_scales_cannot_be_exported(name: str, tmp_path: Path) -> None:
    """A tied T5 scales by 1 / sqrt(D) only; an untied one does not scale."""
    tied = name == "t5-tied"
    pretrained, params = read_model(FIXTURES / ("t5-gated" if tied else name))
    family, config = pretrained.family.model_type, pretrained.config

    def scaled(scale: float) -> Any:
        changed: dict[str, Any] = {
            "logit_scale": scale,
            "tie_embeddings": tied or config.tie_embeddings,
        }
        return make_model(pretrained.architecture, dataclasses.replace(config, **changed))

    express(scaled(config.d_model**-0.5 if tied else 1.0), family)
    with pytest.raises(InteropError, match=r"model\.logit_scale 0\.37 \(it has"):
        write_model(tmp_path, scaled(0.37), params, family=family)
    assert not list(tmp_path.iterdir())


def llama(*, residual: bool = True, norm_bias: bool = True, **rope: Any) -> LanguageModel:
    """Return a model of Llama's architecture, but for what is given."""
    norm = NormConfig("rms", epsilon=1e-6, bias=norm_bias)
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=2, bias=False, position=RoPE(**rope)),
        feed_forward=FeedForwardConfig(activation="silu", gated=True, bias=False),
        norm=norm,
        residual=residual,
    )
    return LanguageModel(TransformerConfig(32, 16, 2, (block,), final_norm=norm))


def test_what_no_family_has_is_refused_by_setting() -> None:
    """`transformers` reads `partial_rotary_factor` in Phi-3 and GPT-NeoX, not in Llama."""
    with pytest.raises(InteropError, match=r"llama: model\.layer_pattern\.0\.residual False"):
        express(llama(residual=False), "llama")
    # RMSNorm has no bias, whatever `norm.bias` says.
    for model in (llama(), llama(norm_bias=False)):
        assert express(model)[0].model_type == "llama"
    partial = llama(fraction=0.5)
    assert express(partial)[0].model_type == "phi3"
    for family in ("llama", "mistral", "qwen2"):
        with pytest.raises(InteropError, match="partial_rotary_factor"):
            express(partial, family)


def test_whole_heads_are_rotated_where_a_quarter_is_the_default() -> None:
    source = read_model(FIXTURES / "neox-parallel")[0]
    (block,) = source.config.layer_pattern
    mixer: Any = block.mixer
    for fraction in (0.5, 1.0):
        rope = dataclasses.replace(mixer.position, fraction=fraction)
        own = dataclasses.replace(block, mixer=dataclasses.replace(mixer, position=rope))
        model = LanguageModel(dataclasses.replace(source.config, layer_pattern=(own,)))
        assert express(model, "gpt_neox")[2]["rotary_pct"] == fraction


def test_weights_that_were_there_are_not_read(tmp_path: Path) -> None:
    """The index of many files would lead to them."""
    source, params = read_model(FIXTURES / "llama-grouped")
    model = source.make_model()
    write_model(tmp_path, model, jax.tree.map(np.zeros_like, params), max_shard_bytes=4096)
    assert (tmp_path / "model.safetensors.index.json").exists()
    write_model(tmp_path, model, params)
    _, again = read_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert not list(tmp_path.glob("model-*"))


def test_fields_of_the_model_are_written_under_one_name(tmp_path: Path) -> None:
    pretrained, params = read_model(FIXTURES / "gpt2-tied")
    write_model(tmp_path, pretrained.make_model(), params, fields={"max_position_embeddings": 7})
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["n_positions"] == 96
    assert "max_position_embeddings" not in values


@pytest.mark.parametrize("fixture", ["gemma2-tight", "gemma3-linear", "gptoss-clamped"])
def test_a_window_that_no_layer_has_is_not_written(fixture: str, tmp_path: Path) -> None:
    """Null would be an error in the forward pass."""
    values = json.loads((FIXTURES / fixture / "config.json").read_text())
    values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    full = read_config(tmp_path)
    assert "sliding_window" not in express(full.make_model(), full.family.model_type)[2]


def test_scaled_positions_of_neox_are_written() -> None:
    source = read_config(FIXTURES / "neox-parallel")
    block = source.config.layer_pattern[-1]
    position = RoPE(fraction=0.25, scaling=YaRNScaling(factor=4.0, original_max_length=16))
    mixer = dataclasses.replace(block.mixer, position=position)  # type: ignore[call-arg]
    pattern = (dataclasses.replace(block, mixer=mixer),)
    config = dataclasses.replace(source.config, layer_pattern=pattern)
    fields = express(make_model(source.architecture, config), "gpt_neox")[2]
    assert fields["rope_scaling"]["rope_type"] == "yarn"
