"""Start of a LoRA run: its settings from those of the source, its frozen weights and its adapter.

A run can start with an adapter in PEFT's format.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from train.assembly import make_task
from train.checkpoint.tree_paths import named_leaves
from train.data.tokenizer import Tokenizer
from train.engines.engine import Engine
from train.engines.lora import NEW, LoRAConfig
from train.errors import UserError
from train.experiment import Experiment
from train.parallel.sharding import parameter_shardings
from train.run_folder.base_weights import load_base, load_start, save_base
from train.run_folder.folder import RunFolder
from train.state import TrainState
from train.warm_start.sources import (
    PlaceWeight,
    WarmStart,
    WarmStartReport,
    chosen_names,
    copy_as,
    merge_params,
    seeded_weights,
)
from transformer.hardware import Hardware
from transformer.interop.fields import InteropError
from transformer.interop.peft import Adapter, read_adapter
from transformer.layers.quantized import QuantizedWeight, quantized_axes
from transformer.model_context import unconstrained
from transformer.models.model import Model
from transformer.parameter_counts import abstract_parameters
from transformer.quantization import quantize_leaf


def resolve_lora(
    experiment: Experiment,
    previous: Experiment | None,
    warm_start: WarmStart | None,
    hardware: Hardware,
    *,
    init_adapter: str = "",
) -> Experiment:
    """Return the experiment with `new` in `lora.train_fully` replaced by the paths of weights.

    The settings of a run that is resumed (`previous`) hold the paths already. An adapter to start
    with (`init_adapter`, a folder of PEFT) brings its own settings.

    Raises:
      UserError: There is nothing to adapt, or the adapter or its rank does not fit.
    """
    if previous is not None:
        lora = resumed_lora(experiment.lora, previous.lora, init_adapter)
    else:
        lora = new_lora(experiment, warm_start, hardware, init_adapter)
    return dataclasses.replace(experiment, lora=lora)


def resumed_lora(requested: LoRAConfig, previous: LoRAConfig, init_adapter: str) -> LoRAConfig:
    """Return the settings of a run that is resumed."""
    if init_adapter:
        if not previous.rank:
            raise UserError(
                f"init_adapter {init_adapter}: this run trains all of its weights, and adapts none;"
                " give another workdir, or leave it out"
            )
        if requested.rank not in (0, previous.rank):
            raise UserError(
                f"lora.rank {requested.rank}: this run has rank {previous.rank}; leave it out"
            )
        return previous
    if not requested.rank:  # then the other settings mean nothing, and may differ
        return LoRAConfig() if previous.rank else previous
    if NEW not in requested.train_fully:
        return requested
    kept = previous.train_fully
    others = (each for each in requested.train_fully if each not in (NEW, *kept))
    return dataclasses.replace(requested, train_fully=(*others, *kept))


def new_lora(
    experiment: Experiment, warm_start: WarmStart | None, hardware: Hardware, init_adapter: str
) -> LoRAConfig:
    """Return the settings of a new run."""
    lora, make_model = experiment.lora, make_task(experiment).make_model
    if init_adapter and warm_start is not None:
        model = make_model(hardware, unconstrained)
        adapter = read_run_adapter(init_adapter, model, warm_start.model_type)
        lora = adapter_settings(adapter, lora, init_adapter)
    if not lora.rank:  # then the other settings mean nothing
        return LoRAConfig()
    if warm_start is None or warm_start.words is not None:
        raise UserError(
            f"lora.rank {lora.rank}: needs a trained model to adapt; give --init-from W"
        )
    if NEW not in lora.train_fully:
        return lora
    own = named_leaves(abstract_parameters(make_model(hardware, unconstrained)).shapes)
    source = chosen_names(warm_start, own)
    others = (each for each in lora.train_fully if each != NEW)
    new = (name for name in own if name not in source)
    return dataclasses.replace(lora, train_fully=(*others, *new))


def start_from_base(
    engine: Engine,
    folder: RunFolder,
    state: TrainState,
    warm_start: WarmStart | None,
    tokenizer: Tokenizer | None,
    seed: int,
) -> tuple[TrainState, WarmStartReport | None]:
    """Give the engine its frozen weights, and return the state before the first step.

    The base weights of the warm start are written to the folder. Without one, `base/` has them
    already, of the same run. `state` is the initial state of the adapter; weights that the source
    lacks are drawn by the seed.
    """
    report = None
    if warm_start is None:
        params = load_base(folder, engine)
    else:
        params, report = merge_params(
            engine.abstract_params(),
            seeded_weights(engine.model, seed),
            warm_start,
            tokenizer,
            base_placement(engine),
        )
    assert engine.lora is not None
    engine.frozen = engine.lora.freeze(params)
    trainable = engine.lora.replace_trained(state.params, params)
    if warm_start is None:
        trainable = load_start(folder, state.params)
    elif warm_start.adapter:
        adapter = read_run_adapter(warm_start.adapter, engine.model, warm_start.model_type)
        trainable = replace_factors(trainable, adapter)
    # Copies: the step donates the state, and the EMA must not share its buffers.
    trainable = jax.tree.map(copy_as, trainable, state.params)
    ema = state.ema
    if ema is not None:
        ema = jax.tree.map(copy_as, trainable, ema)
    if warm_start is not None:
        save_base(folder, params, trainable)
    return state.replace(params=trainable, ema=ema), report


def base_placement(engine: Engine) -> PlaceWeight:
    """Return a function that puts base weights on their devices, quantized as the settings say.

    Matrices go there one after the other, and packed ones of an import stay packed.
    """
    base, axes = flatten_dict(engine.abstract_base()), flatten_dict(engine.model.logical_axes())

    def place(name: str, value: Any, like: jax.ShapeDtypeStruct) -> Any:
        path = tuple(name.split("/"))
        if not isinstance(base[path], QuantizedWeight):
            return copy_as(value, like)
        if not isinstance(value, QuantizedWeight):
            value = quantize_leaf(copy_as(value, like), axes[path], engine.quantization)
        sharding = parameter_shardings(engine.mesh, quantized_axes(value, axes[path]), value)
        return jax.device_put(value, sharding)

    return place


def read_run_adapter(source: str, model: Model, model_type: str) -> Adapter:
    """Read a folder of PEFT for the model of a run.

    Raises:
      UserError: It cannot be read, or does not fit the model.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise UserError(f"{source}: is not a folder; give one with adapter_config.json")
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
    return LoRAConfig(rank, adapter.alpha, adapter.targets, names, requested.quantize)


def unused_settings(requested: LoRAConfig, used: LoRAConfig) -> Iterator[str]:
    """Yield a note on each setting that was requested and that the run does not use."""
    for name in ("alpha", "targets"):
        value, own = getattr(requested, name), getattr(used, name)
        if value in (own, getattr(LoRAConfig(), name)):
            continue
        shown, own = (",".join(x) if name == "targets" else f"{x:g}" for x in (value, own))
        has = f"the adapter has {own}" if used.rank else "without lora.rank all weights are trained"
        yield f"lora.{name} {shown}: not used; {has}"


def replace_factors(trainable: Any, adapter: Adapter) -> Any:
    """Return a trainable tree with the values of an adapter."""
    flat = flatten_dict(trainable)
    values = flatten_dict(adapter.trainable)
    return unflatten_dict(flat | {path: jnp.asarray(values[path]) for path in values})
