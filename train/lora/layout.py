"""Parts of a LoRA run's model: which weights are frozen, adapted or trained in full."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from train.errors import UsageError
from train.lora.lora_config import NEW, LoRAConfig
from train.parallel.sharding import place_params
from train.step import Batch, TrainStep
from transformer.layers.low_rank import merge_weights
from transformer.lora import LoRALayout

if TYPE_CHECKING:
    from train.engine import Engine


def make_lora_layout(lora: LoRAConfig, logical_axes: Any) -> LoRALayout | None:
    """Return the layout of a run; None if it trains all weights in full.

    Args:
      lora: The settings.
      logical_axes: Tree of `LogicalAxes` of the model's parameters.

    Raises:
      UsageError: A target or a weight to train in full does not exist.
    """
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
        message = str(error).replace("trained ", "train_fully ", 1)
        raise UsageError(f"lora.{message}") from error


def bind_frozen(step: TrainStep, layout: LoRALayout, frozen: Any) -> TrainStep:
    """Return the step of a LoRA run with these frozen weights.

    The parameters of its state are the trainable tree. Gradients, optimizer, EMA and anomaly
    detection see nothing else, so that none of them has arrays of the size of the model.
    """

    def loss_fn(trainable: Any, batch: Batch, dropout_rngs: jax.Array | None) -> Any:
        return step.loss_fn(layout.combine(trainable, frozen), batch, dropout_rngs)

    return dataclasses.replace(step, loss_fn=loss_fn)


def abstract_params(engine: "Engine") -> Any:
    """Return shapes, dtypes and shardings of all parameters of an engine's model."""
    return place_params(engine.mesh, engine.model, engine.model.logical_axes())


def abstract_frozen(engine: "Engine") -> Any:
    """Return shapes, dtypes and shardings of the frozen weights; None without LoRA."""
    return None if engine.lora is None else engine.lora.freeze(abstract_params(engine))


def model_params(engine: "Engine", params: Any) -> Any:
    """Return parameters that the model can be applied to, from those of a state."""
    return params if engine.lora is None else engine.lora.combine(params, engine.frozen)


def merged_params(engine: "Engine", params: Any) -> Any:
    """Return parameters as the model's `init` does, without low-rank updates."""
    if engine.lora is None:
        return params
    return jax.jit(merge_weights)(model_params(engine, params))
