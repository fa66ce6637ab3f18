"""Checks of a mixer inside a model: stacked layers, bfloat16, and a training step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.attention.attention_config import MixerConfig
from transformer.attention.position_config import NoPosition
from transformer.config import BlockConfig, LayerLoop, TransformerConfig
from transformer.layers.layer_config import FeedForwardConfig
from transformer.layers.logical_axes import LogicalAxes
from transformer.models.heads import Classifier
from transformer.precision import Precision
from transformer.testing.mixer_under_test import BATCH_SIZE, Array, Trial

VOCAB_SIZE = 11

NUM_LAYERS = 2
"""Layers of the model: the fewest that a scan loops over."""

MODEL_LENGTH = 19
"""Tokens of the model's inputs, for mixers that accept any length."""

STEP_SIZE = 1e-2
"""Length of the step along the negative gradient. In float32 the loss changes visibly, and a model
of this width is still close to linear."""


def check_bfloat16(trial: Trial) -> None:
    """Check that results in bfloat16 are in bfloat16, and finite.

    A result in float32 would promote the residual stream of all later layers, and `lax.scan` over
    layers refuses a carry whose dtype changes.
    """
    mixer = trial.mixer
    context = dataclasses.replace(mixer.context, precision=Precision.parse("bfloat16"))
    low = type(mixer)(mixer.config, context, parent=None)
    length = model_length(trial)
    inputs = trial.mixer_inputs(length)
    if trial.reads_memory:
        inputs = inputs.replace(memory=jnp.bfloat16(trial.memory))

    def run(params: Any, x: jax.Array) -> jax.Array:
        y: jax.Array = low.apply({"params": params}, x, inputs)[0]
        return y

    y = compile_quickly(run)(trial.params, jnp.bfloat16(trial.inputs(0, length)))
    trial.require(y.dtype == jnp.bfloat16, "bfloat16", f"inputs in bfloat16 give {y.dtype}")
    trial.require(np.isfinite(np.float32(y)).all(), "bfloat16", "outputs are not finite")


def check_in_model(trial: Trial) -> None:
    """Check a model of two layers: scanned equals unrolled, and a training step lowers the loss.

    Models with a mixer that reads a memory need an encoder: they are not tried.
    """
    if trial.reads_memory:
        return
    scanned, unrolled = make_model(trial, "scan"), make_model(trial, "unroll")
    params = compile_quickly(scanned.init_params)(jax.random.key(0))
    check_axes(trial, scanned, params)
    inputs = make_inputs(trial)
    step = compile_quickly(jax.value_and_grad(functools.partial(training_loss, scanned)))
    loss, grads = jax.device_get(step(params, *inputs))
    other = compile_quickly(functools.partial(training_loss, unrolled))(params, *inputs)
    trial.require_close(
        loss, other, "stacked layers", "a scan over layers and a loop give different results"
    )
    trial.require(np.isfinite(loss), "training step", f"the loss is {loss}")
    for leaf in jax.tree.leaves(grads):
        trial.require(np.isfinite(leaf).all(), "training step", "gradients are not finite")
    # A step of a fixed length: the size of the gradients says nothing about the mixer.
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(grads)))
    updated = jax.tree.map(
        lambda p, g: np.asarray(p - STEP_SIZE / norm * g, p.dtype), params, grads
    )
    after = step(updated, *inputs)[0]
    message = f"a step along the negative gradient takes the loss from {loss:.6g} to {after:.6g}"
    trial.require(after < loss, "training step", message)


def check_axes(trial: Trial, model: Classifier, params: Any) -> None:
    """Check that every weight has the names of its axes, with `layers` in front."""
    axes = model.logical_axes()["layers"]
    weights = params["layers"]
    is_axes = lambda leaf: isinstance(leaf, LogicalAxes)  # noqa: E731
    same = str(jax.tree.structure(axes, is_leaf=is_axes)) == str(jax.tree.structure(weights))
    trial.require(same, "stacked layers", "the axes of the weights have another structure")
    for path, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes):
        weight = functools.reduce(lambda tree, key: tree[key.key], path, weights)
        fine = names.stack[:1] == ("layers",) and len(names.names) == weight.ndim
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        trial.require(fine, "stacked layers", f"weight {name} is {weight.shape}, axes {names}")


def make_model(trial: Trial, loop: LayerLoop) -> Classifier:
    """Return a small classifier whose layers have the mixer."""
    config: MixerConfig = trial.mixer.config
    d_model = trial.mixer.context.d_model
    block = BlockConfig(mixer=config, feed_forward=FeedForwardConfig(d_ff=2 * d_model))
    model = TransformerConfig(
        vocab_size=VOCAB_SIZE,
        d_model=d_model,
        num_layers=NUM_LAYERS,
        layer_pattern=(block,),
        layer_loop=loop,
        causal=trial.abilities.causal,
        position_embedding=NoPosition(),
    )
    hardware = trial.mixer.context.hardware
    return Classifier(model, hardware, num_classes=3, pooling="mean")


def make_inputs(trial: Trial) -> tuple[Array, Array, jax.Array]:
    """Return tokens [B, T], labels [B], and random keys [B] of dropout."""
    shape = BATCH_SIZE, model_length(trial)
    tokens = np.random.default_rng(3).integers(VOCAB_SIZE, size=shape)
    rngs = jax.random.split(jax.random.key(4), BATCH_SIZE)
    return tokens.astype(np.int32), np.arange(BATCH_SIZE, dtype=np.int32), rngs


def model_length(trial: Trial) -> int:
    """Return T of the checks of this module."""
    return MODEL_LENGTH if trial.abilities.any_length else trial.length


def training_loss(
    model: Classifier,
    params: Any,
    tokens: jax.Array,  # [B, T]
    labels: jax.Array,  # [B]
    dropout_rngs: jax.Array,  # [B]
) -> jax.Array:  # scalar
    """Return the mean cross entropy of a training batch."""
    logits = model.apply({"params": params}, tokens, dropout_rngs=dropout_rngs).logits
    assert logits is not None
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=1))


def compile_quickly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled on its first call, without most optimizations.

    It runs once or twice on small inputs: compilation would take most of the time.
    """
    options: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    compiled: list[Any] = []

    def call(*args: Any) -> Any:
        if not compiled:
            compiled.append(jax.jit(function).lower(*args).compile(compiler_options=options))
        return compiled[0](*args)

    return call
