"""The weights by which a run is judged, and with which it writes.

Those of its newest checkpoint, or of its best; or the mean of those of several checkpoints, one
after the other, which lies closer to the middle of what they wander about in. Where the run keeps a
moving average of its weights, that is what is meant by the weights of a checkpoint.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from train.checkpoint.discovery import SkippedCheckpoint
from train.checkpoint.errors import no_valid_checkpoint_error
from train.checkpoint.manager import CheckpointManager
from train.errors import UsageError, UserError
from train.evaluation.early_stopping import BestEvaluation
from train.experiment import Experiment
from train.state import TrainState

if TYPE_CHECKING:
    from train.engine import Engine

_ATTEMPTS = 10
"""How often reading starts again because the run that trains here removed a checkpoint."""


class EvalWeights(NamedTuple):
    """Weights, and the steps of the checkpoints that they are of."""

    params: Any
    steps: list[int]


def eval_params(state: TrainState) -> Any:
    """The weights that a state is judged by: their moving average, if it has one."""
    return state.params if state.ema is None else _like(state.ema, state.params)


def load_eval_weights(
    checkpoints: CheckpointManager,
    engine: Engine,
    experiment: Experiment,
    *,
    step: int | None = None,
    average_checkpoints: int | None = None,
    check: Callable[[int, dict[str, Any]], None] | None = None,
) -> EvalWeights:
    """Reads the weights of a run.

    Args:
      checkpoints: Those of the run.
      engine: Says where weights go.
      experiment: What it says of averaging, and of the best checkpoint, holds where nothing else
        is asked for.
      step: Which checkpoint, by itself unless `average_checkpoints` is given too.
      average: The mean of that many: `step` or the newest, and those before it at multiples of
        `checkpoint.every`.
      check: Called with the step of each checkpoint that is read, and with what was saved beside
        its state; it raises if the checkpoint is not one of this run.

    A run that trains meanwhile removes old checkpoints: if one goes while it is read, the search
    starts again.

    Raises:
      UserError: there is no such checkpoint, not as many, or none that is as it was saved.
    """
    for _ in range(_ATTEMPTS):
        before = checkpoints.steps()
        try:
            return _serve(checkpoints, engine, experiment, step, average_checkpoints, check)
        except UserError:
            if set(before) <= set(checkpoints.steps()):
                raise
    return _serve(checkpoints, engine, experiment, step, average_checkpoints, check)


def _serve(
    checkpoints: CheckpointManager,
    engine: Engine,
    experiment: Experiment,
    step: int | None,
    average: int | None,
    check: Callable[[int, dict[str, Any]], None] | None,
) -> EvalWeights:
    if average is not None and average < 1:
        raise UsageError(f"average {average}: give 1 or more")
    newest = newest_valid_step(checkpoints) if step is None else step
    count = average or (experiment.evaluation.average_checkpoints if step is None else 1)
    if count == 1 and step is None and experiment.uses_best_checkpoint:
        best = BestEvaluation.from_json(checkpoints.read_metadata(newest).get("best", {})).step
        if why := checkpoints.find_problem(best) if best in checkpoints.steps() else None:
            _say(SkippedCheckpoint(best, why))
        newest = best if checkpoints.valid_steps([best]) else newest
    there = checkpoints.steps() if count == 1 else checkpoints.valid_steps(checkpoints.steps())
    steps = steps_to_average(there, newest, experiment.checkpoint.every, count)
    if average and len(steps) < average:
        raise UserError(
            f"average {average}: there are only checkpoints of steps {', '.join(map(str, steps))} "
            f"to average; give at most {len(steps)}"
        )
    if check is not None:
        for each in steps:
            check(each, checkpoints.read_metadata(each))
    return EvalWeights(_mean(checkpoints, engine, steps), steps)


def newest_valid_step(checkpoints: CheckpointManager) -> int:
    """The newest that is as it was saved; a word on standard error for each that is not."""
    found = checkpoints.find_newest_valid()
    there = checkpoints.steps()
    for each in found.skipped:
        if each.step in there:  # else it is not damaged, but was removed while it was read
            _say(each)
    if found.step is not None:
        return found.step
    if found.skipped:
        raise no_valid_checkpoint_error(checkpoints.directory, found.skipped)
    raise UserError(f"{checkpoints.directory}: holds no checkpoint yet; train with fit first")


def _say(one: SkippedCheckpoint) -> None:
    if jax.process_index() == 0:
        print(f"checkpoint of step {one.step}: {one.problem}; passed over", file=sys.stderr)


def steps_to_average(steps: Sequence[int], newest: int, save_every: int, count: int) -> list[int]:
    """The newest, and of those before it the last `count` - 1 that are multiples of `save_every`.

    So a checkpoint that a run saved when it was told to stop changes no average.
    """
    before = [step for step in steps if step < newest and save_every and step % save_every == 0]
    return [*before[max(0, len(before) - count + 1) :], newest]


def _mean(checkpoints: CheckpointManager, engine: Engine, steps: list[int]) -> Any:
    shapes = engine.abstract_state()
    part = "params" if shapes.ema is None else "ema"
    like = getattr(shapes, part)
    total = checkpoints.restore_subtree(steps[0], part, like)
    if len(steps) > 1:
        total = _like(total, like, jnp.float32)
        for step in steps[1:]:
            total = _add(total, checkpoints.restore_subtree(step, part, like))
        total = _divide(total, np.float32(len(steps)))
    return _like(total, shapes.params)


# One program for a whole tree: one for each leaf would put as many in flight as there are leaves,
# and only few can be on several CPU devices (see train/runtime/dispatch_limit.py).
@functools.partial(jax.jit, donate_argnums=0)
def _add(total: Any, other: Any) -> Any:
    return jax.tree.map(lambda t, o: t + o.astype(t.dtype), total, other)


@jax.jit
def _divide(total: Any, count: jax.Array) -> Any:
    return jax.tree.map(lambda t: t / count, total)


@functools.partial(jax.jit, static_argnums=1)
def _cast(leaves: list[jax.Array], dtypes: tuple[Any, ...]) -> list[jax.Array]:
    return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


def _like(tree: Any, other: Any, dtype: Any = None) -> Any:
    """Return the tree in the dtypes of another, or all of it in one dtype."""
    leaves, structure = jax.tree.flatten(tree)
    others = jax.tree.leaves(other)
    dtypes = tuple(np.dtype(dtype or leaf.dtype) for leaf in others)
    if all(leaf.dtype == each for leaf, each in zip(leaves, dtypes, strict=True)):
        return tree
    return jax.tree.unflatten(structure, _cast(leaves, dtypes))
