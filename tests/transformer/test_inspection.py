import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import normal
from tests.transformer.mixers import BUILTIN_MIXERS
from transformer import inspection
from transformer.attention.full import AttentionConfig
from transformer.attention.mixer import MIXERS, mixer_class
from transformer.attention.position_bias import RelativePositions
from transformer.attention.rope import RoPE
from transformer.attention.variants.performer import PerformerConfig
from transformer.attention.variants.sliding_window import SlidingWindowConfig
from transformer.attention.variants.top_k import TopKConfig
from transformer.baselines.recurrent import LSTMConfig
from transformer.inspection import add_vector, at_layers, logit_lens, patch, zero_heads
from transformer.models.block import BlockConfig
from transformer.models.config import EncoderConfig, TransformerConfig
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.heads import Classifier
from transformer.models.language_model import LanguageModel
from transformer.taps import ATTENTION_VALUES
from transformer.testing.mixer_under_test import default_config

NUM_LAYERS, NUM_HEADS = 3, 4
BLOCK = BlockConfig(mixer=AttentionConfig(num_heads=NUM_HEADS, num_kv_heads=2, position=RoPE()))
CONFIG = TransformerConfig(
    vocab_size=50, d_model=32, num_layers=NUM_LAYERS, layer_pattern=(BLOCK, BLOCK)
)
TOKENS: Any = np.arange(12).reshape(2, 6)
VALUES = {
    "residual_pre",
    "residual_mid",
    "residual_post",
    "mixer_output",
    "feed_forward_output",
    "queries",
    "keys",
    "values",
    "weights",
    "head_outputs",
}
RESIDUALS = ("logits", "residual_pre", "residual_post")


def model_with(**fields: Any) -> Any:
    return LanguageModel(dataclasses.replace(CONFIG, **fields))


def random_params(model: Any) -> Any:
    """Return smaller parameters than `random_params_like`, whose activations round by more."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    return jax.tree.map(lambda leaf: random.normal(0, 0.2, leaf.shape).astype("f"), shapes)


@functools.cache
def compile_apply(model: Any, outputs: frozenset[str], edits: tuple[Any, ...]) -> Any:
    return jax.jit(functools.partial(model.apply, outputs=outputs, edits=dict(edits) or None))


def apply(
    model: Any, *inputs: Any, outputs: Any = ("logits",), edits: Any = None, **on: Any
) -> Any:
    """Return the result of `model.apply`, in NumPy, from one program, which later calls share."""
    run = compile_apply(model, frozenset(outputs), tuple((edits or {}).items()))
    return jax.device_get(run(*inputs, **on))


def layer_values(*arguments: Any, **named: Any) -> Any:
    """Return the values of all layers in NumPy: slices of them compile nothing."""
    return np.asarray(inspection.layer_values(*arguments, **named))


def shapes_of(model: Any, params: Any, names: set[str], **given: Any) -> dict[str, Any]:
    """Return the shapes of the values of all layers, without compiling the model."""

    def values(params: Any, given: Any) -> dict[str, jax.Array]:
        output = model.apply({"params": params}, TOKENS, outputs=names, **given)
        return {name: inspection.layer_values(output, name) for name in names}

    return {name: leaf.shape for name, leaf in jax.eval_shape(values, params, given).items()}


@pytest.fixture(scope="module")
def params() -> Any:
    return random_params(LanguageModel(CONFIG))


@pytest.mark.parametrize(
    "fields",
    [{"layer_loop": "unroll"}, {"layer_loop": "scan", "remat": "dots"}],
)
def test_values_of_every_layer(params: Any, fields: dict[str, Any]) -> None:
    model = model_with(**fields)
    output = apply(model, {"params": params}, TOKENS, outputs=VALUES | {"logits"})
    plain = apply(model, {"params": params}, TOKENS)
    chex.assert_trees_all_close(output.logits, plain.logits, atol=1e-6)
    pre, mid, post = (layer_values(output, f"residual_{name}") for name in ("pre", "mid", "post"))
    assert pre.shape == (NUM_LAYERS, 2, 6, 32)
    chex.assert_trees_all_equal(pre[1:], post[:-1])
    chex.assert_trees_all_close(pre + layer_values(output, "mixer_output"), mid, atol=1e-6)
    chex.assert_trees_all_close(mid + layer_values(output, "feed_forward_output"), post, atol=1e-6)
    # Attention by its formula, from the queries, keys and values of each layer.
    q, k, v = (layer_values(output, name) for name in ("queries", "keys", "values"))
    all_keys, all_values = (np.repeat(each, NUM_HEADS // 2, axis=3) for each in (k, v))
    scores = np.einsum("LBTNH,LBSNH->LBNTS", q, all_keys) / np.sqrt(q.shape[-1])
    weights = np.exp(np.where(np.tri(6, dtype=bool), scores, -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    chex.assert_trees_all_close(layer_values(output, "weights"), weights, atol=1e-6)
    heads = np.einsum("LBNTS,LBSNH->LBTNH", weights, all_values)
    chex.assert_trees_all_close(layer_values(output, "head_outputs"), heads, atol=1e-6)


def test_logit_lens_of_the_last_layer_is_the_model(params: Any) -> None:
    model = model_with(tie_embeddings=True)
    output = apply(model, {"params": params}, TOKENS, outputs=RESIDUALS)
    lens = logit_lens(model, params, layer_values(output, "residual_post"))
    assert lens.shape == (NUM_LAYERS, 2, 6, 50)
    chex.assert_trees_all_close(lens[-1], output.logits, atol=1e-6)
    assert not np.allclose(lens[0], output.logits, atol=1e-3)


def test_ablated_heads_equal_zero_output_rows(params: Any) -> None:
    """Removed heads equal zero rows in the output projection."""
    model = model_with(layer_loop="scan")
    layer, heads = 2, [0, 3]
    edits = {"head_outputs": zero_heads(layer, heads)}
    edited = apply(model, {"params": params}, TOKENS, edits=edits).logits
    zeroed = jax.tree.map(np.copy, params)
    zeroed["layers"]["place_0"]["mixer"]["output"][1, heads] = 0  # layers 0 and 2: layer 2 is 1
    expected = apply(model, {"params": zeroed}, TOKENS).logits
    chex.assert_trees_all_close(edited, expected, atol=1e-6)
    assert not np.allclose(expected, apply(model, {"params": params}, TOKENS).logits, atol=1e-3)


def test_patched_residual_stream_determines_later_layers(params: Any) -> None:
    model = model_with()
    source = apply(model, {"params": params}, TOKENS, outputs=RESIDUALS)
    last = layer_values(source, "residual_post")[NUM_LAYERS - 1]
    other = TOKENS + 7
    edits = {"residual_post": patch(NUM_LAYERS - 1, last)}
    patched = apply(model, {"params": params}, other, edits=edits)
    chex.assert_trees_all_close(patched.logits, source.logits, atol=1e-6)
    edits = {"residual_post": patch(NUM_LAYERS - 1, last, positions=[2])}
    patched = apply(model, {"params": params}, other, edits=edits)
    plain = apply(model, {"params": params}, other)
    chex.assert_trees_all_close(patched.logits[:, 2], source.logits[:, 2], atol=1e-6)
    chex.assert_trees_all_close(patched.logits[:, 3:], plain.logits[:, 3:], atol=1e-6)


def test_steering_vector_is_added_in_one_layer(params: Any) -> None:
    model, vector = model_with(), normal(1, 32)
    plain = apply(model, {"params": params}, TOKENS, outputs=RESIDUALS)
    edits = {"residual_post": add_vector(1, vector)}
    steered = apply(model, {"params": params}, TOKENS, outputs=RESIDUALS, edits=edits)
    read = functools.partial(layer_values, name="residual_pre")
    chex.assert_trees_all_close(read(steered)[2], read(plain)[2] + vector[None, None], atol=1e-6)
    chex.assert_trees_all_equal(read(steered)[:2], read(plain)[:2])


def test_attention_weights_are_replaced() -> None:
    """By the identity: every token then attends only to itself."""
    mixer = AttentionConfig(num_heads=NUM_HEADS, position=RelativePositions(3))
    model = model_with(layer_pattern=(BlockConfig(mixer=mixer),))
    params = random_params(model)

    def only_itself(weights: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.eye(weights.shape[-1]), weights.shape).astype(weights.dtype)

    edits = {"weights": lambda weights, _: only_itself(weights)}
    output = apply(model, {"params": params}, TOKENS, outputs={"logits", "weights"}, edits=edits)
    chex.assert_trees_all_equal(layer_values(output, "weights")[2, 0, 0], np.eye(6, dtype="f"))
    # Tokens are independent: changing the first one affects only its own output.
    changed_tokens = TOKENS + (np.arange(6) == 0)[None]
    changed = apply(model, {"params": params}, changed_tokens, edits=edits)
    chex.assert_trees_all_equal(changed.logits[:, 1:], output.logits[:, 1:])
    assert not np.allclose(changed.logits[:, 0], output.logits[:, 0])


@pytest.mark.parametrize(
    "mixer",
    [
        BLOCK.mixer,
        PerformerConfig(num_heads=4),
        TopKConfig(num_heads=4),
        SlidingWindowConfig(num_heads=4, window=2),
    ],
    ids=lambda mixer: mixer.kind,
)
def test_edited_heads_with_a_cache_are_those_of_the_full_pass(mixer: Any) -> None:
    """Each edit is applied once: the first head is doubled, the second removed."""
    model = model_with(layer_pattern=(BlockConfig(mixer=mixer),), num_layers=1)
    params = {"params": random_params(model)}
    factors = np.array([2, 0, 1, 1])[None, None, :, None]
    edits = {"head_outputs": lambda value, _: value * factors}
    plain = layer_values(apply(model, params, TOKENS, outputs={"head_outputs"}), "head_outputs")
    outputs = {"head_outputs", "residual_post", "logits"}
    full = apply(model, params, TOKENS, outputs=outputs, edits=edits)
    np.testing.assert_allclose(layer_values(full, "head_outputs"), plain * factors[None], atol=1e-5)
    cache = model.init_cache(2, 6)
    for here in (slice(5), slice(5, 6)):
        arrays: Any = dict(cache=cache, positions=np.arange(6)[None, here])
        result = apply(model, params, TOKENS[:, here], outputs=outputs, edits=edits, **arrays)
        cache = result.cache
        np.testing.assert_allclose(result.logits, full.logits[:, here], atol=1e-4)
        for name in ("head_outputs", "residual_post"):
            expected = layer_values(full, name)[:, :, here]
            np.testing.assert_allclose(layer_values(result, name), expected, atol=1e-4)


def test_keys_with_a_cache_are_those_of_all_its_slots(params: Any) -> None:
    model = model_with()
    cached: dict[str, Any] = dict(cache=model.init_cache(2, 9), positions=np.arange(6)[None])
    assert shapes_of(model, params, {"keys"}, **cached)["keys"][2] == 9


@pytest.fixture(scope="module")
def translator() -> tuple[EncoderDecoder, Any]:
    attention = AttentionConfig(num_heads=2)
    config = TransformerConfig(
        vocab_size=30,
        d_model=8,
        num_layers=3,
        layer_pattern=(BlockConfig(mixer=attention, cross_attention=attention),),
        encoder=EncoderConfig(num_layers=2, layer_pattern=(BlockConfig(mixer=attention),)),
        layer_loop="scan",
    )
    model = EncoderDecoder(config)
    return model, random_params(model)


def test_values_and_edits_of_the_encoder_and_of_cross_attention(translator: Any) -> None:
    model, params = translator
    inputs = {"params": params}, TOKENS[:, :4], TOKENS
    names = {"head_outputs", "weights", "cross_output", "cross_queries", "residual_post", "logits"}
    plain = apply(model, *inputs, outputs=names)
    assert layer_values(plain, "cross_weights").shape == (3, 2, 2, 6, 4)
    assert layer_values(plain, "cross_head_outputs").shape == (3, 2, 6, 2, 4)
    assert layer_values(plain, "cross_queries").shape == (3, 2, 6, 2, 4)
    assert layer_values(plain, "head_outputs", encoder=True).shape == (2, 2, 4, 2, 4)
    assert layer_values(plain, "weights", encoder=True).shape == (2, 2, 2, 4, 4)
    silent = {"cross_head_outputs": lambda value, _: jnp.zeros_like(value)}
    changed_source = inputs[0], TOKENS[:, :4] + 3, TOKENS
    without_source = apply(model, *inputs, edits=silent).logits
    other_source = apply(model, *changed_source, edits=silent).logits
    chex.assert_trees_all_equal(without_source, other_source)
    assert not np.allclose(plain.logits, without_source, atol=1e-4)
    source = layer_values(plain, "residual_post", encoder=True)[1]
    patched = apply(model, *changed_source, edits={"encoder_residual_post": patch(1, source)})
    chex.assert_trees_all_close(patched.logits, plain.logits, atol=1e-6)


def test_layers_with_and_without_a_value() -> None:
    """A hybrid of recurrent layers and attention."""
    recurrent = BlockConfig(mixer=LSTMConfig())
    model = model_with(layer_pattern=(recurrent, BLOCK), num_layers=4)
    params = random_params(model)
    shapes = shapes_of(model, params, {"head_outputs", "residual_post"})
    assert shapes == {"head_outputs": (2, 2, 6, 4, 8), "residual_post": (4, 2, 6, 32)}
    with pytest.raises(ValueError, match=r"^edit of head_outputs: layer 2 has no such value; give"):
        apply(model, {"params": params}, TOKENS, edits={"head_outputs": zero_heads(2, [0])})


def test_sliding_windows_show_values_without_a_cache() -> None:
    block = BlockConfig(mixer=SlidingWindowConfig(num_heads=4, window=2))
    model = model_with(layer_pattern=(block,), num_layers=1)
    params = {"params": random_params(model)}
    output = apply(model, params, TOKENS, outputs={"weights", "head_outputs", "values"})
    [y] = np.einsum(
        "LBNTS,LBSNH->LBTNH", layer_values(output, "weights"), layer_values(output, "values")
    )
    np.testing.assert_allclose(y, layer_values(output, "head_outputs")[0], atol=1e-6)
    cached: dict[str, Any] = dict(cache=model.init_cache(2, 6), positions=np.arange(6)[None])
    assert shapes_of(model, params["params"], {"weights"}, **cached)
    with pytest.raises(ValueError, match=r"^mixer sliding_window: shows no keys with a cache; lea"):
        apply(model, params, TOKENS, outputs={"keys"}, **cached)


@pytest.mark.sampled("performer")
@pytest.mark.parametrize(
    "kind", [kind for kind in BUILTIN_MIXERS if "head_outputs" in MIXERS[kind].values]
)
def test_the_heads_make_up_the_output(kind: str) -> None:
    """Of every mixer that has heads; and without one of them its part is gone."""
    config = dataclasses.replace(
        CONFIG, layer_pattern=(BlockConfig(mixer=default_config(kind)),), num_layers=1, causal=False
    )
    model = Classifier(config)
    params = random_params(model)
    weights = params["layers"]["place_0"]["mixer"]
    matrix, bias = weights["output"][0], weights.get("output_bias", np.zeros((1, 1)))[0]

    @jax.jit
    def run(kept: jax.Array) -> Any:
        edits = {"head_outputs": lambda value, _: value * kept[None, None, :, None]}
        names = ("head_outputs", "mixer_output")
        output = model.apply({"params": params}, TOKENS, outputs=set(names), edits=edits)
        return [inspection.layer_values(output, name)[0] for name in names]

    heads, y = jax.device_get(run(np.ones(matrix.shape[0], bool)))
    expected = np.einsum("BTNH,NHD->BTD", heads, matrix) + bias
    np.testing.assert_allclose(y, expected, atol=1e-5 * max(1, abs(expected).max()))
    _, without = jax.device_get(run(np.arange(matrix.shape[0]) > 0))
    removed = np.einsum("BTH,HD->BTD", heads[:, :, 0], matrix[0])
    np.testing.assert_allclose(without, expected - removed, atol=1e-5 * max(1, abs(y).max()))
    assert abs(removed).max() > 1e-3


@pytest.mark.parametrize("kind", BUILTIN_MIXERS)
def test_every_mixer_returns_its_values_or_raises(kind: str) -> None:
    """In a model of one layer, without compiling it."""
    mixer = default_config(kind)
    values = set(mixer_class(mixer).values)
    if mixer.reads_memory:  # only supported in the decoder of a model with an encoder
        assert not values
        return
    config = dataclasses.replace(
        CONFIG, layer_pattern=(BlockConfig(mixer=mixer),), num_layers=1, causal=False
    )
    model = Classifier(config)
    params = jax.eval_shape(model.init_params, jax.random.key(0))

    names = ATTENTION_VALUES.keys() - {"weights"}
    shapes = shapes_of(model, params, {"residual_post"} | (names & values))
    assert shapes.pop("residual_post") == (1, 2, 6, 32)
    assert all(shape[:3] == (1, 2, 6) for shape in shapes.values())
    for name in names - values:
        with pytest.raises(ValueError, match=f"^outputs '{name}': the model has no such value"):
            shapes_of(model, params, {name})
    if mixer_class(mixer).abilities(mixer).weights:
        assert shapes_of(model, params, {"weights"})["weights"][-1] == 6
    else:
        with pytest.raises(ValueError, match=rf"^mixer {kind}: .*; "):
            shapes_of(model, params, {"weights"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outputs": {"wieghts"}}, "outputs 'wieghts': the model has no such value"),
        ({"edits": {"cross_output": zero_heads(0, 0)}}, "edits 'cross_output': the model has no"),
        ({"edits": {"keys": zero_heads(3, 0)}}, "edit of keys: there is no layer 3"),
        ({"edits": {"keys": zero_heads(-1, 0)}}, "edit of keys: there is no layer -1"),
        ({"edits": {"residual_pre": lambda x, layer: x[:, :1]}}, "edit of residual_pre: returns"),
    ],
)
def test_wrong_names_and_shapes_raise(params: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        apply(model_with(), {"params": params}, TOKENS, **arguments)


def test_value_that_was_not_requested_raises(params: Any) -> None:
    output = apply(model_with(), {"params": params}, TOKENS, outputs=RESIDUALS)
    with pytest.raises(ValueError, match=r"^name 'queries': is not among the outputs"):
        layer_values(output, "queries")


def test_unrequested_values_are_not_computed(params: Any) -> None:
    model = model_with(layer_loop="scan")

    def program(**arguments: Any) -> str:
        return str(
            jax.make_jaxpr(lambda p: model.apply({"params": p}, TOKENS, **arguments))(params)
        )

    assert program() == program(edits={}) == program(outputs={"logits"})
    never = {"residual_pre": at_layers([], lambda value: value * 2)}
    assert program(edits=never) != program()
