"""Layout of a LoRA run: which weights of its model are frozen, adapted or trained in full."""

import dataclasses
from collections.abc import Callable
from typing import Any

from train.errors import UsageError
from train.experiment import Experiment
from train.lora.config import NEW
from train.state import TrainState
from train.step import Batch, LossFn, Metrics, TrainStep
from transformer.lora import LoRALayout


def make_lora_layout(experiment: Experiment, logical_axes: Any) -> LoRALayout | None:
    """Return the layout of an experiment; None if it trains all weights in full.

    Args:
      experiment: The settings.
      logical_axes: Tree of `LogicalAxes` of the model's parameters.

    Raises:
      UsageError: A target or a weight to train in full does not exist.
    """
    lora = experiment.lora
    if not lora.rank:
        return None
    try:
        return LoRALayout.create(
            logical_axes,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=lora.targets,
            # `fit` replaces `new` by paths. Where no source is known (`describe`, `plan`) nothing
            # is new.
            trained=[each for each in lora.train_fully if each != NEW],
        )
    except ValueError as error:
        raise UsageError(f"lora.{error}") from error


def lora_train_step(
    step: TrainStep, layout: LoRALayout
) -> Callable[[TrainState, Batch, Any], tuple[TrainState, Metrics]]:
    """Return the step of a LoRA run as a function of (state, batch, frozen weights).

    The parameters of the state are the trainable tree. Gradients, optimizer, EMA and anomaly
    detection see nothing else, so that none of them has arrays of the size of the model.
    """

    def train_step(state: TrainState, batch: Batch, frozen: Any) -> tuple[TrainState, Metrics]:
        def loss_fn(trainable: Any, batch: Batch, dropout_rngs: Any) -> Any:
            return step.loss_fn(layout.combine(trainable, frozen), batch, dropout_rngs)

        bound: LossFn = loss_fn
        return dataclasses.replace(step, loss_fn=bound)(state, batch)

    return train_step
