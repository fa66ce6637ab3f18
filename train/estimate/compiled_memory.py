"""Memory of a training step as the compiler reports it, next to the described items."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from train.estimate.training_memory import TrainingMemory
from train.experiment import Experiment
from train.jit_engine import JitEngine

if TYPE_CHECKING:
    from transformer.hardware import Hardware


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
    experiment: "Experiment", memory: TrainingMemory, hardware: "Hardware"
) -> CompiledMemory:
    """Compile the step of an experiment with known sizes for the local devices.

    This takes as long as the compilation before training. Nothing is allocated.
    """
    from train.engine import make_engine
    from train.estimate.batch_shapes import sharded_batch_shapes
    from train.jit_engine import JitEngine
    from train.parallel.sharding import num_shards
    from train.runtime.oom import explain_oom, suggest_remedies

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
    import jax

    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def trace_residual_bytes(engine: "JitEngine", batch: Any, grad_accum_steps: int) -> tuple[int, int]:
    """Return the residual bytes of a microbatch: those that grow with it, and the others."""
    single, double = (_residual_bytes(engine, batch, times / grad_accum_steps) for times in (1, 2))
    return double - single, 2 * single - double


def _residual_bytes(engine: "JitEngine", batch: Any, fraction: float) -> int:
    """Return the residual bytes of the forward pass of a fraction of a batch.

    Each array counts once. The weights themselves do not count.
    """
    import jax

    from train.step import example_rngs, total_loss

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
