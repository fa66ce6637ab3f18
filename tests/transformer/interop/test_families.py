"""Files written by `transformers` against its own outputs, family by family.

`python -m bench huggingface --fixtures` writes the fixtures; reading them needs no torch.
"""

import dataclasses
import fnmatch
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.transformer.formulas import random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LanguageModel,
    NormConfig,
    RoPE,
    TransformerConfig,
)
from transformer.inspection import layer_values
from transformer.interop.families import FAMILIES, express
from transformer.interop.family import shortest_period
from transformer.interop.fields import InteropError
from transformer.interop.pretrained import make_model, read_config, read_model, write_model

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))


def relative_error(found: Any, reference: np.ndarray[Any, Any]) -> float:
    gap = np.abs(np.asarray(found) - reference).max()
    return float(gap / max(1, np.abs(reference).max()))


def assert_trees_equal(one: Any, other: Any) -> None:
    assert jax.tree.all(jax.tree.map(np.array_equal, one, other))


def test_every_family_has_a_fixture() -> None:
    """Or all tables of one that has: a family by another name."""
    kinds = {
        json.loads((FIXTURES / name / "config.json").read_text())["model_type"] for name in NAMES
    }
    parts = ("base", "settings", "weights", "expected", "read_rest", "write_rest")
    tested = [[getattr(FAMILIES[kind], part) for part in parts] for kind in kinds]
    for family in FAMILIES.values():
        assert [getattr(family, part) for part in parts] in tested, family.model_type


@pytest.mark.sampled(
    "gpt2-tied",
    "llama-grouped",
    "gemma2-tight",
    "bert-mlm",
    "t5-gated",
    "phi3-partial",
    "neox-parallel",
)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_match_transformers(name: str) -> None:
    reference = np.load(FIXTURES / name / "reference.npz")
    pretrained, params = read_model(FIXTURES / name)
    model = pretrained.make_model()
    inputs = [reference["tokens"]]
    if pretrained.architecture.kind == "encoder_decoder":
        inputs = [reference["source"], *inputs]
    run = functools.partial(model.apply, outputs={"logits", "residual_pre"})
    output: Any = jax.jit(run)({"params": params}, *inputs)
    assert relative_error(output.logits, reference["logits"]) < 1e-4
    # The inputs of each layer: transformers normalizes the last hidden state.
    entering = np.asarray(layer_values(output, "residual_pre"))
    assert relative_error(entering, reference["hidden"][: len(entering)]) < 1e-4


@pytest.mark.sampled("gpt2-tied", "gemma2-tight")
@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_greedy_tokens_match_transformers(name: str) -> None:
    reference = np.load(FIXTURES / name / "reference.npz")
    pretrained, params = read_model(FIXTURES / name)
    model = pretrained.make_model()
    reads_source = pretrained.architecture.kind == "encoder_decoder"
    source = [reference["source"]] if reads_source else []
    shape = reference["logits"].shape
    targets = jnp.asarray(np.random.RandomState(1).randint(0, shape[-1], shape[:-1]))[..., None]

    @jax.jit
    def logits_of(params: Any, *inputs: Any) -> Any:
        return model.apply({"params": params}, *inputs).logits

    def loss(params: Any) -> jax.Array:
        logits = logits_of(params, *source, reference["tokens"])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=-1))

    expected = reference["gradient"]
    gradient = np.asarray(jax.jit(jax.grad(loss))(params)["embedding"])[: len(expected)]
    assert np.abs(gradient - expected).max() < 1e-3 * np.abs(expected).max()
    text, start = reference["greedy"], reference["tokens"].shape[1]
    if text.size:
        logits = np.asarray(logits_of(params, *source, text[:, :-1]))[:, start - 1 :]
        ordered = np.sort(logits, axis=-1)
        clear = ordered[..., -1] - ordered[..., -2] > 1e-3
        assert np.all((logits.argmax(-1) == text[:, start:])[clear])
        assert clear.mean() > 0.9


@pytest.mark.parametrize("name", NAMES)
def test_import_and_export_round_trip_is_bit_exact(name: str, tmp_path: Path) -> None:
    pretrained, on_device = read_model(FIXTURES / name)
    params = jax.device_get(on_device)  # slices of NumPy's arrays compile nothing
    copies = {"cls.predictions.bias"} if name == "bert-untied" else set()
    family = pretrained.family.model_type
    write_model(tmp_path, pretrained.make_model(), params, family=family, max_shard_bytes=20_000)
    files = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert len(files) > 1  # more than one shard
    exported_tensors = {key: value for file in files for key, value in file.items()}
    source_tensors = load_file(FIXTURES / name / "model.safetensors")
    # Poolers of masked language models, sinusoids, and BART's shared table beside two of its own,
    # have no effect, and are not exported.
    patterns = ("*.pooler.*", "*.embed_positions.weight", "*.shared.weight")
    unused = {
        key for key in source_tensors if any(fnmatch.fnmatchcase(key, each) for each in patterns)
    } - exported_tensors.keys()
    assert exported_tensors.keys() == source_tensors.keys() - unused
    for key, value in exported_tensors.items():
        # One of the two biases of an untied head has an effect; both are exported with its values.
        key = "cls.predictions.decoder.bias" if key in copies else key
        assert value.tobytes() == source_tensors[key].tobytes(), key
    again, params_again = read_model(tmp_path)
    assert_trees_equal(params, params_again)
    assert not again.notes  # transformers knows every field that is written
    # A default may be exported explicitly, such as the head width.
    first, second = (express(each.make_model(), family)[2] for each in (pretrained, again))
    assert first == second


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_files_are_read(dtype: str, tmp_path: Path) -> None:
    pretrained, params = read_model(FIXTURES / "gpt2-tied")
    write_model(tmp_path, pretrained.make_model(), params, dtype=dtype)
    _, rounded = read_model(tmp_path)
    expected = jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype).astype(np.float32), params)
    assert_trees_equal(rounded, expected)


def test_each_device_reads_only_its_slice(tmp_path: Path) -> None:
    devices = np.array(jax.devices()[:2])
    mesh = jax.sharding.Mesh(devices, ("model",))

    def shardings(model: Any) -> Any:
        def spec(axes: Any) -> Any:
            names = ["model" if name == "mlp" else None for name in axes.names]
            return jax.NamedSharding(mesh, jax.P(*names))

        return jax.tree.map(spec, model.logical_axes(), is_leaf=lambda node: hasattr(node, "stack"))

    _, full = read_model(FIXTURES / "llama-grouped")
    _, sharded = read_model(FIXTURES / "llama-grouped", shardings=shardings)
    assert_trees_equal(full, sharded)
    up = sharded["layers"]["place_0"]["feed_forward"]["up"]
    assert up.addressable_shards[0].data.shape[-1] * len(devices) == up.shape[-1]


def test_files_of_the_bare_body_are_read(tmp_path: Path) -> None:
    source = load_file(FIXTURES / "gpt2-tied" / "model.safetensors")
    shutil.copy(FIXTURES / "gpt2-tied" / "config.json", tmp_path)
    bare = {name.removeprefix("transformer."): value for name, value in source.items()}
    save_file(bare, tmp_path / "model.safetensors")
    _, params = read_model(tmp_path)
    _, expected = read_model(FIXTURES / "gpt2-tied")
    assert_trees_equal(params, expected)


def test_default_feed_forward_width_is_exported_explicitly(tmp_path: Path) -> None:
    """A gated feed-forward of D = 48 has F = 8/3 D in multiples of 64: 128."""
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=4, bias=False, position=RoPE()),
        feed_forward=FeedForwardConfig(activation="silu", gated=True, bias=False),
        norm=NormConfig("rms"),
    )
    config = TransformerConfig(50, 48, 1, (block,), final_norm=NormConfig("rms"))
    model = LanguageModel(config)
    params = random_params_like(jax.eval_shape(model.init_params, jax.random.key(0)))
    write_model(str(tmp_path), model, params)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["model_type"], written["intermediate_size"]) == ("llama", 128)


@pytest.mark.parametrize("width", [24, 28, 44])
def test_scale_of_scores_survives_the_factor_of_granite(width: int) -> None:
    """1 / sqrt(H) of a model of this library is a factor in the file."""
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=4, bias=False, position=RoPE()),
        feed_forward=FeedForwardConfig(64, activation="silu", gated=True, bias=False),
        norm=NormConfig("rms"),
        residual_scale=0.22,
    )
    config = TransformerConfig(
        50, width, 2, (block,), logit_scale=0.3, final_norm=NormConfig("rms")
    )
    family, _, fields = express(LanguageModel(config))
    assert family.model_type == "granite"
    assert fields["attention_multiplier"] == pytest.approx((width / 4) ** -0.5)
    assert fields["logits_scaling"] == pytest.approx(1 / 0.3)


def test_bert_export_requires_token_types() -> None:
    """BERT adds a row of that table whatever its size: an empty one fails in transformers."""
    pretrained = read_config(FIXTURES / "bert-mlm")
    config = dataclasses.replace(pretrained.config, num_token_types=0)
    model = make_model(pretrained.architecture, config)
    assert express(model)[0].model_type == "distilbert"
    with pytest.raises(InteropError, match="num_token_types 0"):
        express(model, "bert")


def test_equal_layers_are_one_pattern() -> None:
    """The pattern is a part of the tree paths of the parameters."""
    assert shortest_period("aaa") == ("a",)
    assert shortest_period("abab") == ("a", "b")
    assert shortest_period("abcab") == ("a", "b", "c")
