"""Scanned and unrolled layers are equal, and each layer gets its own inputs."""

import dataclasses
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import meta

from tests.transformer.formulas import assert_close, assert_trees_close, normal, random_params_like
from transformer import (
    MIXERS,
    Abilities,
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Hardware,
    IdentityConfig,
    Initialization,
    LanguageModel,
    Mask,
    MaskPattern,
    Mixer,
    MixerConfig,
    MixerOutput,
    NormConfig,
    Precision,
    TransformerConfig,
)
from transformer.attention.mixer import MixerInputs
from transformer.flops import count_token_flops
from transformer.layers.basic import declare_weight, fold_in
from transformer.layers.logical_axes import abstract_weights
from transformer.model_context import ModelContext
from transformer.models.block import Memory
from transformer.models.stack import LayerLoop, RematPolicy, Stack
from transformer.models.unstacked import unstack_for_decoding, unstack_layers
from transformer.parameter_counts import count_parameters

B, T, D = 2, 3, 6
RNGS = jax.random.split(jax.random.key(0), B)
WEIGHTS = frozenset({"weights"})
LOOPS: tuple[LayerLoop, LayerLoop] = ("scan", "unroll")


@dataclasses.dataclass(frozen=True)
class StampConfig(MixerConfig):
    kind: ClassVar[str] = "stamp"
    tag: int = 0


class Stamp(Mixer):
    """Mixer whose output identifies its layer: its constants, its weight, its random keys."""

    config: StampConfig

    @staticmethod
    def abilities(config: StampConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def constants(config: StampConfig, layer: int, width: int) -> Any:
        return {"number": jnp.array([layer, config.tag])}

    def init_cache(self, batch: int, length: int) -> None:
        return None

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        init = nn.initializers.normal(1)
        w = declare_weight(self, "w", outputs={"embed": D}, init=init, dtype="float32")
        aux = {"weight": w, **inputs.constants}
        if inputs.dropout_rngs is not None:
            aux["dropout_rngs"] = jax.random.key_data(inputs.dropout_rngs)
        return MixerOutput(x * w[None, None], inputs.cache, aux)


@pytest.fixture(autouse=True)
def _with_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, StampConfig.kind, Stamp)


def stack(
    layers: int,
    *blocks: BlockConfig,
    loop: LayerLoop = "auto",
    remat: RematPolicy = "none",
    hardware: Hardware = Hardware(),  # noqa: B008
) -> Stack:
    shared = ModelContext(D, layers, Precision(), Initialization(std=1.0), hardware)
    return Stack(blocks, shared, loop, remat)


GIVEN: Any = dict(positions=np.arange(T)[None], mask=Mask(MaskPattern(causal=True)))
X = normal(0, B, T, D)
STAMPS = tuple(
    BlockConfig(mixer=StampConfig(tag), feed_forward=FeedForwardConfig(2)) for tag in (7, 8)
)
ATTENDING = BlockConfig(
    mixer=AttentionConfig(num_heads=3, bias=False),
    feed_forward=FeedForwardConfig(5, "relu", bias=False),
    norm=NormConfig("rms"),
    residual_dropout=0.5,
)


def params_of(module: Stack) -> Any:
    init = lambda x: module.init(jax.random.key(0), x, MixerInputs(**GIVEN))  # noqa: E731
    return random_params_like(meta.unbox(jax.eval_shape(init, X))["params"])


def apply_stack(module: Stack, params: Any, rngs: Any = None) -> Any:
    run = jax.jit(
        lambda params, x, rngs: module.apply(
            {"params": params}, x, MixerInputs(**GIVEN, dropout_rngs=rngs)
        )
    )
    return run(params, X, rngs)


@pytest.mark.parametrize("loop", LOOPS)
def test_each_layer_gets_its_constants_weights_and_rngs(loop: LayerLoop) -> None:
    """Five layers over two places: two full repetitions, and a tail with the first place."""
    module = stack(5, *STAMPS, loop=loop)
    assert module.num_scanned_layers == (4 if loop == "scan" else 0)
    params = params_of(module)
    aux = apply_stack(module, params, RNGS).aux
    for place, layers in ((0, [0, 2, 4]), (1, [1, 3])):
        assert np.array_equal(aux[place]["number"], [[layer, 7 + place] for layer in layers])
        assert np.array_equal(aux[place]["weight"], params[f"place_{place}"]["mixer"]["w"])
        for row, layer in enumerate(layers):
            rngs: Any = fold_in(fold_in(RNGS, layer), 0)
            assert np.array_equal(aux[place]["dropout_rngs"][row], jax.random.key_data(rngs))


@pytest.mark.parametrize("loop", LOOPS)
def test_cross_attention_gets_constants_of_its_layer(loop: LayerLoop) -> None:
    """In addition to those of the mixer before it; the first place has a mixer without
    constants.
    """
    alone = BlockConfig(mixer=IdentityConfig(), cross_attention=StampConfig(5), feed_forward=None)
    module = stack(
        5, alone, dataclasses.replace(STAMPS[1], cross_attention=StampConfig(9)), loop=loop
    )
    assert module.num_scanned_layers == (4 if loop == "scan" else 0)
    arguments = MixerInputs(**GIVEN), Memory(normal(2, B, 2, D), Mask())
    shapes = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, *arguments), X)
    params = random_params_like(meta.unbox(shapes)["params"])

    @jax.jit
    def run(params: Any, x: Any) -> Any:
        output: Any = module.apply({"params": params}, x, *arguments)
        return output.aux

    first, second = run(params, X)
    assert np.array_equal(first["cross_number"], [[0, 5], [2, 5], [4, 5]])
    assert np.array_equal(second["number"], [[1, 8], [3, 8]])
    assert np.array_equal(second["cross_number"], [[1, 9], [3, 9]])


def test_weights_are_stacked_over_layers_of_a_place() -> None:
    module = stack(5, *STAMPS)
    init = lambda x: module.init(jax.random.key(0), x, MixerInputs(**GIVEN))  # noqa: E731
    shapes, axes = abstract_weights(init, X)
    assert shapes["place_1"]["feed_forward"]["up"].shape == (2, D, 2)
    assert axes["place_1"]["feed_forward"]["up"].names == ("layers", "embed", "mlp")
    assert shapes["place_0"]["mixer_norm"]["gain"].shape == (3, D)
    assert not axes["place_0"]["mixer_norm"]["gain"].is_matrix


def test_layers_have_different_initial_weights() -> None:
    module = stack(3, STAMPS[0])
    init = jax.jit(
        lambda x: meta.unbox(module.init(jax.random.key(0), x, MixerInputs(**GIVEN)))["params"]
    )
    drawn = np.asarray(init(X)["place_0"]["mixer"]["w"])
    assert len({tuple(row) for row in drawn}) == 3


@pytest.mark.parametrize(
    ("layers", "blocks", "loop", "remat", "scanned"),
    [
        (16, 1, "auto", "none", 0),
        (16, 1, "auto", "dots", 16),
        (17, 2, "auto", "none", 16),
        (3, 2, "scan", "none", 0),  # one repetition needs no loop
        (48, 1, "unroll", "full", 0),
    ],
)
def test_number_of_scanned_layers(
    layers: int, blocks: int, loop: LayerLoop, remat: RematPolicy, scanned: int
) -> None:
    module = stack(layers, *[ATTENDING] * blocks, loop=loop, remat=remat)
    assert module.num_scanned_layers == scanned


def test_unstacked_weights_give_the_same_result() -> None:
    module = stack(5, *STAMPS)
    params = params_of(module)
    cut = unstack_layers(params)
    assert [len(cut[place].layers) for place in ("place_0", "place_1")] == [3, 2]
    full, by_layer = apply_stack(module, params, RNGS), apply_stack(module, cut, RNGS)
    assert_close(by_layer.x, full.x, 1e-6)
    chex.assert_trees_all_equal(by_layer.aux, full.aux)


def test_aux_is_stacked_over_layers_of_a_place() -> None:
    short = dataclasses.replace(ATTENDING, mixer=AttentionConfig(num_heads=1))
    module = stack(5, ATTENDING, short, loop="scan")
    run = jax.jit(
        lambda p, x: module.apply({"params": p}, x, MixerInputs(**GIVEN, outputs=WEIGHTS))
    )
    aux: Any = run(params_of(module), X).aux
    assert [each["weights"].shape for each in aux] == [(3, B, 3, T, T), (2, B, 1, T, T)]
    assert_close(aux[0]["weights"].sum(-1), np.ones((3, B, 3, T)))


def value_and_gradients(loop: LayerLoop, remat: RematPolicy) -> tuple[Any, int]:
    """Return a value, its gradients, and the number of matmuls in their program."""
    module = stack(2, ATTENDING, loop=loop, remat=remat)

    def total(params: Any, x: Any) -> Any:
        output: Any = module.apply({"params": params}, x, MixerInputs(**GIVEN))
        return jnp.square(output.x).sum()

    traced = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).trace(params_of(module), X)
    products = str(traced.jaxpr).count("dot_general")
    return traced.lower().compile()(params_of(module), X), products


@pytest.mark.sampled("unroll")
@pytest.mark.parametrize(("loop", "remats"), [("scan", ("dots", "full")), ("unroll", ("full",))])
def test_rematerialization_does_not_change_results(
    loop: LayerLoop, remats: tuple[RematPolicy, ...]
) -> None:
    kept, products = value_and_gradients(loop, "none")
    for remat in remats:
        again, more = value_and_gradients(loop, remat)
        assert_trees_close(again, kept)
        assert more > products, f"{remat} computes no more products than the one before"
        products = more


def test_training_on_a_cpu_recomputes_attention() -> None:
    """Same gradients in less memory: XLA does not merge what is recomputed with the first time."""
    block = dataclasses.replace(ATTENDING, residual_dropout=0.0)
    module, x = stack(4, block, loop="unroll"), normal(0, B, 64, D)
    inputs = MixerInputs(jnp.arange(64)[None], Mask(MaskPattern(causal=True)))

    def total(params: Any, x: Any, rngs: Any) -> Any:
        output: Any = module.apply({"params": params}, x, inputs.replace(dropout_rngs=rngs))
        return jnp.square(output.x).sum()

    params = params_of(module)
    gradients, memory = [], []
    for rngs in (None, RNGS):
        compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(params, x, rngs).compile()
        gradients.append(compiled(params, x, rngs))
        analysis: Any = compiled.memory_analysis()
        memory.append(analysis.temp_size_in_bytes)
    assert_trees_close(gradients[1], gradients[0])
    assert memory[1] < 0.6 * memory[0]


@pytest.mark.parametrize("loop", LOOPS)
def test_shared_layers_equal_equal_layers_with_summed_gradients(loop: LayerLoop) -> None:
    """Five layers over two places: two sets of weights."""
    blocks = (ATTENDING, dataclasses.replace(ATTENDING, norm_placement="post"))
    separate = stack(5, *blocks, loop=loop)
    shared = separate.clone(context=dataclasses.replace(separate.context, share_layers=True))
    params = params_of(shared)
    assert {len(leaf) for leaf in jax.tree.leaves(params)} == {1}

    def repeat(params: Any) -> Any:
        return {
            name: jax.tree.map(lambda leaf, n=n: jnp.repeat(leaf, n, axis=0), params[name])
            for name, n in (("place_0", 3), ("place_1", 2))
        }

    def loss(params: Any, module: Stack) -> jax.Array:
        weights = repeat(params) if module is separate else params
        return jnp.square(apply_stack(module, weights, RNGS).x).sum()

    gradients = [jax.grad(loss)(params, module) for module in (shared, separate)]
    assert_close(apply_stack(shared, params).x, apply_stack(separate, repeat(params)).x)
    assert_trees_close(*gradients)


def test_shared_layers_decode_from_a_cache_and_count_once() -> None:
    config = TransformerConfig(
        vocab_size=11, d_model=D, num_layers=3, layer_pattern=(ATTENDING,), share_layers=True
    )
    model = LanguageModel(config)
    params = random_params_like(jax.eval_shape(model.init_params, jax.random.key(0)))
    tokens = jnp.arange(7)[None]
    full: Any = model.apply({"params": params}, tokens).logits
    cache = model.init_cache(1, 7)
    for weights in (params, unstack_for_decoding(params)):
        for part in (slice(0, 5), slice(5, 7)):
            positions = jnp.arange(7)[None, part]
            output = model.apply(
                {"params": weights}, tokens[:, part], positions=positions, cache=cache
            )
            assert_close(output.logits, full[:, part])
            cache = output.cache
        cache = model.init_cache(1, 7)
    separate = LanguageModel(dataclasses.replace(config, share_layers=False))
    assert count_token_flops(model, 7) == count_token_flops(separate, 7)
    counts = [count_parameters(each).by_part["feed_forward"] for each in (model, separate)]
    assert counts[0] * 3 == counts[1]
