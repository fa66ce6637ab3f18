"""Checks of every step, with `debug_checks`: token ids in range, and no array that is not finite.

XLA clamps an index that is out of range, and a NaN spreads to all arrays within a step. So the ids
are checked on the host before the step, and the compiled step tests its arrays in the order in
which a NaN passes through them. The host reads the result of each step before the next one.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.checkpoint.tree_paths import named_leaves
from train.errors import UserError
from train.state import TrainState
from train.step import Batch, Metrics, TrainStep
from transformer.models.config import TransformerConfig

_PREFIX = "finite/"

_STAGES = ("params", "losses", "grads", "updated_params")
"""Arrays of a step in the order of computation."""


class CheckedTrainStep(TrainStep):
    """Training step that adds `finite_flags` to its metrics.

    The gradients are computed a second time, which XLA merges with the first where it can.
    """

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Return the state after one update, and the metrics with the flags."""
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        grads, losses = self.sum_gradients(state, batch, scale)
        # With a loss scale, gradients overflow in regular operation: the scale is then lowered.
        checked_grads = grads if state.loss_scale is None else None
        new_state, metrics = super().__call__(state, batch)
        flags = finite_flags(
            params=state.params,
            losses={name: loss.total for name, loss in losses.items()},
            grads=checked_grads,
            updated_params=new_state.params,
        )
        return new_state, metrics | flags


def finite_flags(**stages: Any) -> dict[str, jax.Array]:
    """Return a boolean for each array of the trees by stage: True if all its entries are finite."""
    # Not `chex.chexify`: its error points at the line of an assertion, and names an array only in
    # a second run, without `jit`.
    assert set(stages) <= set(_STAGES)
    arrays: Mapping[str, Any] = named_leaves(stages)
    return {f"{_PREFIX}{name}": jnp.all(jnp.isfinite(leaf)) for name, leaf in arrays.items()}


def check_finite(step: int, cursor: int, metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the metrics of a step without the flags of `finite_flags`. Waits for its end.

    Raises:
      UserError: An array is not finite. The first one is named.
    """
    flags = {name: value for name, value in metrics.items() if name.startswith(_PREFIX)}
    finite = jax.device_get(flags)
    for stage in _STAGES:
        for name in finite:
            if name.startswith(f"{_PREFIX}{stage}/") and not finite[name]:
                raise UserError(
                    f"debug_checks: step {step}, batch {cursor}: {name.removeprefix(_PREFIX)} is "
                    "not finite; check the batch, or lower schedule.learning_rate"
                )
    return {name: value for name, value in metrics.items() if name not in flags}


def check_batch_tokens(
    cursor: int, rows: Mapping[str, np.ndarray], config: TransformerConfig
) -> None:
    """Raise UserError if a batch has token ids beyond the vocabulary.

    Targets are not checked: one that is out of range makes the loss NaN.
    """
    source_vocab_size = config.encoder.vocab_size if config.encoder else 0
    sizes = {"tokens": config.vocab_size, "source": source_vocab_size or config.vocab_size}
    for name, vocab_size in sizes.items():
        ids = rows.get(name)
        if ids is None or not ids.size:
            continue
        for token in (ids.min(), ids.max()):
            if not 0 <= token < vocab_size:
                raise UserError(
                    f"debug_checks: batch {cursor}: {name} has id {token}, and the vocabulary has "
                    f"{vocab_size:,}; prepare the data with the tokenizer of the model"
                )
