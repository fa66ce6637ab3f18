import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax.core import meta

from tests.transformer import formulas
from tests.transformer.formulas import Array, array, assert_close, normal, random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Hardware,
    Initialization,
    Mask,
    MaskPattern,
    NormConfig,
    Precision,
)
from transformer.attention.mixer import MixerInputs
from transformer.model_context import ModelContext
from transformer.models.block import Block

B, T, D = 2, 5, 12
CONTEXT = ModelContext(D, 3, Precision(), Initialization(), Hardware())


def config(placement: Any = "pre", kind: Any = "layer", dropout: float = 0.0) -> BlockConfig:
    return BlockConfig(
        mixer=AttentionConfig(num_heads=6, num_kv_heads=2),
        feed_forward=FeedForwardConfig(d_ff=7, activation="relu"),
        norm=NormConfig(kind, epsilon=0.1),
        norm_placement=placement,
        residual_dropout=dropout,
    )


def make_block(config: BlockConfig) -> tuple[Any, Any]:
    """Return the block as a compiled function of (params, x, dropout_rngs), and random weights."""
    block = Block(config, CONTEXT, parent=None)
    inputs = MixerInputs(array(np.arange(T)[None]), Mask(MaskPattern(causal=True)))
    boxed = jax.eval_shape(lambda x: block.init(jax.random.key(0), x, inputs), normal(0, B, T, D))
    run = jax.jit(
        lambda params, x, rngs=None: block.apply(
            {"params": params}, x, inputs.replace(dropout_rngs=rngs)
        )
    )
    return run, random_params_like(meta.unbox(boxed)["params"])


def expected(x: Array, w: Any, config: BlockConfig) -> Array:
    """Compute x + f(norm(x)) and the like, for attention and then feed-forward.

    Parallel blocks are x + attention(norm(x)) + feed_forward(norm(x)), with one norm or two.
    """

    def norm(name: str, x: Array) -> Array:
        assert config.norm is not None
        if config.norm.kind == "rms":
            return formulas.rms_norm(x, w[name]["gain"], config.norm.epsilon)
        return formulas.layer_norm(x, w[name]["gain"], w[name]["bias"], config.norm.epsilon)

    def attention(x: Array) -> Array:
        visible = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
        return formulas.attention(x, x, w["mixer"], visible)[0]

    def feed_forward(x: Array) -> Array:
        return formulas.feed_forward(x, w["feed_forward"], "relu")

    if config.norm_placement.startswith("parallel"):
        is_shared = config.norm_placement == "parallel_shared"
        fed = norm("mixer_norm" if is_shared else "feed_forward_norm", x)
        return x + config.residual_scale * (attention(norm("mixer_norm", x)) + feed_forward(fed))
    for name, f in (("mixer_norm", attention), ("feed_forward_norm", feed_forward)):
        output_name = name.replace("norm", "output_norm")
        if config.norm_placement == "pre":
            x = x + config.residual_scale * f(norm(name, x))
        elif config.norm_placement == "post":
            x = norm(name, x + f(x))
        elif config.norm_placement == "output":
            x = x + config.residual_scale * norm(output_name, f(x))
        else:
            x = x + norm(output_name, f(norm(name, x)))
    return x


@pytest.mark.parametrize(
    ("placement", "kind", "scale"),
    [
        ("pre", "rms", 0.3),
        ("post", "layer", 1.0),
        ("output", "layer", 0.3),
        ("sandwich", "layer", 1.0),
        ("parallel", "layer", 1.0),
        ("parallel_shared", "rms", 0.3),
    ],
)
def test_matches_formula(placement: str, kind: str, scale: float) -> None:
    case = dataclasses.replace(config(placement, kind), residual_scale=scale)
    run, params = make_block(case)
    x = normal(1, B, T, D)
    assert_close(run(params, x).x, expected(x, params, case))
    assert ("feed_forward_norm" in params) == (placement not in ("output", "parallel_shared"))


def test_dropout_applies_to_sublayers_not_to_the_residual() -> None:
    run, params = make_block(config(dropout=0.5))
    # Each sublayer adds its output bias, 1 or 10, to every entry.
    params = jax.tree.map(np.zeros_like, params)
    params["mixer"]["output_bias"] += 1
    params["feed_forward"]["down_bias"] += 10
    x, keys = np.full((B, T, D), 100, np.float32), jax.random.split(jax.random.key(0), B)
    y = np.asarray(run(params, x, keys).x)
    # The two dropout masks are independent: all four sums occur.
    assert set(np.unique(y)) == {100.0, 102.0, 120.0, 122.0}
    assert set(np.unique(run(params, x).x)) == {111.0}


def test_bare_block_is_its_mixer() -> None:
    full = config()
    bare = dataclasses.replace(full, residual=False, norm=None, feed_forward=None)
    run, params = make_block(bare)
    assert set(params) == {"mixer"}
    x = normal(1, B, T, D)
    visible = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
    assert_close(run(params, x).x, formulas.attention(x, x, params["mixer"], visible)[0])
