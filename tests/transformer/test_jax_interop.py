"""Models with the tools of JAX and Flax: export, NNX, vmap, explicit sharding."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.transformer.formulas import assert_trees_close, random_params_like
from transformer import (
    AttentionConfig,
    BigBirdConfig,
    BlockConfig,
    FeedForwardConfig,
    LanguageModel,
    LearnedPositions,
    RoPE,
    TransformerConfig,
)
from transformer.generation.generate import generate
from transformer.losses import next_token_loss
from transformer.models.explicit_sharding import with_auto_axes

V, D = 13, 8
BLOCK = BlockConfig(
    mixer=AttentionConfig(num_heads=4, num_kv_heads=2, position=RoPE(), dropout=0.5),
    feed_forward=FeedForwardConfig(10),
)
CONFIG = TransformerConfig(vocab_size=V, d_model=D, num_layers=1, layer_pattern=(BLOCK,))
MODEL = LanguageModel(CONFIG)
TOKENS: Any = np.arange(12).reshape(4, 3)

Params = Any


@pytest.fixture(scope="module")
def params() -> Params:
    shapes = jax.eval_shape(MODEL.init_params, jax.random.key(0))
    return jax.device_put(random_params_like(shapes))


@jax.jit
def logits_of(params: Params, tokens: jax.Array) -> jax.Array:
    logits = with_auto_axes(MODEL.apply)({"params": params}, tokens).logits
    assert logits is not None
    return logits[..., :V]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    # Not by integer labels: jax 0.12 cannot differentiate optax's lookup over explicit axes.
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, V)).mean()


def loss_of(params: Params, tokens: jax.Array) -> jax.Array:
    return cross_entropy(logits_of(params, tokens[:, :-1]), tokens[:, 1:])


gradient_of = jax.jit(jax.grad(loss_of))


# jax.export


def export(model: LanguageModel, scope: str, constraints: tuple[str, ...] = ()) -> Any:
    """Export a model's logits as a program for tokens of this symbolic shape."""
    shape = jax.export.symbolic_shape(scope, constraints=constraints)
    params = jax.eval_shape(model.init_params, jax.random.key(0))
    run = jax.jit(lambda params, tokens: model.apply({"params": params}, tokens).logits)
    return jax.export.export(run)(params, jax.ShapeDtypeStruct(shape, jnp.int32))


def test_one_export_works_for_all_batch_sizes_and_lengths(params: Params) -> None:
    stored = export(MODEL, "batch, length").serialize()
    run = jax.export.deserialize(stored).call
    for tokens in (TOKENS, TOKENS.reshape(1, 12), TOKENS.reshape(12, 1)):
        assert_trees_close(np.asarray(run(params, tokens))[..., :V], logits_of(params, tokens))


def test_export_with_learned_positions_needs_a_length_limit() -> None:
    position = LearnedPositions(16)
    model = LanguageModel(TransformerConfig(V, D, 1, (BLOCK,), position_embedding=position))
    with pytest.raises(Exception, match="length"):
        export(model, "batch, length")
    shape = export(model, "batch, length", ("length <= 16",)).in_avals[-1].shape
    assert len(shape) == 2


def test_block_sparse_layers_need_a_concrete_length() -> None:
    block = BlockConfig(mixer=BigBirdConfig(num_heads=2, block_size=2))
    model = LanguageModel(TransformerConfig(V, D, 1, (block,)))
    with pytest.raises(Exception, match="length"):
        export(model, "batch, length")
    assert export(model, "batch, 12").in_avals[-1].shape[1] == 12


# Flax


@pytest.mark.full
def test_nnx_bridge_gives_the_same_outputs_and_gradients(params: Params) -> None:
    bridged = nnx.jit(lambda: nnx.bridge.ToNNX(MODEL, rngs=nnx.Rngs(0)).lazy_init(TOKENS))()
    nnx.update(bridged, nnx.State(jax.tree.map(nnx.Param, params)))
    logits = nnx.jit(lambda model: model(TOKENS).logits[..., :V])(bridged)
    assert_trees_close(logits, logits_of(params, TOKENS))

    @nnx.jit
    @nnx.grad
    def gradient(model: Any) -> Any:
        logits = model(TOKENS[:, :-1]).logits[..., :V]
        return cross_entropy(logits, TOKENS[:, 1:])

    expected = gradient_of(params, TOKENS)
    assert_trees_close(nnx.to_pure_dict(gradient(bridged)), expected)


# Transformations


def test_per_example_gradients(params: Params) -> None:
    each = jax.jit(jax.vmap(gradient_of, in_axes=(None, 0)))(params, TOKENS[:, None])
    each = jax.device_get(each)
    assert_trees_close(jax.tree.map(lambda g: g.mean(0), each), gradient_of(params, TOKENS))
    assert_trees_close(jax.tree.map(lambda g: g[1], each), gradient_of(params, TOKENS[1:2]))


def test_gradients_with_jax_checkpoint(params: Params) -> None:
    policy = jax.checkpoint_policies.dots_saveable
    gradient = jax.jit(jax.grad(jax.checkpoint(loss_of, policy=policy)))
    assert_trees_close(gradient(params, TOKENS), gradient_of(params, TOKENS))


# Meshes with explicit axes, the default of jax.make_mesh from jax 0.10 on


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    axes = (AxisType.Explicit,)
    return jax.make_mesh((2,), ("data",), axis_types=axes, devices=jax.devices()[:2])


def place(mesh: Mesh, tree: Any, *axes: str | None) -> Any:
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*axes)))


def check_mesh(mesh: Mesh, params: Params) -> None:
    """Check that the batch and the logits are sharded over devices, and gradients are
    replicated.
    """
    full, split = place(mesh, params), place(mesh, TOKENS, "data")
    logits = logits_of(full, split)
    assert logits.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("data")), 3)
    assert_trees_close(logits, logits_of(params, TOKENS))
    assert_trees_close(gradient_of(full, split), gradient_of(params, TOKENS))


@pytest.mark.full
def test_explicit_axes(mesh: Mesh, params: Params) -> None:
    check_mesh(mesh, params)
    with jax.set_mesh(mesh):
        check_mesh(mesh, params)


def test_explicit_axes_of_weights(mesh: Mesh, params: Params) -> None:
    """Gradients are sharded as the weights are."""
    weights = {**place(mesh, params), "embedding": place(mesh, params["embedding"], None, "data")}
    gradient = gradient_of(weights, place(mesh, TOKENS, "data"))
    assert gradient["embedding"].sharding.spec == PartitionSpec(None, "data")
    assert_trees_close(gradient, gradient_of(params, TOKENS))


@pytest.mark.full
def test_explicit_axes_outside_of_jit(mesh: Mesh, params: Params) -> None:
    full, split = place(mesh, params), place(mesh, TOKENS, "data")
    positions, cache = place(mesh, jnp.arange(3)[None]), MODEL.init_cache(4, 5)
    cache = place(mesh, cache, "data")
    out = with_auto_axes(MODEL.apply)({"params": full}, split, positions=positions, cache=cache)
    assert out.logits is not None
    assert_trees_close(out.logits[..., :V], logits_of(params, TOKENS))
    specs = {leaf.sharding.spec[0] for leaf in jax.tree.leaves(out.cache)}
    assert specs == {"data"}


@pytest.mark.full
def test_explicit_axes_with_dropout_and_intermediates(mesh: Mesh, params: Params) -> None:
    rngs = jax.random.split(jax.random.key(3), 4)

    @jax.jit
    def run(params: Params, tokens: jax.Array, rngs: jax.Array) -> Any:
        options = dict(capture_intermediates=True, mutable=["intermediates"])
        output: Any = with_auto_axes(MODEL.apply)(
            {"params": params}, tokens, dropout_rngs=rngs, **options
        )
        return output[0].hidden

    split = place(mesh, TOKENS, "data"), place(mesh, rngs, "data")
    actual = run(place(mesh, params), *split)
    assert_trees_close(actual, run(params, TOKENS, rngs))


@pytest.mark.full
def test_explicit_axes_of_initial_values(mesh: Mesh) -> None:
    params = jax.jit(MODEL.init_params)(jax.random.key(0))
    init = with_auto_axes(MODEL.init, replicate_result=True)
    sharded_params = init(jax.random.key(0), place(mesh, TOKENS, "data"))["params"]
    assert_trees_close(sharded_params, params)


@pytest.mark.full
def test_generation_from_weights_with_explicit_axes(mesh: Mesh, params: Params) -> None:
    prompts = [[1, 2], [3]]
    result = generate(MODEL, place(mesh, params), prompts, max_new_tokens=2)
    assert result.tokens == generate(MODEL, params, prompts, max_new_tokens=2).tokens


def test_loss_with_explicit_axes(mesh: Mesh, params: Params) -> None:
    """The loss, unlike the model, computes with the explicit axes."""

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        targets, weights = jnp.roll(tokens, -1, axis=1), jnp.ones_like(tokens, jnp.float32)
        batch = dict(tokens=tokens, targets=targets, weights=weights)
        return next_token_loss(MODEL, params, batch, has_segments=False)["loss"].total

    gradient = jax.jit(jax.grad(loss))
    actual = gradient(place(mesh, params), place(mesh, TOKENS, "data"))
    assert_trees_close(actual, gradient(params, TOKENS))


@pytest.mark.full
def test_explicit_axes_of_inputs_that_a_function_closes_over(mesh: Mesh, params: Params) -> None:
    tokens = place(mesh, TOKENS, "data")
    with jax.set_mesh(mesh):
        actual = jax.jit(lambda params: logits_of(params, tokens))(params)
    assert_trees_close(actual, logits_of(params, TOKENS))
