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
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from transformer.attention.cache import lengthen_cache
from transformer.attention.masks import Mask, MaskPattern, dense_mask
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
from transformer.testing.mixer_under_test import (
    BATCH_SIZE,
    InputFields,
    Trial,
    check_select,
    default_config,
    make_trial,
    run_mixer,
)

DEFAULT_LENGTHS = (1, 63, 129, 257)
"""Lengths next to the block sizes of the attention backends, and 1."""

VOCAB_SIZE = 11

NUM_LAYERS = 2
"""Layers of the model: the fewest that a scan loops over."""

MODEL_LENGTH = 19
"""Tokens of the model's inputs, for mixers that accept any length."""

QUICK_COMPILATION = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""XLA's options for programs that run once or twice on small inputs."""

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
    first, second = (
        _layout(mixer.constants(mixer.config, layer, mixer.context.d_model)) for layer in (0, 1)
    )
    trial.require(first == second, "constants", "differ in shape between layers")


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


def check_causal(trial: Trial) -> None:
    """Check that inputs after t do not change outputs up to t, bit for bit.

    The changed inputs are large, so that they also move a maximum or a bucket over all tokens. A
    gradient test would miss those.
    """
    length = trial.length
    x, other = trial.inputs(0), 100 * trial.inputs(1)
    y = trial(x).y
    for t in sorted({0, 1, length // 3, 63, 64, 65, length - 2} & set(range(length - 1))):
        changed = trial(np.where(_column(np.arange(length) > t), other, x)).y
        same = np.array_equal(changed[:, : t + 1], y[:, : t + 1])
        trial.require(same, "causal", f"outputs up to position {t} changed when later inputs did")
        # Not of the last position alone: a mixer may read only what is before a token.
        idle = np.array_equal(changed[:, t + 1 :], y[:, t + 1 :])
        trial.require(
            not idle or t == length - 2,
            "causal",
            f"outputs after position {t} do not depend on their inputs",
        )


def check_cached(trial: Trial) -> None:
    """Check that a prefill, a few tokens at once and single tokens equal one full pass."""
    x = trial.inputs(2)
    full = trial(x).y
    cache = trial.init_cache(trial.length + 2)
    layout = _layout(cache)
    start = 0
    for count in (trial.length - 6, 3, 1, 1, 1):
        tokens = slice(start, start + count)
        positions = np.arange(start, start + count)[None].repeat(BATCH_SIZE, 0)
        y, cache, _ = trial(x[:, tokens], cache=cache, positions=positions)
        same = _layout(cache) == layout
        trial.require(same, "cached", "the returned cache has other shapes than the given one")
        message = f"{count} tokens from position {start} differ from the full pass"
        trial.require_close(y, full[:, tokens], "cached", message)
        start += count
    _check_padded_prompts(trial, x, full)


def _check_padded_prompts(trial: Trial, x: np.ndarray, full: np.ndarray) -> None:
    """Check that tokens after a padded prefill of several lengths equal the full pass.

    The cache of the prefill has no room for more; then it is lengthened.
    """
    count = trial.length - 6
    lengths, rows = np.array([count, max(1, count // 2), 1]), np.arange(BATCH_SIZE)
    index = np.arange(count)[None]
    is_token = index < lengths[:, None]
    # Padding is large noise, not zeros: a mixer that reads it gives clearly other results.
    tokens = np.where(is_token[:, :, None], x[:, :count], 100 * trial.inputs(12, count))
    cache = trial.init_cache(count)
    cache = trial(tokens, cache=cache, positions=np.where(is_token, index, -1)).cache
    cache = lengthen_cache(cache, trial.init_cache(trial.length + 2))
    y = trial(x[rows, lengths][:, None], cache=cache, positions=lengths[:, None]).y
    message = "a token after a padded prompt differs from the full pass"
    trial.require_close(y[:, 0], full[rows, lengths], "cached", message)


def check_segments(trial: Trial) -> None:
    """Check that packed documents equal single ones, and that padding changes nothing."""
    x, other = trial.inputs(3), 100 * trial.inputs(4)
    segments, positions = pack_two_documents(trial.length)
    y = trial(x, segments=segments, positions=positions).y
    trial.require(np.isfinite(y).all(), "segments", "outputs are not finite")
    for document in (1, 2):
        in_document = (segments == document)[0]
        others_changed = np.where(_column(in_document), x, other)
        changed = trial(others_changed, segments=segments, positions=positions).y
        # Bit for bit: a weight that is tiny but not zero would pass any tolerance.
        same = np.array_equal(changed[:, in_document], y[:, in_document])
        trial.require(
            same, "segments", f"document {document} depends on another document or on padding"
        )
        if trial.abilities.any_length and not trial.mixer.config.depends_on_row_index:
            message = f"document {document} gives other results in a packed row than alone"
            inputs: InputFields = {}
            if trial.reads_memory:
                inputs["memory"] = trial.memory[:, (trial.memory_segments == document)[0]]
            alone = trial(x[:, in_document], **inputs).y
            trial.require_close(y[:, in_document], alone, "segments", message)
    _check_gradient_of_padding(trial, x)


def _check_gradient_of_padding(trial: Trial, x: np.ndarray) -> None:
    segments, positions = pack_two_documents(trial.length)
    inputs = trial.mixer_inputs(trial.length, segments=segments, positions=positions)
    real = _column(segments[0] != 0).astype(np.float32)

    def total(x: Any) -> jax.Array:
        y = run_mixer(trial.mixer, trial.params, x, inputs).y
        return jnp.sum(jnp.square(y) * real)

    gradient = np.asarray(jax.jit(jax.grad(total))(x))
    trial.require(np.isfinite(gradient).all(), "segments", "gradients are not finite")
    trial.require(not np.any(gradient * (1 - real)), "segments", "padding has a gradient")


def check_cross(trial: Trial) -> None:
    """Check that the memory is read and that its padding changes nothing.

    In cross attention keys and values come from the memory only. A mixer that sets `reads_memory`
    uses its own input too.
    """
    if trial.reads_memory:
        _check_reads_memory(trial)
    else:
        _check_cross_attention(trial)


def _check_cross_attention(trial: Trial) -> None:
    size = trial.length + 6 if trial.abilities.any_length else trial.length
    x, memory = trial.inputs(5), trial.inputs(6, size)
    y = trial(x, mask=Mask(), memory=memory).y
    trial.require(y.shape == x.shape, "cross", f"the result is {y.shape} for inputs {x.shape}")
    others = np.where(_column(np.arange(trial.length) > 1), -x, x)
    same = np.array_equal(trial(others, mask=Mask(), memory=memory).y[:, :2], y[:, :2])
    trial.require(same, "cross", "a query's result depends on other queries")
    cut = np.array([size, size - 3, 2])
    padding = np.arange(size)[None, :, None] >= cut[:, None, None]
    other = np.where(padding, 100 * trial.inputs(7, size), memory)
    changed = np.any(trial(x, mask=Mask(), memory=other).y != y, axis=(1, 2))
    trial.require(
        (changed == [False, True, True]).all(),
        "cross",
        "the result does not depend on the memory, or on too much of it",
    )
    if trial.abilities.segments:
        _check_memory_padding(trial, x, Mask(key_lengths=cast(Any, cut)), memory, other)
    if trial.abilities.cached:
        _check_memory_cache(trial, x, memory)


def _check_reads_memory(trial: Trial) -> None:
    """Check a mixer that reads a memory in addition to its own input."""
    x, memory = trial.inputs(5), trial.memory
    y = trial(x).y
    message = "the result does not depend on the memory, or on too much of it"
    trial.require(np.any(trial(x, memory=-memory).y != y, axis=(1, 2)).all(), "cross", message)
    ones = cast(Any, np.ones((1, trial.length), int))
    segments = cast(Any, (trial.memory_segments != 0).astype(int))
    mask = Mask(MaskPattern(ordered=False), segments=ones, key_segments=segments)
    other = np.where(segments[:, :, None] == 0, 100 * trial.inputs(7, memory.shape[1]), memory)
    masked = _check_memory_padding(trial, x, mask, memory, other)
    trial.require(np.any(masked != y), "cross", "the mask of the memory has no effect")
    if trial.abilities.cached:
        _check_memory_cache(trial, x, memory)


def _check_memory_padding(
    trial: Trial, x: np.ndarray, mask: Mask, memory: np.ndarray, other: np.ndarray
) -> np.ndarray:
    """Check that a memory with other padding gives the same result, and return it."""
    y, changed = (trial(x, mask=mask, memory=array).y for array in (memory, other))
    trial.require(np.array_equal(y, changed), "cross", "padding of the memory changes the result")
    return y


def _check_memory_cache(trial: Trial, x: np.ndarray, memory: np.ndarray) -> None:
    """Check that queries after the first call need only the cache of the memory."""
    full = trial(x, memory=memory, mask=Mask()).y
    cache = trial.mixer.init_memory_cache(*memory.shape[:2])
    layout, half = _layout(cache), trial.length // 2
    for tokens, new_memory in ((slice(half), memory), (slice(half, None), None)):
        positions = np.arange(trial.length)[None, tokens]
        y, cache, _ = trial(
            x[:, tokens], mask=Mask(), positions=positions, memory=new_memory, cache=cache
        )
        same = _layout(cache) == layout
        trial.require(
            same, "cross", "the returned cache of the memory has other shapes than the given one"
        )
        message = "results from the cached memory differ from those of the memory"
        trial.require_close(y, full[:, tokens], "cross", message)


def check_any_length(trial: Trial) -> None:
    """Check that tokens give the same results alone and at the start of a longer input."""
    longest = max(trial.lengths)
    x = trial.inputs(8, longest)
    for length in trial.lengths:
        y = trial(x[:, :length]).y
        fine = y.shape == x[:, :length].shape and np.isfinite(y).all()
        trial.require(fine, "any_length", f"{length} tokens do not give as many finite results")
        segments = None if trial.abilities.causal else (np.arange(longest) < length)[None] * 1
        if trial.abilities.causal or trial.abilities.segments:
            expected = trial(x, segments=segments).y[:, :length]
            message = f"{length} tokens give other results than at the start of {longest} tokens"
            trial.require_close(y, expected, "any_length", message)


def check_weights(trial: Trial) -> None:
    """Check that weights [B, N, T, S] sum to 1, and that hidden keys have weight 0."""
    x, length = trial.inputs(9), trial.length
    segments, positions = None, None
    if trial.abilities.segments:
        segments, positions = pack_two_documents(length)
    weights_requested = frozenset({"weights"})
    y, _, aux = trial(x, segments=segments, positions=positions, outputs=weights_requested)
    trial.require("weights" in aux, "weights", "are not in aux though they were requested")
    weights = np.asarray(aux["weights"])
    size = trial.memory.shape[1] if trial.reads_memory else length
    fine = weights.ndim == 4 and weights[:, 0].shape == (BATCH_SIZE, length, size)
    trial.require(fine, "weights", f"their shape {weights.shape} is not [B, N, T, S]")
    mask = trial.mixer_inputs(length, segments=segments, positions=positions).mask
    visible = np.asarray(dense_mask(mask, length, size))[:, None]
    hidden = np.where(visible, 0, weights)
    trial.require(not hidden.any(), "weights", "keys that the mask hides have a weight")
    sums = np.broadcast_to(visible.any(-1), weights.shape[:3]).astype(np.float32)
    trial.require_close(weights.sum(-1), sums, "weights", "rows do not sum to 1")
    unrequested = trial(x, segments=segments, positions=positions).y
    trial.require_close(unrequested, y, "weights", "asking for them changes the result")


def pack_two_documents(length: int) -> tuple[Int[np.ndarray, "1 T"], Int[np.ndarray, "1 T"]]:
    """Return segments and positions of a row with two documents and padding after them."""
    sizes = (length // 3, length // 2, length - length // 3 - length // 2)
    segments = np.repeat([1, 2, 0], sizes)[None]
    positions = np.concatenate([np.arange(size) for size in sizes])[None]
    return segments, positions


def _column(flags: np.ndarray) -> np.ndarray:  # [T] -> [1, T, 1]
    return flags[None, :, None]


def _layout(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


ABILITY_CHECKS = {
    "causal": check_causal,
    "cached": check_cached,
    "segments": check_segments,
    "cross": check_cross,
    "any_length": check_any_length,
    "weights": check_weights,
}
"""Check of each ability, by its name in `Abilities`."""


def check_rejected(trial: Trial, ability: str) -> None:
    """Check that a call that needs the ability raises a ValueError of one line at trace time."""
    try:
        UNSUPPORTED_CALLS[ability](trial)
    except ValueError as error:
        one_line = bool(str(error)) and "\n" not in str(error)
        trial.require(one_line, ability, f"is rejected, but not in one line: {error}")
    else:
        trial.require(False, ability, "is neither declared nor rejected by a ValueError")


def _decode(trial: Trial) -> None:
    cache = trial.mixer.init_cache(BATCH_SIZE, trial.length)
    positions = np.arange(trial.length)[None].repeat(BATCH_SIZE, 0)
    trial.trace(trial.inputs(0), cache=cache, positions=positions)


def _read_other_lengths(trial: Trial) -> None:
    """Raise the error of a length that the mixer refuses: a mixer supports one or more."""
    for length in trial.lengths:
        trial.trace(trial.inputs(0, length))


UNSUPPORTED_CALLS: Mapping[str, Callable[[Trial], None]] = {
    "causal": lambda trial: trial.trace(trial.inputs(0), mask=Mask(MaskPattern(causal=True))),
    "cached": _decode,
    "any_length": _read_other_lengths,
}
"""Calls that need an ability. What needs one of the others, `mixer.check_abilities` refuses."""


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

    x = jnp.bfloat16(trial.inputs(0, length))
    y = jax.jit(run, compiler_options=QUICK_COMPILATION)(trial.params, x)
    trial.require(y.dtype == jnp.bfloat16, "bfloat16", f"inputs in bfloat16 give {y.dtype}")
    trial.require(np.isfinite(np.float32(y)).all(), "bfloat16", "outputs are not finite")


def check_in_model(trial: Trial) -> None:
    """Check a model of two layers: scanned equals unrolled, and a training step lowers the loss.

    Models with a mixer that reads a memory need an encoder: they are not tried.
    """
    if trial.reads_memory:
        return
    scanned, unrolled = make_model(trial, "scan"), make_model(trial, "unroll")
    compiled = functools.partial(jax.jit, compiler_options=QUICK_COMPILATION)
    params = compiled(scanned.init_params)(jax.random.key(0))
    check_axes(trial, scanned, params)
    inputs = make_inputs(trial)
    step = compiled(jax.value_and_grad(functools.partial(training_loss, scanned)))
    loss, grads = jax.device_get(step(params, *inputs))
    other = compiled(functools.partial(training_loss, unrolled))(params, *inputs)
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


def make_inputs(trial: Trial) -> tuple[np.ndarray, np.ndarray, jax.Array]:
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
    tokens: Int[Array, "B T"],
    labels: Int[Array, "B"],
    dropout_rngs: Key[Array, "B"],
) -> Float[Array, ""]:
    """Return the mean cross entropy of a training batch."""
    logits = model.apply({"params": params}, tokens, dropout_rngs=dropout_rngs).logits
    assert logits is not None
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=1))


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
