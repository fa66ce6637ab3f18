"""What the compiler says of the memory of a training step, beside what is described.

The real training step, compiled for a target by its own compiler, and what that says of it.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from train.estimate.memory import TrainingMemory

if TYPE_CHECKING:
    from train.engine import JitEngine
    from train.experiment import Experiment
    from transformer.hardware import Hardware
import re
import time

import jax

from train.engine import JitEngine
from train.errors import UsageError
from train.estimate.batch_shapes import sharded_batch_shapes
from train.estimate.hlo import Collective, find_collectives
from train.estimate.target import Target, target_devices
from train.experiment import Experiment
from train.parallel.mesh import make_mesh
from train.runtime.oom import is_oom_error


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """Bytes of one device."""

    devices: int
    state: int
    """Weights, moments and counters, by their shapes."""
    batch: int
    arguments: int
    """What the compiler says that the step is given: state and batch, less what it does not use."""
    donated: int
    """Results that take the place of arguments."""
    results: int
    """Others."""
    temporaries: int
    """What the compiler reserves beside: all that is described below."""
    compute_copy: int
    gradients: int
    activations: int
    logits: int
    residual_activations: int
    """What differentiation keeps of the forward pass that grows with the batch, by tracing it: the
    compiler may keep less, and compute it again."""
    residual_weights: int
    """What it keeps that does not grow: weights cast or cut out of stacks, and the gradient of the
    output matrix, which the loss takes in its forward pass."""

    @property
    def estimated_temporaries(self) -> int:
        """Temporaries as they are described."""
        return self.compute_copy + self.gradients + self.activations + self.logits

    @property
    def traced_temporaries(self) -> int:
        """The same with what is kept as it is traced."""
        return self.residual_weights + self.gradients + self.residual_activations + self.logits


def compile_for_memory(
    experiment: "Experiment", memory: TrainingMemory, hardware: "Hardware"
) -> CompiledMemory:
    """Compiles the step of an experiment that has its sizes, for the devices that are here.

    It takes as long as compiling does before training; nothing is allocated.
    """
    from train.engine import JitEngine, make_engine
    from train.estimate.batch_shapes import sharded_batch_shapes
    from train.parallel.batches import num_batch_shards
    from train.parallel.sharding import num_shards
    from train.runtime.oom import explain_oom, suggest_remedies

    engine = make_engine(experiment, hardware)
    assert isinstance(engine, JitEngine)  # as all are
    state: Any = engine.abstract_state()
    batch: Any = sharded_batch_shapes(experiment, engine.mesh)
    with explain_oom(lambda: suggest_remedies(experiment)):
        stats: Any = engine.lower_step(state, batch).compile().memory_analysis()
    shards = num_batch_shards(engine.mesh) * num_shards(engine.mesh, "length")
    kept_activations, kept_weights = trace_residual_bytes(
        engine, batch, experiment.grad_accum_steps
    )
    return CompiledMemory(
        devices=engine.mesh.size,
        state=bytes_per_device(state),
        batch=bytes_per_device(batch),
        arguments=stats.argument_size_in_bytes,
        donated=stats.alias_size_in_bytes,
        results=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        compute_copy=memory.compute_copy // engine.mesh.size,
        gradients=memory.gradients // engine.mesh.size,
        activations=memory.activations.bytes // shards,
        logits=memory.logits // shards,
        residual_activations=kept_activations // shards,
        residual_weights=kept_weights,
    )


def bytes_per_device(tree: Any) -> int:
    """Bytes of the part of each array that a device has."""
    import jax

    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def trace_residual_bytes(engine: "JitEngine", batch: Any, grad_accum_steps: int) -> tuple[int, int]:
    """Bytes that differentiation keeps of a microbatch: those that grow with it, and others."""
    once, twice = (_traced(engine, batch, times / grad_accum_steps) for times in (1, 2))
    return twice - once, 2 * once - twice


def _traced(engine: "JitEngine", batch: Any, share: float) -> int:
    """Bytes that differentiation keeps of the forward pass of this share of a batch.

    Each array counts once, and the weights themselves not at all.
    """
    import jax

    from train.step import example_rngs, total_loss

    def pull(state: Any, rows: Any) -> Any:
        keys = example_rngs(state, rows)
        loss = lambda params: total_loss(engine.train_step.loss_fn(params, rows, keys))  # noqa: E731
        return jax.vjp(loss, state.params)[1]

    rows = {
        name: jax.ShapeDtypeStruct((round(leaf.shape[0] * share), *leaf.shape[1:]), leaf.dtype)
        for name, leaf in batch.items()
    }
    program = jax.make_jaxpr(pull)(engine.abstract_state(), rows).jaxpr
    given = {id(variable) for variable in program.invars}
    kept = {id(variable): variable.aval for variable in program.outvars}
    avals: Any = [aval for name, aval in kept.items() if name not in given]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step as the compiler has made it; bytes are those of one chip."""

    weights: int
    optimizer: int
    """Its state; 0 if that lies with the host."""
    other_state: int
    """The moving average of the weights, counters and keys."""
    batch: int
    arguments: int
    """What the step is given, as the compiler lays it out."""
    temporaries: int
    results: int
    """Those that do not take the place of arguments."""
    peak: int
    """All of it, at the moment when it is most."""
    find_collectives: tuple[Collective, ...]
    compile_seconds: float
    """That compiling took."""
    rejection: str = ""
    """Of a step that the compiler refuses, as too large for a chip: the largest of what it would
    have to hold, or what the compiler says. Its sizes are then the least that they can be."""
    engine: Any = None
    """That made it."""
    program: Any = None
    """What can be run, on devices that are here."""

    def without_program(self) -> "CompiledStep":
        """Return the same figures without what only this process can use."""
        return dataclasses.replace(self, engine=None, program=None)

    def fits(self, available_bytes: int) -> bool:
        """In so many bytes of a chip; never if the compiler itself refuses it."""
        return not self.rejection and self.peak <= available_bytes


def compile_step(experiment: Experiment, target: Target) -> CompiledStep:
    """Compiles the step of an experiment that has its sizes; nothing is allocated.

    Raises UserError for a target without its compiler, UsageError for what cannot be divided.
    """
    mesh = make_mesh(experiment.mesh, target_devices(target))
    try:
        engine = JitEngine(experiment, mesh, target.hardware)
        state: Any = engine.abstract_state()
        batch: Any = sharded_batch_shapes(experiment, mesh)
    except ValueError as error:
        raise UsageError(str(error)) from error
    weights, optimizer = bytes_per_device(state.params), bytes_per_device(state.optimizer)
    known: dict[str, Any] = dict(
        weights=weights,
        optimizer=0 if experiment.mesh.optimizer_placement == "host" else optimizer,
        other_state=bytes_per_device(state) - weights - optimizer,
        batch=bytes_per_device(batch),
    )
    begun = time.perf_counter()
    try:
        program = engine.lower_step(state, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_oom_error(error):
            raise
        return CompiledStep(
            **known,
            **parse_rejection(str(error), sum(known.values()), target.memory_bytes),
            compile_seconds=time.perf_counter() - begun,
        )
    seconds = time.perf_counter() - begun
    stats: Any = program.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    parts = stats.argument_size_in_bytes + results + stats.temp_size_in_bytes
    return CompiledStep(
        **known,
        arguments=stats.argument_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        results=results,
        peak=parts + stats.generated_code_size_in_bytes,
        find_collectives=find_collectives(program.as_text() or "", mesh),
        compile_seconds=seconds,
        engine=engine,
        program=program,
    )


def parse_rejection(message: str, arguments: int, available_bytes: int) -> dict[str, Any]:
    """What a compiler that refuses a step tells of its memory.

    Args:
      message: Its words. Of a TPU's all memory that is used; what its newer wording calls that of
        temporaries has the arguments in it.
      arguments: Bytes that the step is given.
      memory: Bytes that there are. It takes more than that, whatever else is known.
    """
    used = re.search(rf"Used {_SIZE}\s+of {_SIZE} hbm", message) or re.search(
        rf"HLO temporaries \({_SIZE}\) exceeds", message
    )
    peak = max(_bytes(used[1], used[2]) if used else arguments, available_bytes + 1)
    largest = re.findall(r"Size: ([\d.]+[KMGT]?)\s+Operator: op_name=\"([^\"]*)\"", message)
    return dict(
        arguments=arguments,
        temporaries=peak - arguments,
        results=0,
        peak=peak,
        collectives=(),
        refused="; ".join(f"{size} {operation}" for size, operation in largest[:3])
        or " ".join(message.split("HLO module:")[0].split()),
    )


_SIZE = r"([\d.]+)([KMGT]?)"


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * SIZE_UNITS[unit])
