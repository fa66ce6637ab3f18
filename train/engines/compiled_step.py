"""The training step as a function to compile, and compiled by `pmap`: a replica on each device."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from train.detector import RecoveryConfig
from train.engines.debug_checks import CheckedTrainStep
from train.engines.lora import LoRAConfig
from train.errors import UserError
from train.optim.optimizer import Optimizer
from train.optim.optimizer_registry import make_step_optimizer
from train.optim.schedules import LearningRateSchedule
from train.parallel.mesh import MeshConfig
from train.parallel.sharding import replicated_sharding
from train.runtime.host import return_freed_memory
from train.state import EmaConfig, LossScaleConfig, TrainState
from train.step import Batch, LossFn, Metrics, TrainStep
from transformer.hardware import Hardware
from transformer.lora import LoRALayout
from transformer.model_context import ActivationConstraint, unconstrained
from transformer.models.model import Model

MakeModel = Callable[[Hardware, ActivationConstraint], Model]
"""Function from the hardware and the placement of activations to a model."""

MakeLossFn = Callable[[Model], LossFn]
"""Function from a model to its loss."""

CompiledStep = Callable[[TrainState, Batch, Any], tuple[TrainState, Metrics]]
"""Function from the state, a batch and the frozen weights (None without LoRA) to the next state and
the metrics of the step. Compiled, it donates (deletes) the state."""


class CompiledFunction:
    """Function under `jit`, compiled before its first call with each shape of the batch.

    Within a call the compiler and the program have their memory at the same time: XLA's compiler
    frees some 700 MiB for the step of a small language model, which malloc keeps.
    """

    def __init__(self, jitted: jax.stages.Wrapped):
        self.jitted = jitted
        self._compiled: set[Any] = set()
        self._ahead: dict[Any, Future[None]] = {}  # by the shapes of the batch

    def compile_ahead(self, state: Any, batch: Batch, *others: Any) -> None:
        """Start to compile in a thread; a call with this shape waits. The state may be abstract."""
        if _shapes(batch) in self._compiled:
            return
        executor = ThreadPoolExecutor(1, "compile")
        self._ahead[_shapes(batch)] = executor.submit(self._compile, state, batch, *others)
        executor.shutdown(wait=False)

    def __call__(self, state: Any, batch: Batch, *others: Any) -> Any:
        if ahead := self._ahead.pop(_shapes(batch), None):
            wait([ahead])  # what it raised, the call raises
        if _shapes(batch) not in self._compiled:
            return_freed_memory()  # of the programs before, such as that of the initial state
            self._compile(state, batch, *others)
        return self.jitted(state, batch, *others)

    def _compile(self, state: Any, batch: Batch, *others: Any) -> None:
        # A call finds this program in the cache of `jit`.
        self.jitted.lower(state, batch, *others).compile()
        self._compiled.add(_shapes(batch))
        return_freed_memory()


def _shapes(batch: Batch) -> tuple[Any, ...]:
    return tuple((name, array.shape) for name, array in batch.items())


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine: those of the training step and of its state."""

    optimizer: Optimizer
    schedule: LearningRateSchedule
    steps: int
    grad_accum_steps: int
    loss_scale: LossScaleConfig
    ema: EmaConfig
    recovery: RecoveryConfig
    lora: LoRAConfig
    mesh: MeshConfig
    seed: int
    debug_checks: bool
    compile: Literal["jit", "pmap"]


def make_train_step(
    config: EngineConfig,
    loss_fn: LossFn,
    logical_axes: Any,
    width: int,
    axis_name: str | None = None,
) -> TrainStep:
    """Return the training step.

    `logical_axes` has the structure of the trained parameters; some schedules depend on the width
    of the model, D. A step for `pmap` sums gradients over `axis_name`.
    """
    step_class = CheckedTrainStep if config.debug_checks else TrainStep
    return step_class(
        loss_fn=loss_fn,
        optimizer=make_step_optimizer(
            config.optimizer, logical_axes, config.mesh.optimizer_placement
        ),
        schedule=config.schedule.make(steps=config.steps, width=width),
        max_grad_norm=config.optimizer.max_grad_norm,
        grad_accum_steps=config.grad_accum_steps,
        loss_scale=config.loss_scale,
        axis_name=axis_name,
        ema_decay=config.ema.decay,
        recovery=config.recovery,
    )


def named_train_step(step: TrainStep, lora: LoRALayout | None) -> CompiledStep:
    """Return the step as a function: profiles and compiler logs show its name, `train_step`.

    `TrainStep` is a dataclass, and its instances have no `__name__`.
    """

    def train_step(state: TrainState, batch: Batch, frozen: Any) -> tuple[TrainState, Metrics]:
        return (step if lora is None else bind_frozen(step, lora, frozen))(state, batch)

    return train_step


def bind_frozen(step: TrainStep, layout: LoRALayout, frozen: Any) -> TrainStep:
    """Return the step of a LoRA run with these frozen weights.

    The parameters of its state are the trainable tree. Gradients, optimizer, EMA and anomaly
    detection see nothing else, so that none of them has arrays of the size of the model.
    """

    def loss_fn(trainable: Any, batch: Batch, dropout_rngs: jax.Array | None) -> Any:
        return step.loss_fn(layout.combine(trainable, frozen), batch, dropout_rngs)

    return dataclasses.replace(step, loss_fn=loss_fn)


AXIS_NAME = "devices"
"""Mapped axis over which a step under `pmap` sums losses and gradients."""

MIN_JAX_ON_SEVERAL_HOSTS = (0, 10, 0)
"""Oldest version that was tried. 0.7's `pmap` takes the rows of the own host alone."""


def check_pmap() -> None:
    """Raise UserError on several hosts with an old JAX, whose `pmap` refuses global arrays."""
    if jax.process_count() > 1 and jax.__version_info__ < MIN_JAX_ON_SEVERAL_HOSTS:
        needed = ".".join(map(str, MIN_JAX_ON_SEVERAL_HOSTS))
        raise UserError(
            f"compile pmap: on several hosts needs jax {needed} or later, and this is "
            f"{jax.__version__}; give --compile jit"
        )


def make_pmap_step(
    config: EngineConfig,
    mesh: Mesh,
    hardware: Hardware,
    make_model: MakeModel,
    make_loss_fn: MakeLossFn,
    lora: LoRALayout | None,
) -> CompiledStep:
    """Return the step compiled by `pmap`: replicated parameters, the batch split over the devices.

    It takes and returns the global arrays of an `Engine`, as a step compiled by `jit` does.
    """
    # Inside `pmap` a program sees one device and its rows alone.
    replica = make_model(dataclasses.replace(hardware, count=1), unconstrained)
    axes = replica.logical_axes() if lora is None else lora.trainable_axes()
    train_step = make_train_step(
        config, make_loss_fn(replica), axes, replica.config.d_model, AXIS_NAME
    )
    # `out_axes=None` returns one logical copy. All replicas have the same state after the step,
    # since `TrainStep` sums gradients over the mapped axis.
    mapped_step = jax.pmap(
        named_train_step(train_step, lora),
        AXIS_NAME,
        in_axes=(None, 0, None),
        out_axes=None,
        donate_argnums=0,
    )

    def over_all_hosts(replicas: jax.Array) -> jax.Array:
        # `pmap` leaves arrays on this host's devices; checkpoints and evaluations take global ones.
        # Nothing is copied.
        shards = [shard.data for shard in replicas.addressable_shards]
        sharding = replicated_sharding(mesh)
        return jax.make_array_from_single_device_arrays(replicas.shape, sharding, shards)

    def step(state: TrainState, batch: Batch, frozen: Any) -> tuple[TrainState, Metrics]:
        # [B, ...] -> [devices, B / devices, ...]: `put_batch` has placed each device's rows there
        # already, so the reshape moves none between devices.
        split = jax.tree.map(lambda x: x.reshape(mesh.size, -1, *x.shape[1:]), batch)
        after = mapped_step(state, split, frozen)
        return after if jax.process_count() == 1 else jax.tree.map(over_all_hosts, after)

    return step
