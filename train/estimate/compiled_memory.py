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
from train.engine import JitEngine
from train.experiment import Experiment


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

    # A `pmap` step is measured as the `jit` step of the same mesh, which can be lowered.
    engine = make_engine(dataclasses.replace(experiment, compile="jit"), hardware)
    assert isinstance(engine, JitEngine)
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
