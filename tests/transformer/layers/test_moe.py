import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from tests.transformer import formulas
from tests.transformer.formulas import assert_close, normal, random_params_like
from transformer import FeedForwardConfig, Hardware, Initialization, Precision
from transformer.layers.logical_axes import LogicalAxes, abstract_weights
from transformer.layers.moe import DispatcherKind, MixtureOfExperts, MoEConfig
from transformer.layers.moe_dispatch import SELECTION_BIAS_RATE
from transformer.model_context import ModelContext

B, T, D, F, E = 3, 11, 5, 7, 4
CONTEXT = ModelContext(D, 3, Precision(), Initialization(), Hardware())
FORMS: tuple[DispatcherKind, ...] = ("dense", "sorted")
LOSSES = frozenset({"losses"})
REAL = np.arange(T)[None] < np.array([T, 4, 0])[:, None]

PLAIN = FeedForwardConfig(F, "relu")
GATED = FeedForwardConfig(F, "silu", gated=True, bias=False)
LEARNED = FeedForwardConfig(F, "learned_swish")
TWO = MoEConfig(E, 2, GATED)
SHARED = MoEConfig(E, 2, GATED, shared_expert=FeedForwardConfig(13, "relu"))
GATED_SHARED = dataclasses.replace(SHARED, shared_expert_gate=True, normalize_gates=False)


def make_module(config: MoEConfig, shared: ModelContext = CONTEXT) -> tuple[MixtureOfExperts, Any]:
    module = MixtureOfExperts(config, shared)
    boxed = jax.eval_shape(module.init, jax.random.key(0), normal(0, B, T, D))
    return module, random_params_like(meta.unbox(boxed)["params"])


@functools.partial(jax.jit, static_argnums=0, static_argnames="outputs")
def apply_module(config: MoEConfig, params: Any, x: Any, **options: Any) -> Any:
    """Return the module's output, compiled once for each config and shape."""
    return MixtureOfExperts(config, CONTEXT).apply({"params": params}, x, **options)


def expert_params(params: Any, number: int) -> dict[str, Any]:
    """Return the weights of one expert as those of a plain feed-forward."""
    shared = {name: params[name] for name in ("beta",) if name in params}
    others = ("router", "beta", "shared_expert", "shared_expert_gate")
    own = {n: w[number] for n, w in params.items() if n not in others}
    return own | shared


def expected_gates(config: MoEConfig, params: Any, token: Any) -> dict[int, float]:
    """Return {expert: gate} of one token, likeliest first."""
    probabilities = formulas.softmax(token @ params["router"])
    likeliest = np.argsort(-probabilities)[: config.num_experts_per_token]
    total = probabilities[likeliest].sum() if config.normalize_gates else 1
    return {int(e): float(probabilities[e] / total) for e in likeliest}


def expected_output(config: MoEConfig, params: Any, x: Any) -> Any:
    """Compute the output token by token and expert by expert."""
    y = np.zeros_like(x)
    for b, t in np.ndindex(x.shape[:2]):
        for e, gate in expected_gates(config, params, x[b, t]).items():
            own = expert_params(params, e)
            y[b, t] += gate * formulas.feed_forward(x[b, t], own, config.expert.activation)
    if config.shared_expert is not None:
        gate = 1.0
        if config.shared_expert_gate:
            gate = 1 / (1 + np.exp(-x @ params["shared_expert_gate"]))
        y += gate * formulas.feed_forward(x, params["shared_expert"], "relu")
    return y


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "config",
    [
        TWO,
        MoEConfig(E, 1, PLAIN, normalize_gates=False),
        MoEConfig(E, 3, LEARNED),
        MoEConfig(1, 1, PLAIN, normalize_gates=False),
        SHARED,
        GATED_SHARED,
    ],
    ids=["mixtral", "switch", "learned beta", "one expert", "shared", "gated shared"],
)
def test_matches_loop_over_tokens_and_experts(config: MoEConfig, form: DispatcherKind) -> None:
    config = dataclasses.replace(config, dispatcher=form)
    _, params = make_module(config)
    x = normal(1, B, T, D)
    output = apply_module(config, params, x)
    assert_close(output.y, expected_output(config, params, x))
    assert output.aux == {}


def test_gradient_of_the_selection_bias_is_the_load() -> None:
    """It changes neither the loss nor its other gradients; padding is no load."""
    config = dataclasses.replace(TWO, router_score="sigmoid", selection_bias=True)
    module, params = make_module(config)
    x = normal(1, B, T, D)

    def total(params: Any, outputs: Any) -> Any:
        output: Any = module.apply({"params": params}, x, token_mask=REAL, outputs=outputs)
        return jnp.sum(output.y) + output.aux.get("loss/load_balance", 0.0)

    gradient = jax.jit(jax.grad(total), static_argnums=1)
    assert not np.any(gradient(params, frozenset())["selection_bias"])
    load = np.zeros(E)
    scores = 1 / (1 + np.exp(-x @ params["router"])) + params["selection_bias"]
    for b, t in np.argwhere(REAL):
        load[np.argsort(-scores[b, t])[:2]] += 1
    expected = SELECTION_BIAS_RATE * (load / load.sum() - 1 / E)
    assert np.ptp(load) > 0
    assert_close(gradient(params, LOSSES)["selection_bias"], expected, 1e-7)
    unbiased = dataclasses.replace(config, selection_bias=False)
    even = params | {"selection_bias": np.zeros(E, np.float32)}
    assert_close(
        apply_module(config, even, x, outputs=LOSSES).aux["loss/load_balance"],
        apply_module(unbiased, even, x, outputs=LOSSES).aux["loss/load_balance"],
    )


@pytest.mark.parametrize("form", FORMS)
def test_gradients_match_finite_differences(form: DispatcherKind) -> None:
    """The derivative along a direction matches differences of the float64 loop."""
    config = dataclasses.replace(TWO, dispatcher=form)
    module, params = make_module(config)
    x, up = normal(1, B, T, D), normal(2, B, T, D)
    direction, step = random_params_like(params, seed=3), 1e-6
    params64 = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)

    def loss_at(sign: int) -> float:
        shifted = jax.tree.map(
            lambda w, d: w + sign * step * d.astype(np.float64), params64, direction
        )
        return float((expected_output(config, shifted, x.astype(np.float64)) * up).sum())

    def total(params: Any) -> Any:
        output: Any = module.apply({"params": params}, x)
        return (output.y * up).sum()

    gradients = jax.device_get(jax.jit(jax.grad(total))(params))
    derivatives = jax.tree.map(lambda g, d: (g * d).sum(), gradients, direction)
    expected = (loss_at(1) - loss_at(-1)) / (2 * step)
    assert abs(expected) > 1
    assert_close(sum(jax.tree.leaves(derivatives)), np.float64(expected))


@pytest.mark.sampled("dense", "sorted")
@pytest.mark.parametrize("form", [*FORMS, "auto"])
def test_examples_are_independent_of_the_batch(form: DispatcherKind) -> None:
    """Single examples equal a batch of them, and so does the token-weighted mean of their
    losses.
    """
    config = dataclasses.replace(TWO, dispatcher=form, capacity_factor=0.7 if form == "auto" else 0)
    _, params = make_module(config)
    x, tokens = normal(1, B, T, D), REAL.sum(axis=1)
    full = apply_module(config, params, x, token_mask=REAL, outputs=LOSSES)
    parts = [
        apply_module(config, params, x[b : b + 1], token_mask=REAL[b : b + 1], outputs=LOSSES)
        for b in range(B)
    ]
    assert_close(np.concatenate([part.y for part in parts]), full.y, 1e-6)
    for name, loss in full.aux.items():
        each = [float(part.aux[name]) for part in parts]
        assert_close(np.float64(np.dot(each, tokens) / tokens.sum()), loss, 1e-6)


@pytest.mark.parametrize(
    "config",
    [
        *(dataclasses.replace(TWO, dispatcher=form) for form in FORMS),
        dataclasses.replace(TWO, capacity_factor=0.6),
        GATED_SHARED,
    ],
    ids=[*FORMS, "slots", "shared"],
)
def test_padding_gives_zeros_and_does_not_affect_tokens(config: MoEConfig) -> None:
    _, params = make_module(config)
    x, other = normal(1, B, T, D), normal(2, B, T, D)
    output = apply_module(config, params, x, token_mask=REAL, outputs=LOSSES)
    assert not np.asarray(output.y)[~REAL].any()
    changed = apply_module(
        config, params, np.where(REAL[..., None], x, other), token_mask=REAL, outputs=LOSSES
    )
    assert np.array_equal(changed.y, output.y)
    assert jax.tree.map(float, changed.aux) == jax.tree.map(float, output.aux)
    if not config.capacity_factor:
        assert_close(np.asarray(output.y)[REAL], expected_output(config, params, x)[REAL])


def expected_with_capacity(config: MoEConfig, params: Any, x: Any, places: int) -> Any:
    """Fill the experts with first choices in token order, then with second choices."""
    y = np.zeros_like(x)
    for b in range(len(x)):
        chosen = [list(expected_gates(config, params, token).items()) for token in x[b]]
        used = [0] * config.num_experts
        for choice in range(config.num_experts_per_token):
            for t, gates in enumerate(chosen):
                e, gate = gates[choice]
                used[e] += 1
                if used[e] <= places:
                    own = expert_params(params, e)
                    y[b, t] += gate * formulas.feed_forward(x[b, t], own, "silu")
    return y


@pytest.mark.parametrize(("capacity", "places"), [(0.1, 1), (0.5, 3), (4.0, 22)])
def test_tokens_beyond_the_capacity_are_dropped(capacity: float, places: int) -> None:
    assert places == math.ceil(capacity * 2 * T / E)
    config = dataclasses.replace(TWO, capacity_factor=capacity)
    _, params = make_module(config)
    x = normal(1, B, T, D)
    y = apply_module(config, params, x).y
    assert_close(y, expected_with_capacity(config, params, x, places))
    dropless = expected_output(config, params, x)
    assert np.allclose(y, dropless, atol=1e-4) == (places > T)


def test_requested_losses_are_scaled_by_their_coefficients() -> None:
    _, params = make_module(TWO)
    x = normal(1, B, T, D)
    plain = dataclasses.replace(TWO, load_balance_loss_weight=1.0, router_z_loss_weight=1.0)
    once, scaled = (apply_module(config, params, x, outputs=LOSSES).aux for config in (plain, TWO))
    assert set(once) == {"loss/load_balance", "loss/router_z"}
    logits = (x @ params["router"]).astype(np.float64)
    z = (np.log(np.exp(logits).sum(-1)) ** 2).mean()
    assert_close(once["loss/router_z"], z)
    assert_close(scaled["loss/router_z"], 0.001 * z)
    assert_close(scaled["loss/load_balance"], 0.01 * np.asarray(once["loss/load_balance"]))


def test_experts_are_stacked() -> None:
    module = MixtureOfExperts(dataclasses.replace(TWO, expert=PLAIN), CONTEXT)
    shapes, axes = abstract_weights(module.init, jax.random.key(0), normal(0, B, T, D))
    assert axes == {
        "router": LogicalAxes(inputs=("embed",), outputs=("routes",)),
        "up": LogicalAxes(("experts",), ("embed",), ("mlp",)),
        "up_bias": LogicalAxes(("experts",), (), ("mlp",)),
        "down": LogicalAxes(("experts",), ("mlp",), ("embed",)),
        "down_bias": LogicalAxes(("experts",), (), ("embed",)),
    }
    assert shapes["up"].shape == (E, D, F)


@pytest.mark.parametrize("count", [1, 8])
def test_accelerator_backend_gives_the_same_results(count: int) -> None:
    """Also for layers that are initialized as a stack."""
    shared = dataclasses.replace(CONTEXT, hardware=Hardware("gpu", count=count))
    module, params = make_module(TWO, shared)
    x = normal(1, B, T, D)
    program = str(jax.make_jaxpr(module.apply)({"params": params}, x))
    assert ("ragged_dot" in program) == (count == 1)
    output: Any = jax.jit(module.apply)({"params": params}, x)
    assert_close(output.y, expected_output(TWO, params, x))
    keys = jax.random.split(jax.random.key(0), 2)
    stacked = jax.eval_shape(jax.vmap(lambda key: module.init(key, x)), keys)
    assert meta.unbox(stacked)["params"]["up"].shape == (2, E, D, F)


@pytest.mark.full
def test_all_backends_drop_the_same_hidden_units() -> None:
    expert_params = FeedForwardConfig(F, "relu", bias=False, dropout=0.5)
    keys = jax.random.split(jax.random.key(0), B)
    x = normal(1, B, T, D)
    _, params = make_module(MoEConfig(E, 2, expert_params))
    actual = [
        apply_module(MoEConfig(E, 2, expert_params, **way), params, x, dropout_rngs=keys).y
        for way in ({"dispatcher": "dense"}, {"dispatcher": "sorted"}, {"capacity_factor": 4.0})
    ]
    assert_close(actual[0], actual[1])
    assert_close(actual[0], actual[2])
    full = apply_module(MoEConfig(E, 2, expert_params), params, x).y
    assert not np.allclose(actual[0], full, atol=1e-3)


def test_hidden_units_of_a_token_are_dropped() -> None:
    config = MoEConfig(E, 2, FeedForwardConfig(F, "relu", bias=False, dropout=0.5))
    params = {name: np.ones_like(weight) for name, weight in make_module(config)[1].items()}
    keys = jax.random.split(jax.random.key(0), B)
    dropped = apply_module(config, params, np.ones((B, T, D), np.float32), dropout_rngs=keys).y
    # A token keeps some of F hidden units, doubled; its gates sum to 1.
    assert {round(float(v) / (2 * D)) for v in np.ravel(dropped)} <= set(range(F + 1))
    assert len(np.unique(np.round(dropped, 3))) > 3


def test_router_computes_in_float32() -> None:
    """The logits are equal when rounded to 16 bits."""
    shared = dataclasses.replace(CONTEXT, precision=Precision.parse("bfloat16"))
    config = MoEConfig(2, 1, PLAIN, normalize_gates=False)
    module, params = make_module(config, shared)
    params["router"] = np.tile(np.array([[1.0, 1.0 + 2**-12]], np.float32), (D, 1))
    params["down"] = np.zeros_like(params["down"])
    params["down_bias"] = np.array([[0.0] * D, [1.0] * D], np.float32)
    y: Any = jax.jit(module.apply)({"params": params}, jnp.ones((B, T, D), jnp.bfloat16))
    assert y.y.dtype == jnp.bfloat16
    assert_close(y.y.astype(np.float32), np.full((B, T, D), 0.5), 1e-2)
