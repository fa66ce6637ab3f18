import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from tests.transformer import formulas
from tests.transformer.formulas import assert_close, normal, weights_of
from transformer import FeedForwardConfig, Hardware, Initialization, Precision
from transformer.context import ModelContext
from transformer.layers.layer_config import DispatcherKind, MoEConfig
from transformer.layers.logical_axes import LogicalAxes, unbox_axes
from transformer.layers.moe import MixtureOfExperts

B, T, D, F, E = 3, 11, 5, 7, 4
SHARED = ModelContext(D, 3, Precision(), Initialization(), Hardware())
FORMS: tuple[DispatcherKind, ...] = ("dense", "sorted")
LOSSES = frozenset({"losses"})
REAL = np.arange(T)[None] < np.array([T, 4, 0])[:, None]

PLAIN = FeedForwardConfig(F, "relu")
GATED = FeedForwardConfig(F, "silu", gated=True, bias=False)
LEARNED = FeedForwardConfig(F, "learned_swish")
TWO = MoEConfig(E, 2, GATED)


def made(config: MoEConfig, shared: ModelContext = SHARED) -> tuple[MixtureOfExperts, Any]:
    module = MixtureOfExperts(config, shared)
    boxed = jax.eval_shape(module.init, jax.random.key(0), normal(0, B, T, D))
    return module, weights_of(meta.unbox(boxed)["params"])


def called(config: MoEConfig, params: Any, x: Any, **options: Any) -> Any:
    """The output, compiled; `outputs` is static."""
    outputs = options.pop("outputs", frozenset())
    module = MixtureOfExperts(config, SHARED)
    apply = jax.jit(lambda p, x, o: module.apply({"params": p}, x, outputs=outputs, **o))
    return apply(params, x, options)


def expert(params: Any, number: int) -> dict[str, Any]:
    """The weights of one expert, as a plain feed-forward has them."""
    shared = {name: params[name] for name in ("beta",) if name in params}
    own = {n: w[number] for n, w in params.items() if n not in ("router", "beta")}
    return own | shared


def gates_of(config: MoEConfig, params: Any, token: Any) -> dict[int, float]:
    """Expert -> gate, of one token: the likeliest first."""
    probabilities = formulas.softmax(token @ params["router"])
    likeliest = np.argsort(-probabilities)[: config.num_experts_per_token]
    total = probabilities[likeliest].sum() if config.normalize_gates else 1
    return {int(e): float(probabilities[e] / total) for e in likeliest}


def mixture(config: MoEConfig, params: Any, x: Any) -> Any:
    """Token by token and expert by expert."""
    y = np.zeros_like(x)
    for b, t in np.ndindex(x.shape[:2]):
        for e, gate in gates_of(config, params, x[b, t]).items():
            own = expert(params, e)
            y[b, t] += gate * formulas.feed_forward(x[b, t], own, config.expert.activation)
    return y


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "config",
    [
        TWO,
        MoEConfig(E, 1, PLAIN, normalize_gates=False),
        MoEConfig(E, 3, LEARNED),
        MoEConfig(1, 1, PLAIN, normalize_gates=False),
    ],
    ids=["mixtral", "switch", "learned beta", "one expert"],
)
def test_against_a_loop_over_tokens_and_experts(config: MoEConfig, form: DispatcherKind) -> None:
    config = dataclasses.replace(config, dispatcher=form)
    _, params = made(config)
    x = normal(1, B, T, D)
    output = called(config, params, x)
    assert_close(output.y, mixture(config, params, x))
    assert output.aux == {}


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form: DispatcherKind) -> None:
    """The slope along a direction is that of the loop, by differences in float64."""
    config = dataclasses.replace(TWO, dispatcher=form)
    module, params = made(config)
    x, up = normal(1, B, T, D), normal(2, B, T, D)
    towards, step = weights_of(params, seed=3), 1e-6
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)

    def moved(sign: int) -> float:
        there = jax.tree.map(lambda w, d: w + sign * step * d.astype(np.float64), wide, towards)
        return float((mixture(config, there, x.astype(np.float64)) * up).sum())

    def total(params: Any) -> Any:
        output: Any = module.apply({"params": params}, x)
        return (output.y * up).sum()

    slopes = jax.tree.map(lambda g, d: (g * d).sum(), jax.jit(jax.grad(total))(params), towards)
    expected = (moved(1) - moved(-1)) / (2 * step)
    assert abs(expected) > 1
    assert_close(sum(jax.tree.leaves(slopes)), np.float64(expected))


@pytest.mark.parametrize("form", FORMS)
def test_the_past_does_not_see_the_future_bit_for_bit(form: DispatcherKind) -> None:
    config = dataclasses.replace(TWO, dispatcher=form)
    assert config.causal
    _, params = made(config)
    x, other = normal(1, B, T, D), normal(2, B, T, D)
    y = called(config, params, x).y
    for t in (1, 6):
        changed = called(config, params, np.concatenate([x[:, :t], other[:, t:]], axis=1)).y
        assert np.array_equal(changed[:, :t], y[:, :t])
        assert not np.array_equal(changed[:, t:], y[:, t:])


@pytest.mark.slow
@pytest.mark.sampled("dense", "sorted")
@pytest.mark.parametrize("form", [*FORMS, "auto"])
def test_a_batch_may_be_cut_anywhere(form: DispatcherKind) -> None:
    """Single examples equal a batch of them, and so does the mean of their losses by tokens."""
    config = dataclasses.replace(TWO, dispatcher=form, capacity_factor=0.7 if form == "auto" else 0)
    _, params = made(config)
    x, tokens = normal(1, B, T, D), REAL.sum(axis=1)
    whole = called(config, params, x, token_mask=REAL, outputs=LOSSES)
    parts = [
        called(config, params, x[b : b + 1], token_mask=REAL[b : b + 1], outputs=LOSSES)
        for b in range(B)
    ]
    assert_close(np.concatenate([part.y for part in parts]), whole.y, 1e-6)
    for name, loss in whole.aux.items():
        each = [float(part.aux[name]) for part in parts]
        assert_close(np.float64(np.dot(each, tokens) / tokens.sum()), loss, 1e-6)


@pytest.mark.parametrize(
    "config",
    [
        *(dataclasses.replace(TWO, dispatcher=form) for form in FORMS),
        dataclasses.replace(TWO, capacity_factor=0.6),
    ],
    ids=[*FORMS, "slots"],
)
def test_padding_gets_zeros_and_changes_nothing(config: MoEConfig) -> None:
    _, params = made(config)
    x, other = normal(1, B, T, D), normal(2, B, T, D)
    output = called(config, params, x, token_mask=REAL, outputs=LOSSES)
    assert not np.asarray(output.y)[~REAL].any()
    changed = called(
        config, params, np.where(REAL[..., None], x, other), token_mask=REAL, outputs=LOSSES
    )
    assert np.array_equal(changed.y, output.y)
    assert jax.tree.map(float, changed.aux) == jax.tree.map(float, output.aux)
    if not config.capacity_factor:
        assert_close(np.asarray(output.y)[REAL], mixture(config, params, x)[REAL])


def placed(config: MoEConfig, params: Any, x: Any, places: int) -> Any:
    """First choices take their places in the order of the tokens, then second choices."""
    y = np.zeros_like(x)
    for b in range(len(x)):
        chosen = [list(gates_of(config, params, token).items()) for token in x[b]]
        used = [0] * config.num_experts
        for choice in range(config.num_experts_per_token):
            for t, gates in enumerate(chosen):
                e, gate = gates[choice]
                used[e] += 1
                if used[e] <= places:
                    own = expert(params, e)
                    y[b, t] += gate * formulas.feed_forward(x[b, t], own, "silu")
    return y


@pytest.mark.parametrize(("capacity", "places"), [(0.1, 1), (0.5, 3), (1.0, 6), (4.0, 22)])
def test_tokens_beyond_the_capacity_are_dropped(capacity: float, places: int) -> None:
    assert places == math.ceil(capacity * 2 * T / E)
    config = dataclasses.replace(TWO, capacity_factor=capacity)
    _, params = made(config)
    x = normal(1, B, T, D)
    y = called(config, params, x).y
    assert_close(y, placed(config, params, x, places))
    dropless = mixture(config, params, x)
    assert np.allclose(y, dropless, atol=1e-4) == (places > T)


def test_with_a_capacity_the_past_sees_the_future_and_says_so() -> None:
    """A later token's first choice takes the place of an earlier one's second."""
    config = dataclasses.replace(TWO, capacity_factor=0.5)
    assert not config.causal
    _, params = made(config)
    x, other = normal(1, B, T, D), normal(2, B, T, D)
    changed = np.concatenate([x[:, :6], other[:, 6:]], axis=1)
    before, after = (called(config, params, each).y[:, :6] for each in (x, changed))
    assert not np.allclose(before, after, atol=1e-3)


def test_losses_come_when_wanted_times_their_coefficients() -> None:
    _, params = made(TWO)
    x = normal(1, B, T, D)
    plain = dataclasses.replace(TWO, load_balance_loss_weight=1.0, router_z_loss_weight=1.0)
    once, scaled = (called(config, params, x, outputs=LOSSES).aux for config in (plain, TWO))
    assert set(once) == {"loss/load_balance", "loss/router_z"}
    logits = (x @ params["router"]).astype(np.float64)
    z = (np.log(np.exp(logits).sum(-1)) ** 2).mean()
    assert_close(once["loss/router_z"], z)
    assert_close(scaled["loss/router_z"], 0.001 * z)
    assert_close(scaled["loss/load_balance"], 0.01 * np.asarray(once["loss/load_balance"]))


def test_losses_teach_the_router_alone() -> None:
    module, params = made(TWO)
    x = normal(1, B, T, D)

    def total(params: Any) -> Any:
        output: Any = module.apply({"params": params}, x, outputs=LOSSES)
        return sum(output.aux.values())

    moved = {name: bool(np.any(g)) for name, g in jax.jit(jax.grad(total))(params).items()}
    assert moved == {"router": True, "up": False, "gate": False, "down": False}


def test_experts_are_a_stack() -> None:
    module = MixtureOfExperts(dataclasses.replace(TWO, expert=PLAIN), SHARED)
    boxed = jax.eval_shape(module.init, jax.random.key(0), normal(0, B, T, D))["params"]
    assert unbox_axes(boxed) == {
        "router": LogicalAxes(inputs=("embed",), outputs=("routes",)),
        "up": LogicalAxes(("experts",), ("embed",), ("mlp",)),
        "up_bias": LogicalAxes(("experts",), (), ("mlp",)),
        "down": LogicalAxes(("experts",), ("mlp",), ("embed",)),
        "down_bias": LogicalAxes(("experts",), (), ("embed",)),
    }
    assert boxed["up"].value.shape == (E, D, F)


@pytest.mark.parametrize("count", [1, 8])
def test_what_is_made_for_an_accelerator_gives_the_same(count: int) -> None:
    """Also for layers that are initialized as a stack."""
    shared = dataclasses.replace(SHARED, hardware=Hardware("gpu", count=count))
    module, params = made(TWO, shared)
    x = normal(1, B, T, D)
    program = str(jax.make_jaxpr(module.apply)({"params": params}, x))
    assert ("ragged_dot" in program) == (count == 1)
    output: Any = jax.jit(module.apply)({"params": params}, x)
    assert_close(output.y, mixture(TWO, params, x))
    keys = jax.random.split(jax.random.key(0), 2)
    stacked = jax.eval_shape(jax.vmap(lambda key: module.init(key, x)), keys)
    assert meta.unbox(stacked)["params"]["up"].shape == (2, E, D, F)


@pytest.mark.slow
def test_all_ways_drop_the_same_hidden_units() -> None:
    expert = FeedForwardConfig(F, "relu", bias=False, dropout=0.5)
    keys = jax.random.split(jax.random.key(0), B)
    x = normal(1, B, T, D)
    _, params = made(MoEConfig(E, 2, expert))
    found = [
        called(MoEConfig(E, 2, expert, **way), params, x, dropout_rngs=keys).y
        for way in ({"dispatcher": "dense"}, {"dispatcher": "sorted"}, {"capacity_factor": 4.0})
    ]
    assert_close(found[0], found[1])
    assert_close(found[0], found[2])
    whole = called(MoEConfig(E, 2, expert), params, x).y
    assert not np.allclose(found[0], whole, atol=1e-3)
    ones = {n: np.ones_like(w) for n, w in params.items()}
    dropped = called(MoEConfig(E, 2, expert), ones, np.ones_like(x), dropout_rngs=keys).y
    # Of F hidden units, each D, a token keeps some, doubled; and the gates sum to 1.
    assert {round(float(v) / (2 * D)) for v in np.ravel(dropped)} <= set(range(F + 1))
    assert len(np.unique(np.round(dropped, 3))) > 3


def test_the_router_stays_in_float32() -> None:
    """The logits are equal when rounded to 16 bits."""
    shared = dataclasses.replace(SHARED, precision=Precision.parse("bfloat16"))
    config = MoEConfig(2, 1, PLAIN, normalize_gates=False)
    module, params = made(config, shared)
    params["router"] = np.tile(np.array([[1.0, 1.0 + 2**-12]], np.float32), (D, 1))
    params["down"] = np.zeros_like(params["down"])
    params["down_bias"] = np.array([[0.0] * D, [1.0] * D], np.float32)
    y: Any = jax.jit(module.apply)({"params": params}, jnp.ones((B, T, D), jnp.bfloat16))
    assert y.y.dtype == jnp.bfloat16
    assert_close(y.y.astype(np.float32), np.full((B, T, D), 0.5), 1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": 0}, "mixture.num_experts 0: give 1 or more"),
        ({"num_experts_per_token": 0}, "mixture.num_experts_per_token 0: give 1 or more"),
        ({"num_experts_per_token": 9}, "per_token 9: there are 8 experts; give at most 8"),
        ({"capacity_factor": -1.0}, "mixture.capacity_factor -1.0: give 0 or more"),
        (
            {"load_balance_loss_weight": -1.0},
            "mixture.load_balance_loss_weight -1.0: give 0 or more",
        ),
        ({"router_z_loss_weight": -1.0}, "mixture.router_z_loss_weight -1.0: give 0 or more"),
        ({"dispatcher": "ragged"}, "mixture.dispatcher ragged: is not known; give one of auto,"),
        (
            {"num_experts_per_token": 1},
            "mixture.normalize_gates True: the gate of a single expert is always 1",
        ),
        (
            {"capacity_factor": 1.0, "dispatcher": "dense"},
            "mixture.dispatcher dense: has no effect",
        ),
    ],
)
def test_settings_that_make_no_mixture(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**settings)
