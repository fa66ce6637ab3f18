"""Contract of mixers as tests. They are public, for mixers of your own.

    from transformer.testing import check_mixer

    check_mixer("full")                                        # a name of MIXERS, with defaults
    check_mixer(AttentionConfig(num_heads=5, num_kv_heads=1))  # or a configuration

Each ability that a mixer declares is tested on small random inputs in float32. Each that it does
not declare has to raise a ValueError of one line at trace time, as a wrong result would be silent.
Then the mixer is tried in bfloat16, and as part of a model: stacked layers and a training step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.attention.masks import Mask, MaskPattern
from transformer.attention.mixer import MixerConfig, MixerOutput
from transformer.hardware import Hardware
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.logical_axes import LogicalAxes
from transformer.layers.position_embedding import NoPosition
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig
from transformer.models.heads import Classifier
from transformer.models.stack import LayerLoop
from transformer.precision import Precision
from transformer.testing.ability_checks import (
    DEFAULT_LENGTHS,
    check_any_length,
    check_cached,
    check_causal,
    check_cross,
    check_segments,
    check_weights,
)
from transformer.testing.mixer_under_test import (
    BATCH_SIZE,
    Array,
    Trial,
    check_select,
    default_config,
    make_trial,
)

VOCAB_SIZE = 11

NUM_LAYERS = 2
"""Layers of the model: the fewest that a scan loops over."""

MODEL_LENGTH = 19
"""Tokens of the model's inputs, for mixers that accept any length."""

STEP_SIZE = 1e-2
"""Length of the step along the negative gradient. In float32 the loss changes visibly, and a model
of this width is still close to linear."""


def check_output(trial: Trial) -> None:
    """Check that the mixer returns a `MixerOutput` with a result of the shape of its input."""
    x = trial.inputs(0)
    call = functools.partial(trial.mixer.apply, inputs=trial.mixer_inputs(trial.length))
    output: Any = jax.eval_shape(call, {"params": trial.params}, x)
    remedy = "return MixerOutput(y, cache, aux)"
    is_output = isinstance(output, MixerOutput)
    trial.require(is_output, "output", f"is of type {type(output).__name__}; {remedy}")
    shape = getattr(output.y, "shape", None)
    trial.require(shape == x.shape, "output", f"y has shape {shape}, its input {x.shape}; {remedy}")
    trial.require(isinstance(output.aux, dict), "output", f"aux is not a dict; {remedy}")


def check_constants(trial: Trial) -> None:
    """Check that constants have the same shapes in all layers, so that they can be stacked."""
    mixer = trial.mixer
    per_layer = [mixer.constants(mixer.config, layer, mixer.context.d_model) for layer in (0, 1)]
    trees = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), each) for each in per_layer]
    trial.require(trees[0] == trees[1], "constants", "differ in shape between layers")


def check_dropout(trial: Trial) -> None:
    """Check that dropout depends only on each example's own key, not on its place in the batch."""
    config, context = trial.mixer.config, trial.mixer.context
    has_dropout = hasattr(config, "dropout")
    if has_dropout:
        mixer = type(trial.mixer)(dataclasses.replace(config, dropout=0.5), context, parent=None)
        trial = dataclasses.replace(trial, mixer=mixer)
    x = trial.inputs(10, 17 if trial.abilities.any_length else 0)
    rngs, others = jax.random.split(jax.random.key(2), (2, BATCH_SIZE))
    y = trial(x, dropout_rngs=rngs).y
    trial.require(
        np.array_equal(trial(x, dropout_rngs=rngs).y, y),
        "dropout",
        "the same random keys give different results",
    )
    changed = not np.array_equal(trial(x, dropout_rngs=others).y, y)
    trial.require(
        changed == has_dropout,
        "dropout",
        "other random keys change nothing, or should change nothing and do",
    )
    # Rows are dropped and repeated, each with its own key: their results must move along.
    rows = np.array([1, 2, 2])
    permuted = trial(x[rows], dropout_rngs=rngs[rows]).y
    trial.require_close(permuted, y[rows], "dropout", "the rest of the batch changes the result")


def check_rejected(trial: Trial, ability: str) -> None:
    """Check that a call that needs the ability raises a ValueError of one line at trace time."""
    num_refused = 0
    for call in UNSUPPORTED_CALLS[ability](trial):
        try:
            call()
        except ValueError as error:
            one_line = bool(str(error)) and "\n" not in str(error)
            trial.require(one_line, ability, f"is rejected, but not in one line: {error}")
            num_refused += 1
    trial.require(num_refused, ability, "is neither declared nor rejected by a ValueError")


Calls = list[Callable[[], None]]


def _single_call(trial: Trial, **given: Any) -> Calls:
    return [functools.partial(trial.trace, trial.inputs(0), **given)]


def _cached_calls(trial: Trial) -> Calls:
    def decode() -> None:
        cache = trial.mixer.init_cache(BATCH_SIZE, trial.length)
        positions = np.arange(trial.length)[None].repeat(BATCH_SIZE, 0)
        trial.trace(trial.inputs(0), cache=cache, positions=positions)

    return [decode]


UNSUPPORTED_CALLS: dict[str, Callable[[Trial], Calls]] = {
    "causal": lambda trial: _single_call(trial, mask=Mask(MaskPattern(causal=True))),
    "cached": _cached_calls,
    "cross": lambda trial: _single_call(trial, mask=Mask(), memory=trial.inputs(1)),
    "any_length": lambda trial: [
        functools.partial(trial.trace, trial.inputs(0, each)) for each in trial.lengths
    ],
    "weights": lambda trial: _single_call(trial, outputs=frozenset({"weights"})),
}
"""Calls that need each ability. At least one of them has to be refused. Segments are
refused by the model."""


ABILITY_CHECKS = {
    "causal": check_causal,
    "cached": check_cached,
    "segments": check_segments,
    "cross": check_cross,
    "any_length": check_any_length,
    "weights": check_weights,
}
"""Check of each ability, by its name in `Abilities`."""


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
    """Return T of the checks in bfloat16 and in a model."""
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


def check_mixer(
    mixer: str | MixerConfig,
    *,
    d_model: int = 40,  # D
    length: int = 131,  # T of most checks
    lengths: tuple[int, ...] = DEFAULT_LENGTHS,
    hardware: Hardware = Hardware(),  # noqa: B008
) -> None:
    """Test every ability that a mixer declares, and that it refuses the others.

    Also tested: bfloat16, and a model of two layers with the mixer: scanned and unrolled, and one
    training step. Weights may be declared by `declare_weight`, `self.param` or layers of Flax.

    A mixer with a method `select` is also compared with softmax attention; see `SelectiveMixer`.

    Args:
      mixer: Name in `MIXERS`, or a configuration.
      d_model: Width of the inputs.
      length: Number of tokens in most checks. The mixer has to support it.
      lengths: Other lengths. Without the ability `any_length`, the mixer has to refuse one of them.
      hardware: Hardware of the model context; it selects backends.

    Raises:
      AssertionError: A check failed; the message names the mixer and the ability.
      ValueError: The name is not in `MIXERS`.
    """
    config = default_config(mixer) if isinstance(mixer, str) else mixer
    trial = make_trial(config, d_model, length, lengths, hardware)
    check_output(trial)
    check_constants(trial)
    for ability, check in ABILITY_CHECKS.items():
        if getattr(trial.abilities, ability):
            check(trial)
        elif ability in UNSUPPORTED_CALLS:
            check_rejected(trial, ability)
    check_dropout(trial)
    check_bfloat16(trial)
    check_in_model(trial)
    if hasattr(trial.mixer, "select"):
        check_select(trial)
