"""Select the weights to evaluate and sample: of one checkpoint, or an average of several.

One checkpoint is the newest, or that of the best evaluation. An average of the last checkpoints
lies closer to the minimum around which they move. If the run keeps an exponential moving average
(EMA) of its weights, the EMA takes the place of a checkpoint's weights.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from train.checkpoint.manager import (
    CheckpointManager,
    SkippedCheckpoint,
    no_valid_checkpoint_error,
)
from train.engines.engine import Engine
from train.errors import UsageError, UserError, printable
from train.evaluation.early_stopping import BestEvaluation
from train.experiment import Experiment
from train.state import TrainState
from transformer.quantization import Quantization, has_quantized, quantize_weights

_MAX_ATTEMPTS = 10
"""Attempts to read while the run trains on and deletes old checkpoints."""


class EvalWeights(NamedTuple):
    """Weights, and the steps of the checkpoints that they come from."""

    params: Any
    steps: list[int]


def eval_params(state: TrainState) -> Any:
    """Return the weights of a state to evaluate: their EMA, if it has one."""
    return state.params if state.ema is None else _cast_like(state.ema, state.params)


def load_eval_weights(
    checkpoints: CheckpointManager,
    engine: Engine,
    experiment: Experiment,
    *,
    step: int | None = None,
    average_checkpoints: int | None = None,
    check: Callable[[int, dict[str, Any]], None] | None = None,
    merged: bool = True,
    quantize: Quantization = "none",
) -> EvalWeights:
    """Load the weights of a run to evaluate: those of `step`, or as the settings say.

    The run may still be training. If a checkpoint is deleted while it is read, the search starts
    again. An average is of `step` or the newest checkpoint, and of those before it at multiples of
    `checkpoint.every`. `check` is called with the step and the metadata of each, and raises if the
    checkpoint is of another run. Not `merged`, a LoRA run gives its trainable tree alone.
    `quantize` is how the matrices of the layers are held; those of a packed import stay.

    Raises:
      UserError: A checkpoint is missing, too few can be averaged, or none is valid.
    """
    if average_checkpoints is not None and average_checkpoints < 1:
        raise UsageError(f"average_checkpoints {average_checkpoints}: give 1 or more")

    def load() -> EvalWeights:
        steps = choose_steps(checkpoints, experiment, step, average_checkpoints)
        if check is not None:
            for each in steps:
                check(each, checkpoints.read_metadata(each))
        if engine.lora is None:
            return EvalWeights(_restore_model(checkpoints, engine, steps, quantize), steps)
        # A LoRA run averages A and B. Merging comes last, in the one place that all readers pass.
        params = _restore_mean(checkpoints, steps, *_stored_tree(engine))
        if merged:
            params = engine.merged_params(params)
            params = quantize_weights(params, engine.model.logical_axes(), quantize)
        return EvalWeights(params, steps)

    for _ in range(_MAX_ATTEMPTS):
        before = checkpoints.steps()
        try:
            return load()
        except UserError:
            if set(before) <= set(checkpoints.steps()):  # nothing was deleted meanwhile
                raise
    return load()


def choose_steps(
    checkpoints: CheckpointManager, experiment: Experiment, step: int | None, average: int | None
) -> list[int]:
    """Return the steps of the checkpoints to load, as the arguments or the settings say."""
    newest = newest_valid_step(checkpoints) if step is None else step
    count = average or (experiment.evaluation.average_checkpoints if step is None else 1)
    if count == 1 and step is None and experiment.uses_best_checkpoint:
        metadata = checkpoints.read_metadata(newest)
        best = BestEvaluation.from_metadata(metadata).step
        if problem := checkpoints.find_problem(best) if best in checkpoints.steps() else None:
            _warn_skipped(SkippedCheckpoint(best, problem))
        newest = best if checkpoints.valid_steps([best]) else newest
    # Verifying reads every file, so it is done only for an average, which needs several.
    known = checkpoints.steps() if count == 1 else checkpoints.valid_steps(checkpoints.steps())
    steps = steps_to_average(known, newest, experiment.checkpoint.every, count)
    if average and len(steps) < average:
        raise UserError(
            f"average_checkpoints {average}: only the checkpoints of steps "
            f"{', '.join(map(str, steps))} can be averaged; give at most {len(steps)}"
        )
    return steps


def newest_valid_step(checkpoints: CheckpointManager) -> int:
    """Return the newest valid step, with a line on standard error for each invalid one.

    Raises:
      UserError: There is no valid checkpoint.
    """
    result = checkpoints.find_newest_valid()
    steps = checkpoints.steps()
    for skipped in result.skipped:
        if skipped.step in steps:  # otherwise it was deleted while it was read
            _warn_skipped(skipped)
    if result.step is not None:
        return result.step
    if result.skipped:
        raise no_valid_checkpoint_error(checkpoints.directory, result.skipped)
    raise UserError(f"{checkpoints.directory}: holds no checkpoint yet; train with fit first")


def _warn_skipped(skipped: SkippedCheckpoint) -> None:
    if jax.process_index() == 0:
        line = f"checkpoint of step {skipped.step}: {skipped.problem}; skipped"
        print(printable(line), file=sys.stderr)


def steps_to_average(steps: Sequence[int], newest: int, save_every: int, count: int) -> list[int]:
    """Return `newest` and, before it, the last `count` - 1 multiples of `save_every`.

    A checkpoint that a run saved when it was preempted is at no multiple, so it changes no average.
    """
    due = [step for step in steps if step < newest and save_every and step % save_every == 0]
    return [*due[max(0, len(due) - count + 1) :], newest]


def _restore_model(
    checkpoints: CheckpointManager, engine: Engine, steps: list[int], quantize: Quantization
) -> Any:
    """Return the weights of a run without LoRA, quantized if asked for."""
    name, abstract, dtypes = _stored_tree(engine)
    packed = engine.shapes_as_stored(checkpoints.read_shapes(steps[0], name))
    if has_quantized(packed):  # an import, which has one step
        return checkpoints.restore_subtree(steps[0], name, packed)
    if quantize == "none":
        return _restore_mean(checkpoints, steps, name, abstract, dtypes)
    # One matrix at a time: the devices never hold the model in floats.
    axes, flat_dtypes = flatten_dict(engine.model.logical_axes()), flatten_dict(dtypes)
    params: dict[Any, Any] = {}
    for path, shape in flatten_dict(abstract).items():
        trees = (unflatten_dict({path: leaf}) for leaf in (shape, flat_dtypes[path]))
        part = _restore_mean(checkpoints, steps, name, *trees)
        params |= flatten_dict(quantize_weights(part, unflatten_dict({path: axes[path]}), quantize))
    return unflatten_dict(params)


def _stored_tree(engine: Engine) -> tuple[str, Any, Any]:
    """Return the field of a state to evaluate, its shapes, and those of the parameters."""
    shapes = engine.abstract_state()
    name = "params" if shapes.ema is None else "ema"
    return name, getattr(shapes, name), shapes.params


def _restore_mean(
    checkpoints: CheckpointManager, steps: list[int], name: str, abstract: Any, dtypes: Any
) -> Any:
    """Return the mean of a tree of several steps, summed in float32, in the dtypes of another."""
    total = checkpoints.restore_subtree(steps[0], name, abstract)
    if len(steps) > 1:
        total = _cast_like(total, abstract, jnp.float32)
        for step in steps[1:]:
            total = _add(total, checkpoints.restore_subtree(step, name, abstract))
        total = _divide(total, np.float32(len(steps)))
    return _cast_like(total, dtypes)


# One program for a whole tree. A program for each leaf would put as many in flight as the tree has
# leaves, and several CPU devices can hold only a few (train/engines/engine.py).
@functools.partial(jax.jit, donate_argnums=0)
def _add(total: Any, other: Any) -> Any:
    return jax.tree.map(lambda t, o: t + o.astype(t.dtype), total, other)


@jax.jit
def _divide(total: Any, count: jax.Array) -> Any:
    return jax.tree.map(lambda t: t / count, total)


@functools.partial(jax.jit, static_argnums=1)
def _cast(leaves: list[jax.Array], dtypes: tuple[Any, ...]) -> list[jax.Array]:
    return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


def _cast_like(tree: Any, other: Any, dtype: Any = None) -> Any:
    """Return the tree in the dtypes of another tree, or all of it in one dtype."""
    leaves, structure = jax.tree.flatten(tree)
    others = jax.tree.leaves(other)
    dtypes = tuple(np.dtype(dtype or leaf.dtype) for leaf in others)
    if all(leaf.dtype == each for leaf, each in zip(leaves, dtypes, strict=True)):
        return tree
    return jax.tree.unflatten(structure, _cast(leaves, dtypes))
