"""Adapters in PEFT's format that a LoRA run starts with."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from train.errors import UserError
from train.lora.config import LoRAConfig
from transformer.interop.errors import InteropError
from transformer.interop.peft_reader import Adapter, read_adapter
from transformer.models.base import Model


def read_run_adapter(source: str, model: Model, model_type: str) -> Adapter:
    """Read a folder of PEFT for the model of a run.

    Raises:
      UserError: It cannot be read, or does not fit the model.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise UserError(f"{source}: is no folder; give a folder with adapter_config.json")
    try:
        return read_adapter(folder, model, family=model_type)
    except InteropError as error:
        raise UserError(str(error)) from error


def adapter_settings(adapter: Adapter, requested: LoRAConfig, source: str) -> LoRAConfig:
    """Return the settings of a run that starts with an adapter.

    Raises:
      UserError: Another rank is requested.
    """
    rank = adapter.layout.rank
    if requested.rank not in (0, rank):
        raise UserError(f"lora.rank {requested.rank}: {source} has rank {rank}; leave it out")
    names = (*adapter.trained, *(x for x in requested.train_fully if x not in adapter.trained))
    return LoRAConfig(rank, adapter.alpha, adapter.targets, names)


def replace_factors(trainable: Any, adapter: Adapter) -> Any:
    """Return a trainable tree with the values of an adapter."""
    flat = flatten_dict(trainable)
    values = flatten_dict(adapter.trainable)
    return unflatten_dict(flat | {path: jnp.asarray(values[path]) for path in values})
