import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.transformer.formulas import array, assert_close, layer_norm, random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LanguageModel,
    LearnedPositions,
    TransformerConfig,
)
from transformer.chunked_cross_entropy import ChunkedCrossEntropy
from transformer.models import model as model_module
from transformer.models.embedding import get_output_matrix
from transformer.models.model import init_compiler_options
from transformer.models.unstacked import unstack_for_decoding

B, T, V, ROWS, D = 2, 5, 13, 16, 12
BLOCK = BlockConfig(mixer=AttentionConfig(num_heads=3), feed_forward=FeedForwardConfig(7))
CONFIG = TransformerConfig(
    vocab_size=V,
    d_model=D,
    num_layers=1,
    layer_pattern=(BLOCK,),
    position_embedding=LearnedPositions(T + 2),
    pad_vocab_to_multiple=8,
)
UNTIED = dataclasses.replace(CONFIG, tie_embeddings=False)
TOKENS: Any = np.random.default_rng(0).integers(0, V, (B, T))


@functools.cache
def compiled(config: TransformerConfig) -> Any:
    return jax.jit(LanguageModel(config).apply, static_argnames="outputs")


def make_model(config: TransformerConfig) -> tuple[Any, Any]:
    """Return the model as a compiled function, and random parameters for it."""
    return compiled(config), make_params(LanguageModel(config))


def make_params(model: LanguageModel) -> Any:
    return random_params_like(shapes_of(model))


@functools.cache
def shapes_of(model: LanguageModel) -> Any:
    return jax.eval_shape(model.init_params, jax.random.key(0))


@pytest.fixture
def user_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile initial weights as for a user: tests compile without optimizations."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    monkeypatch.setattr(model_module, "INIT_OPTIMIZATION_LEVEL", 1)
    monkeypatch.setattr(model_module, "_init_program", model_module._init_program.__wrapped__)
    yield
    jax.config.update(name, before)


def test_initial_parameters_are_the_same_in_any_program(user_options: None) -> None:
    """Alone and in a larger program: equal up to rounding."""
    assert init_compiler_options("cpu") == {"xla_backend_optimization_level": 1}
    assert init_compiler_options("gpu") is None
    keys = jax.random.split(jax.random.key(3), 2)
    block = BlockConfig(mixer=BLOCK.mixer, feed_forward=None)
    model = LanguageModel(dataclasses.replace(CONFIG, layer_pattern=(block,)))
    alone = model.init_params(keys[1])
    batch = jax.device_get(jax.jit(jax.vmap(model.init_params))(keys))
    chex.assert_trees_all_close(alone, jax.tree.map(lambda leaf: leaf[1], batch), rtol=1e-5)


@pytest.mark.parametrize(("config", "output"), [(CONFIG, set()), (UNTIED, {"output"})])
def test_tied_and_untied_output_matrix(config: TransformerConfig, output: Any) -> None:
    run, params = make_model(config)
    assert set(params) == {"embedding", "positions", "layers", "final_norm"} | output
    out = run({"params": params}, TOKENS)
    matrix = params["embedding"].T if config.tie_embeddings else params["output"]
    assert np.array_equal(get_output_matrix(params, config), matrix)
    assert_close(out.logits[..., :V], np.asarray(out.hidden) @ matrix[:, :V])


def test_embeddings_and_the_final_norm() -> None:
    """With layers that add nothing, the model is the norm of word plus position."""
    run, params = make_model(dataclasses.replace(CONFIG, embedding_scale=3.0))
    params["layers"] = jax.tree.map(np.zeros_like, params["layers"])
    positions = array([[6, 0, 3, 3, 1]])
    hidden = run({"params": params}, TOKENS, positions=positions).hidden
    x = 3 * params["embedding"][TOKENS] + params["positions"][positions]
    norm = params["final_norm"]
    assert_close(hidden, layer_norm(x, norm["gain"], norm["bias"], 1e-5))
    by_index = run({"params": params}, TOKENS).hidden
    assert_close(by_index, run({"params": params}, TOKENS, positions=np.arange(T)[None]).hidden)


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_vocabulary_padding_is_never_predicted_or_trained(config: Any) -> None:
    run, params = make_model(config)
    logits = run({"params": params}, TOKENS).logits
    assert logits.shape == (B, T, V)

    def total(params: Any) -> Any:
        hidden = run({"params": params}, TOKENS).hidden
        ones = jnp.ones((B, T))
        return ChunkedCrossEntropy(V)(hidden, get_output_matrix(params, config), TOKENS, ones)

    gradient = jax.device_get(jax.jit(jax.grad(total))(params))
    rows = (
        [gradient["embedding"]]
        if config.tie_embeddings
        else [gradient["embedding"], gradient["output"].T]
    )
    for each in rows:
        assert not np.any(each[V:])
        assert np.any(each[:V])


def test_scanned_equals_unrolled() -> None:
    config = dataclasses.replace(CONFIG, num_layers=2)
    runs = [make_model(dataclasses.replace(config, layer_loop=loop)) for loop in ("scan", "unroll")]
    scanned, unrolled = (run({"params": params}, TOKENS).logits for run, params in runs)
    assert_close(scanned, unrolled)


def test_only_requested_outputs_are_returned() -> None:
    run, params = make_model(CONFIG)
    out = run({"params": params}, TOKENS, outputs=frozenset())
    assert (out.logits, out.cache, out.aux) == (None, None, ({},))
    out = run({"params": params}, TOKENS, outputs=frozenset({"logits", "weights"}))
    assert out.logits is not None
    assert out.aux[0]["weights"].shape == (1, B, 3, T, T)


def test_tokens_see_neither_the_future_nor_other_documents() -> None:
    run, params = make_model(CONFIG)
    kwargs: Any = dict(
        segments=array([[1, 1, 1, 2, 2]]), positions=array([[0, 1, 2, 0, 1]]), outputs=frozenset()
    )
    hidden = np.asarray(run({"params": params}, TOKENS, **kwargs).hidden)
    for changed, kept in ((2, [0, 1, 3, 4]), (3, [0, 1, 2]), (0, [3, 4])):
        others = TOKENS.copy()
        others[:, changed] = (others[:, changed] + 1) % V
        again = np.asarray(run({"params": params}, others, **kwargs).hidden)
        assert np.array_equal(again[:, kept], hidden[:, kept])
        assert not np.array_equal(again[:, changed], hidden[:, changed])


def test_embedding_dropout_uses_the_rngs_of_each_example() -> None:
    config = dataclasses.replace(CONFIG, embedding_dropout=0.5, final_norm=None)
    run, params = make_model(config)
    params["layers"] = jax.tree.map(np.zeros_like, params["layers"])
    keys = jax.random.split(jax.random.key(0), B)
    hidden = np.asarray(run({"params": params}, TOKENS, dropout_rngs=keys).hidden)
    full = np.asarray(run({"params": params}, TOKENS).hidden)
    assert_close(hidden, np.where(hidden == 0, 0, 2 * full))
    assert 0.2 < (hidden == 0).mean() < 0.8
    reversed_batch = run({"params": params}, TOKENS[::-1], dropout_rngs=keys[::-1]).hidden
    assert np.array_equal(reversed_batch, hidden[::-1])


@pytest.fixture(scope="module")
def initial_params() -> Any:
    """Return freshly initialized parameters, large enough for statistics."""
    model = LanguageModel(dataclasses.replace(CONFIG, d_model=66, tie_embeddings=False))
    return jax.device_get(jax.jit(model.init)(jax.random.key(0), TOKENS)["params"])


def test_initial_statistics_of_parameters(initial_params: Any) -> None:
    layers = initial_params["layers"]["place_0"]
    deviation = lambda leaf: float(np.std(leaf))  # noqa: E731
    tables = (initial_params["embedding"], initial_params["positions"], initial_params["output"])
    matrices = (layers["mixer"]["query"], layers["mixer"]["value"], layers["feed_forward"]["up"])
    for leaf in (*tables, *matrices):
        assert deviation(leaf) == pytest.approx(0.02, rel=0.1)
    for leaf in (layers["mixer"]["output"], layers["feed_forward"]["down"]):
        assert deviation(leaf) == pytest.approx(0.02 / math.sqrt(2), rel=0.1)
    for norm in (layers["mixer_norm"], layers["feed_forward_norm"], initial_params["final_norm"]):
        assert (norm["gain"] == 1).all()
        assert (norm["bias"] == 0).all()
    assert not np.any(layers["mixer"]["query_bias"])
    assert not np.any(layers["feed_forward"]["down_bias"])


def test_axes_follow_the_parameter_tree() -> None:
    model = LanguageModel(UNTIED)
    axes, (_, params) = model.logical_axes(), make_model(UNTIED)
    lengths = jax.tree.map(lambda names: len(names.names), axes)
    assert lengths == jax.tree.map(np.ndim, params)
    assert axes["embedding"].names == ("vocab", "embed")
    assert axes["output"].names == ("embed", "vocab")
    assert axes["positions"].names == ("positions", "embed")
    assert axes["final_norm"]["gain"].names == ("embed",)
    layer = axes["layers"]["place_0"]
    assert layer["mixer"]["query"].names == ("layers", "embed", "heads", "head")
    assert layer["feed_forward"]["down"].names == ("layers", "mlp", "embed")
    decayed = jax.tree.map(lambda names: names.is_matrix, layer)
    assert decayed["mixer"] == {
        name: not name.endswith("bias") for name in params["layers"]["place_0"]["mixer"]
    }
    assert decayed["mixer_norm"] == {"gain": False, "bias": False}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("shape", "given", "message"),
    [
        ((B, T + 3), {}, "8 tokens: the table of learned positions has 7 rows"),
        ((B, 1), {"positions": np.full((B, 1), 7)}, "position 7: the table of learned positions"),
        ((T,), {}, r"tokens of shape \(5,\)"),
        ((B, 1), {"cache": ()}, "cache: needs positions"),
        (
            (B, 1),
            {"cache": (), "positions": np.zeros((B, 1), int), "segments": np.ones((B, 1), int)},
            "cache: cannot be combined with segments",
        ),
    ],
    ids=["too long", "too far", "no batch", "no positions", "segments"],
)
def test_invalid_inputs_raise(shape: tuple[int, ...], given: Any, message: str) -> None:
    tokens = np.zeros(shape, int)
    with pytest.raises(ValueError, match=f"^{message}"):
        jax.eval_shape(lambda: LanguageModel(CONFIG).init(jax.random.key(0), tokens, **given))


@pytest.mark.parametrize(
    ("vocab", "multiple", "rows"), [(13, 8, 16), (16, 8, 16), (50_257, 128, 50_304), (13, 1, 13)]
)
def test_number_of_embedding_rows(vocab: int, multiple: int, rows: int) -> None:
    config = dataclasses.replace(CONFIG, vocab_size=vocab, pad_vocab_to_multiple=multiple)
    assert config.padded_vocab_size == rows


def test_maximum_length() -> None:
    assert CONFIG.max_length == T + 2
    assert TransformerConfig().max_length is None


def test_prefix_is_visible_to_all_and_the_rest_is_causal() -> None:
    """Each example has its own prefix length; after it, the model is causal."""
    run, params = make_model(CONFIG)
    prefix = array([3, 1])

    def hidden(tokens: Any) -> Any:
        return np.asarray(run({"params": params}, tokens, prefix_lengths=prefix).hidden)

    before = hidden(TOKENS)
    for place in range(T):
        changed = TOKENS.copy()
        changed[:, place] = (changed[:, place] + 1) % V
        moved = np.any(hidden(changed) != before, axis=-1)
        for example in range(B):
            first = 0 if place < prefix[example] else place
            assert moved[example].tolist() == [t >= first for t in range(T)]


@pytest.mark.parametrize(("num_layers", "places"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_parameters_of_another_depth_raise(num_layers: int, places: int, loop: Any) -> None:
    config = TransformerConfig(vocab_size=9, d_model=8, num_layers=2, layer_loop=loop)
    params = make_params(LanguageModel(config))
    other = dataclasses.replace(
        config, num_layers=num_layers, layer_pattern=config.layer_pattern * places
    )
    for given in (params, unstack_for_decoding(params)):
        with pytest.raises(ValueError, match="layers/place_0: have 2 layers, but the model has"):
            jax.eval_shape(LanguageModel(other).apply, {"params": given}, np.zeros((1, 2), int))


def test_parameters_of_a_longer_pattern_raise() -> None:
    config = TransformerConfig(vocab_size=9, d_model=8, num_layers=2)
    longer = dataclasses.replace(config, layer_pattern=config.layer_pattern * 2, num_layers=4)
    params, tokens = make_params(LanguageModel(longer)), np.zeros((1, 2), int)
    with pytest.raises(
        ValueError, match=r"^parameters layers/place_\d: the model's layer pattern has"
    ):
        jax.eval_shape(LanguageModel(config).apply, {"params": params}, tokens)

    class Wrapper(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> Any:
            return LanguageModel(config, name="model")(tokens)

    with pytest.raises(
        ValueError, match=r"^parameters layers/place_\d: the model's layer pattern has"
    ):
        jax.eval_shape(Wrapper().apply, {"params": {"model": params}}, tokens)


def test_flax_rngs_turn_dropout_on() -> None:
    config = TransformerConfig(vocab_size=9, d_model=8, num_layers=2, embedding_dropout=0.5)
    model, tokens = LanguageModel(config), jnp.zeros((3, 4), jnp.int32)
    variables = {"params": make_params(model)}

    @jax.jit
    def hidden(rngs: dict[str, jax.Array] | None) -> jax.Array:
        return model.apply(variables, tokens, rngs=rngs).hidden

    plain = np.asarray(hidden(None))
    dropped, again, other = (
        np.asarray(hidden({"dropout": jax.random.key(seed)})) for seed in (1, 1, 2)
    )
    assert np.array_equal(dropped, again)
    assert not np.array_equal(dropped, plain)
    assert not np.array_equal(dropped, other)
    assert not np.array_equal(dropped[0], dropped[1])  # equal rows, keys of their own
    keys = jax.random.split(jax.random.key(1), 3)
    with pytest.raises(ValueError, match=r"^dropout_rngs and rngs: both have keys"):
        model.apply(variables, tokens, dropout_rngs=keys, rngs={"dropout": keys[0]})


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("rngs", [jax.random.key(0), jax.random.PRNGKey(0)[None]])
def test_one_dropout_key_for_all_examples_raises(rngs: jax.Array) -> None:
    model = LanguageModel(TransformerConfig(vocab_size=9, d_model=8, num_layers=2))
    variables = {"params": make_params(model)}
    with pytest.raises(ValueError, match="one typed key for each of the 3 examples"):
        model.apply(variables, jnp.zeros((3, 4), jnp.int32), dropout_rngs=rngs)


def test_model_without_vocabulary_raises() -> None:
    with pytest.raises(
        ValueError, match=r"^TransformerConfig.vocab_size 0: is not set; give the tokenizer's"
    ):
        LanguageModel(TransformerConfig()).init_params(jax.random.key(0))
