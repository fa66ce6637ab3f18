"""Compile the real training step, for a target with its own compiler or for the local devices.

The compiler's report tells the memory of the step, next to the items that `describe` estimates.
"""

import dataclasses
import math
import re
import time
from typing import Any

import jax

from train.assembly import make_engine, make_engine_on
from train.engines.jit_engine import JitEngine
from train.errors import UsageError
from train.estimate.batch_shapes import sharded_batch_shapes
from train.estimate.hlo import Collective, find_collectives
from train.estimate.target import Target, target_devices
from train.estimate.training_memory import TrainingMemory
from train.experiment import Experiment
from train.parallel.mesh import make_mesh
from train.parallel.sharding import num_shards
from train.runtime.oom import explain_oom, is_oom_error, suggest_remedies
from train.step import example_rngs, total_loss
from transformer.hardware import Hardware

SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step; sizes are bytes of one chip."""

    weights: int
    optimizer: int
    """Optimizer state on the chip; 0 if it is placed in host memory."""
    other_state: int
    """Exponential moving average of the weights, counters and random keys."""
    batch: int
    arguments: int
    """Arguments of the step in the compiler's layout."""
    temporaries: int
    results: int
    """Outputs that do not reuse donated arguments."""
    peak: int
    """Peak memory of the step."""
    collectives: tuple[Collective, ...]
    compile_seconds: float
    """Duration of the compilation."""
    rejection: str = ""
    """Reason of a compiler that rejects the step as too large: its largest arrays, or its message.
    Sizes are then lower bounds. Empty for a step that compiled."""
    engine: Any = None
    """Engine that made the step."""
    program: Any = None
    """Executable program; runs only on local devices."""

    def without_program(self) -> "CompiledStep":
        """Return the same figures without fields that only this process can use."""
        return dataclasses.replace(self, engine=None, program=None)

    def fits(self, available_bytes: int) -> bool:
        """Return True if the step compiled and its peak is within the available bytes."""
        return not self.rejection and self.peak <= available_bytes


def compile_step(experiment: Experiment, target: Target) -> CompiledStep:
    """Compile the step of an experiment whose sizes are resolved. Nothing is allocated.

    Raises:
      UserError: The target's compiler is not installed.
      UsageError: The mesh does not divide the model or the batch.
    """
    mesh = make_mesh(experiment.mesh, target_devices(target))
    try:
        engine = make_engine_on(mesh, experiment, target.hardware, JitEngine)
        state: Any = engine.abstract_state()
        batch: Any = sharded_batch_shapes(experiment, mesh)
    except ValueError as error:
        raise UsageError(str(error)) from error
    frozen = bytes_per_device(engine.abstract_frozen())
    weights, optimizer = bytes_per_device(state.params), bytes_per_device(state.optimizer)
    sizes: dict[str, Any] = dict(
        weights=weights + frozen,
        optimizer=0 if experiment.mesh.optimizer_placement == "host" else optimizer,
        other_state=bytes_per_device(state) - weights - optimizer,
        batch=bytes_per_device(batch),
    )
    start = time.perf_counter()
    try:
        program = engine.lower_step(state, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_oom_error(error):
            raise
        return CompiledStep(
            **sizes,
            **parse_rejection(str(error), sum(sizes.values()), target.memory_bytes),
            compile_seconds=time.perf_counter() - start,
        )
    seconds = time.perf_counter() - start
    stats: Any = program.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    total = stats.argument_size_in_bytes + results + stats.temp_size_in_bytes
    return CompiledStep(
        **sizes,
        arguments=stats.argument_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        results=results,
        peak=total + stats.generated_code_size_in_bytes,
        collectives=find_collectives(program.as_text() or "", mesh),
        compile_seconds=seconds,
        engine=engine,
        program=program,
    )


def parse_rejection(message: str, arguments: int, available_bytes: int) -> dict[str, Any]:
    """Return the sizes that a compiler reports for a step that it rejects as too large.

    Args:
      message: The compiler's message. TPU compilers report all memory in use; newer ones call it
        temporaries, arguments included.
      arguments: Bytes of the step's arguments.
      available_bytes: Bytes of the chip. The step needs more than that.
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
        rejection="; ".join(f"{size} {operation}" for size, operation in largest[:3])
        or " ".join(message.split("HLO module:")[0].split()),
    )


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * SIZE_UNITS[unit])


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """Bytes of one device."""

    devices: int
    """Number of devices."""
    state: int
    """Weights, moments and counters, from their shapes."""
    batch: int
    arguments: int
    """Arguments of the compiled step: state and batch, without fields that the step does not read.
    """
    donated: int
    """Outputs that reuse the memory of donated arguments."""
    results: int
    """Outputs with memory of their own."""
    temporaries: int
    """Scratch memory that the compiler reserves; the fields below describe it."""
    compute_copy: int
    gradients: int
    activations: int
    logits: int
    residual_activations: int
    """Residuals of the forward pass that grow with the batch, from tracing its vjp. The compiler
    may recompute some of them instead."""
    residual_weights: int
    """Residuals that do not grow with the batch: weights cast or sliced from stacks, and the
    gradient of the output matrix, which the loss computes in its forward pass."""

    @property
    def estimated_temporaries(self) -> int:
        """Return the temporaries as `describe` estimates them."""
        return self.compute_copy + self.gradients + self.activations + self.logits

    @property
    def traced_temporaries(self) -> int:
        """Return the temporaries with traced residuals in place of the estimate."""
        return self.residual_weights + self.gradients + self.residual_activations + self.logits


def compile_for_memory(
    experiment: Experiment, memory: TrainingMemory, hardware: Hardware
) -> CompiledMemory:
    """Compile the step of an experiment with known sizes for the local devices.

    This takes as long as the compilation before training. Nothing is allocated.
    """
    # A `pmap` step is measured as the `jit` step of the same mesh, which can be lowered.
    engine = make_engine(dataclasses.replace(experiment, compile="jit"), hardware)
    assert isinstance(engine, JitEngine)
    state: Any = engine.abstract_state()
    batch: Any = sharded_batch_shapes(experiment, engine.mesh)
    with explain_oom(lambda: suggest_remedies(experiment)):
        stats: Any = engine.lower_step(state, batch).compile().memory_analysis()
    shards = num_shards(engine.mesh, "batch") * num_shards(engine.mesh, "length")
    # Activations grow with the microbatch; a part that does not grow is weights in another form.
    residual_activations, residual_weights = trace_residual_bytes(
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
        residual_activations=residual_activations // shards,
        residual_weights=residual_weights,
    )


def bytes_per_device(tree: Any) -> int:
    """Return the bytes that one device stores of a tree of sharded arrays."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def trace_residual_bytes(engine: JitEngine, batch: Any, grad_accum_steps: int) -> tuple[int, int]:
    """Return the residual bytes of a microbatch: those that grow with it, and the others."""
    single, double = (_residual_bytes(engine, batch, times / grad_accum_steps) for times in (1, 2))
    return double - single, 2 * single - double


def _residual_bytes(engine: JitEngine, batch: Any, fraction: float) -> int:
    """Return the residual bytes of the forward pass of a fraction of a batch.

    Each array counts once. The weights themselves do not count.
    """

    def make_vjp(state: Any, rows: Any) -> Any:
        rngs = example_rngs(state, rows)
        loss = lambda params: total_loss(engine.train_step.loss_fn(params, rows, rngs))  # noqa: E731
        return jax.vjp(loss, state.params)[1]

    rows = {
        name: jax.ShapeDtypeStruct((round(leaf.shape[0] * fraction), *leaf.shape[1:]), leaf.dtype)
        for name, leaf in batch.items()
    }
    program = jax.make_jaxpr(make_vjp)(engine.abstract_state(), rows).jaxpr
    # The vjp function is a pytree of residuals: the outputs of this program are exactly what the
    # backward pass reads. An output that is also an input is a weight or a part of the batch.
    inputs = {id(variable) for variable in program.invars}
    residuals = {id(variable): variable.aval for variable in program.outvars}
    avals: Any = [aval for name, aval in residuals.items() if name not in inputs]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)
