"""What the estimates count and trace of an experiment, once for all candidates of a plan.

The bytes of the state on one chip are exact, for any mesh. Residuals (arrays saved for the backward
pass) come from tracing the real loss and are classified by shape: arrays whose last axis is the
model width are replicated over the `tensor` axis, the others (heads, hidden units, scores) are
sharded by it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from train.assembly import make_task
from train.engines.lora import make_lora_layout
from train.estimate.batch_shapes import max_batch_shape, unsharded_batch_shapes
from train.experiment import Experiment
from train.optim.muon import Muon, muon_dimension_numbers
from train.optim.optimizer_registry import make_step_optimizer
from train.parallel.mesh import MESH_AXES, MeshConfig
from train.parallel.sharding import (
    optimizer_state_shardings,
    parameter_shardings,
    replicated_sharding,
)
from train.state import TrainState, init_state
from transformer.flops import TokenFlops, count_token_flops, count_training_flops
from transformer.hardware import Hardware
from transformer.lora import LoRALayout
from transformer.model_context import unconstrained
from transformer.models.model import Model
from transformer.models.stack import RematPolicy
from transformer.parameter_counts import ParameterLeaf, abstract_parameters, layer_mixers
from transformer.quantization import axes_of_quantized, quantize_weights


class Candidate(NamedTuple):
    """Settings that can change without changing what the model learns."""

    mesh: MeshConfig
    remat: RematPolicy
    grad_accum_steps: int

    @classmethod
    def from_experiment(cls, experiment: Experiment, devices: int) -> "Candidate":
        """Return the experiment's own settings, with -1 in its mesh resolved."""
        sizes: Any = experiment.mesh.axis_sizes(devices)
        mesh = dataclasses.replace(experiment.mesh, **sizes)
        return cls(mesh, experiment.model.remat, experiment.grad_accum_steps)

    def apply_to(self, experiment: Experiment) -> Experiment:
        """Return the experiment with these settings."""
        model = dataclasses.replace(experiment.model, remat=self.remat)
        return dataclasses.replace(
            experiment, model=model, mesh=self.mesh, grad_accum_steps=self.grad_accum_steps
        )

    def flags(self) -> str:
        """Return the flags of `fit` for these settings."""
        sizes = mesh_sizes(self.mesh)
        parts = [f"--mesh.{name} {size}" for name, size in sizes.items() if size > 1]
        if self.mesh.data == 1:  # by default it takes all devices
            parts.insert(0, "--mesh.data 1")
        if self.mesh.optimizer_placement != "device":
            parts.append(f"--mesh.optimizer-placement {self.mesh.optimizer_placement}")
        return " ".join(
            [*parts, f"--grad-accum-steps {self.grad_accum_steps}", f"--model.remat {self.remat}"]
        )

    def mesh_text(self) -> str:
        """Return the mesh for people, for example `fsdp 128 x tensor 8`."""
        sizes = mesh_sizes(self.mesh)
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return " x ".join(parts) or "one chip"


def mesh_sizes(mesh: MeshConfig) -> dict[str, int]:
    """Return the size of each mesh axis."""
    return {axis: getattr(mesh, axis) for axis in MESH_AXES}


class StateBytes(NamedTuple):
    """Bytes of one chip."""

    weights: int
    optimizer: int
    other: int
    """The exponential moving average of the weights."""
    gradients: int
    """Gradients in float32."""


class StateShapes(NamedTuple):
    """Training state as shapes, with the logical axes of its parameters."""

    shapes: TrainState
    axes: Any
    frozen: Any = None
    """Shapes of the weights that a LoRA run does not train."""
    frozen_axes: Any = None

    @classmethod
    def from_experiment(cls, experiment: Experiment) -> "StateShapes":
        """Return the state's shapes by abstract evaluation of its initialization."""
        # The state is the same on any hardware, with any rematerialization and loop over layers.
        # Trace the plain form: kernels trace only on their own hardware, `offload` needs a host
        # memory space, and a scan traces a layer once.
        plain = dataclasses.replace(experiment.model, remat="none", layer_loop="scan")
        task = make_task(dataclasses.replace(experiment, model=plain))
        model = task.make_model(Hardware(), unconstrained)
        axes, frozen, frozen_axes = abstract_parameters(model).axes, None, None
        lora = make_lora_layout(experiment.lora, axes)
        if lora is not None:
            shapes, kind = abstract_parameters(model).shapes, experiment.lora.quantize
            frozen = lora.freeze(quantize_weights(shapes, axes, kind, keep=lora.trained))
            frozen_axes = axes_of_quantized(lora.frozen_axes(), frozen)
            axes = lora.trainable_axes()
        init = functools.partial(
            init_state,
            experiment.seed,
            model,
            make_step_optimizer(experiment.optimizer, axes, experiment.mesh.optimizer_placement),
            loss_scale=experiment.loss_scale,
            ema=experiment.ema,
            recovery=experiment.recovery,
            lora=lora,
        )
        return cls(jax.eval_shape(init), axes, frozen, frozen_axes)

    def bytes_per_chip(self, mesh: MeshConfig) -> StateBytes:
        """Return one chip's part. Raises UsageError for a mesh that does not divide the model."""
        abstract: Any = AbstractMesh(tuple(getattr(mesh, name) for name in MESH_AXES), MESH_AXES)
        shapes = self.shapes
        params = parameter_shardings(abstract, self.axes, shapes.params)
        replicated = replicated_sharding(abstract)
        optimizer = optimizer_state_shardings(shapes.optimizer, shapes.params, params, replicated)
        weights = _shard_bytes(shapes.params, params)
        if self.frozen is not None:
            shardings = parameter_shardings(abstract, self.frozen_axes, self.frozen)
            weights += _shard_bytes(self.frozen, shardings)
        gradients = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), shapes.params
        )
        return StateBytes(
            weights,
            optimizer=_shard_bytes(shapes.optimizer, optimizer),
            other=0 if shapes.ema is None else _shard_bytes(shapes.ema, params),
            gradients=_shard_bytes(gradients, params),
        )


def _shard_bytes(shapes: Any, shardings: Any) -> int:
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in leaves)


class Residuals(NamedTuple):
    """Bytes saved for the backward pass."""

    replicated_per_row: int
    """Bytes per example that `tensor` does not shard."""
    sharded_per_row: int
    """Bytes per example that `tensor` shards."""

    def bytes_per_chip(self, rows: float, tensor: int) -> float:
        """Return the residuals of a chip for its rows of a microbatch."""
        return rows * (self.replicated_per_row + self.sharded_per_row / tensor)


def trace_residuals(experiment: Experiment, hardware: Hardware, remat: RematPolicy) -> Residuals:
    """Trace the residuals of the experiment's model under another rematerialization policy.

    Two traces, with one and two rows, separate what grows with the batch from what does not.
    """
    model = dataclasses.replace(experiment.model, remat=remat)
    experiment = dataclasses.replace(experiment, model=model)
    # Rows are those of one device, and the model is not laid out on a mesh. `blockwise` in place of
    # a kernel saves one array of the size of its outputs more.
    hardware = dataclasses.replace(hardware, is_attached=False, count=1)
    one_row, two_rows = (_residual_arrays(experiment, hardware, rows) for rows in (1, 2))
    replicated = sharded = 0
    for one, two in zip(one_row, two_rows, strict=True):
        growth = _array_bytes(two) - _array_bytes(one)
        if one.shape and one.shape[-1] == model.d_model:
            replicated += growth
        else:
            sharded += growth
    return Residuals(replicated, sharded)


def _residual_arrays(experiment: Experiment, hardware: Hardware, rows: int) -> list[Any]:
    """Return the arrays that the backward pass of `rows` examples reads, without the weights."""
    task = make_task(experiment)
    model = task.make_model(hardware, unconstrained)
    loss = task.make_loss_fn(model)
    batch = unsharded_batch_shapes(experiment, rows)

    def pull(params: Any, batch: Any) -> Any:
        keys = jax.vmap(jax.random.key)(batch["examples"])
        return jax.vjp(lambda params: loss(params, batch, keys)["loss"].total, params)[1]

    # The vjp function is a pytree of residuals: the outputs of this program are exactly what the
    # backward pass reads. An output that is also an input is a weight or a part of the batch.
    program = jax.make_jaxpr(pull)(abstract_parameters(model).shapes, batch).jaxpr
    input_ids = {id(variable) for variable in program.invars}
    residuals = {id(variable): variable.aval for variable in program.outvars}
    return [aval for name, aval in residuals.items() if name not in input_ids]


def _array_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * int(aval.dtype.itemsize)


@dataclasses.dataclass(frozen=True, eq=False)
class Quantities:
    """Counts of an experiment with known sizes on some hardware, each computed on first use."""

    experiment: Experiment
    hardware: Hardware

    @functools.cached_property
    def model(self) -> Model:
        """Return the model on one device of the hardware."""
        return make_task(self.experiment).make_model(self.hardware, unconstrained)

    @functools.cached_property
    def batch_shape(self) -> tuple[int, int]:
        """Return the largest batch: (examples, tokens of an example)."""
        return max_batch_shape(self.experiment)

    @property
    def batch_size(self) -> int:
        """Return the examples of a batch, over all microbatches."""
        return self.batch_shape[0]

    @property
    def sequence_length(self) -> int:
        """Return the tokens of an example, T."""
        return self.batch_shape[1]

    def rows_per_chip(self, mesh: MeshConfig) -> float:
        """Return a chip's examples of a batch; `context` leaves it a part of each."""
        return self.batch_size / (mesh.data * mesh.fsdp * mesh.expert * mesh.context)

    @property
    def sequences_per_example(self) -> int:
        """Return the sequences of T tokens per example: 2 for an encoder-decoder."""
        return 2 if self.experiment.model.encoder is not None else 1

    @property
    def num_layers(self) -> int:
        """Return the number of layers, encoder and decoder together."""
        config = self.experiment.model
        return config.num_layers + (config.encoder.num_layers if config.encoder is not None else 0)

    @property
    def compute_itemsize(self) -> int:
        """Return the bytes of an element in the compute dtype."""
        return jnp.dtype(self.experiment.model.precision.compute).itemsize

    @functools.cached_property
    def predicted_fraction(self) -> float:
        """Return the fraction of tokens that have a prediction target."""
        fraction = make_task(self.experiment).target_fraction
        return self.model.predicted_fraction if fraction is None else fraction

    @functools.cached_property
    def _leaves(self) -> list[ParameterLeaf]:
        return list(abstract_parameters(self.model).leaves())

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of all layers, all experts included."""
        return sum(leaf.size for leaf in self._leaves if _in_layers(leaf))

    @property
    def other_parameters(self) -> int:
        """Return the parameters outside the layers: embedding, output and the like."""
        return sum(leaf.size for leaf in self._leaves if not _in_layers(leaf))

    @property
    def largest_layer_parameters(self) -> int:
        """Return the parameters of the largest layer."""
        # Each place of the layer pattern is a stack of equal layers: [layers, ...].
        places: dict[tuple[str, ...], int] = {}
        for leaf in filter(_in_layers, self._leaves):
            side = leaf.path[: len(leaf.path) - len(leaf.path_in_side) + 2]
            places[side] = places.get(side, 0) + leaf.size // leaf.shape[0]
        return max(places.values(), default=0)

    @functools.cached_property
    def lora(self) -> LoRALayout | None:
        """Return the layout of a LoRA run's trainable weights; None without LoRA."""
        return make_lora_layout(self.experiment.lora, abstract_parameters(self.model).axes)

    @functools.cached_property
    def token_flops(self) -> TokenFlops:
        """Return the FLOPs of one token's forward pass."""
        length, fraction = self.sequence_length, self.predicted_fraction
        return count_token_flops(self.model, length, fraction, self.lora)

    @functools.cached_property
    def training_flops(self) -> TokenFlops:
        """Return the FLOPs of one token's forward and backward pass, and its reference pass."""
        length, fraction = self.sequence_length, self.predicted_fraction
        flops = count_training_flops(self.model, length, fraction, self.lora)
        if make_task(self.experiment).needs_base_weights:
            flops = flops.plus(count_token_flops(self.model, length, fraction))
        return flops

    @functools.cached_property
    def optimizer_flops(self) -> float:
        """Return the FLOPs of the optimizer's own matmuls in one step; only Muon has any."""
        optimizer = self.experiment.optimizer
        if not isinstance(optimizer, Muon):
            return 0.0
        once = sum(
            _newton_schulz_flops(leaf)
            for leaf in self._leaves
            if muon_dimension_numbers(leaf.axes) is not None
        )
        return float(optimizer.ns_steps * once)

    @functools.cached_property
    def computes_all_scores(self) -> bool:
        """Return True if some layer's attention writes all T x S scores to memory."""
        experiment = self.experiment
        choices = (
            layer.backend_choice(
                experiment.model,
                self.sequence_length,
                hardware=self.hardware,
                segments=experiment.has_segments,
            )
            for layer in layer_mixers(experiment.model)
        )
        return any(choice is not None and choice.backend == "reference" for choice in choices)

    @functools.cached_property
    def state_shapes(self) -> StateShapes:
        """Return the training state as shapes."""
        return StateShapes.from_experiment(self.experiment)

    # Caches live on the instance: `functools.cache` on a method would keep every instance alive.

    @functools.cached_property
    def state_bytes(self) -> Callable[[MeshConfig], StateBytes]:
        """Return the function from a mesh to a chip's part of the state.

        It raises UsageError for a mesh that does not divide the model.
        """
        return functools.cache(self.state_shapes.bytes_per_chip)

    @functools.cached_property
    def residuals(self) -> Callable[[RematPolicy], Residuals]:
        """Return the function from a rematerialization policy to the residuals."""
        return functools.cache(functools.partial(trace_residuals, self.experiment, self.hardware))


def _in_layers(leaf: ParameterLeaf) -> bool:
    return leaf.path_in_side[0] == "layers"


def _newton_schulz_flops(leaf: ParameterLeaf) -> int:
    """Return the FLOPs of one Newton-Schulz iteration for a stack of m x n matrices, m <= n.

    The iteration is A = X X', B = b A + c A A, X <- a X + B X (Jordan et al. 2024).
    """
    stack = math.prod(leaf.shape[: len(leaf.axes.stack)])
    m, n = sorted((leaf.fan_in, leaf.size // stack // leaf.fan_in))
    return stack * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
