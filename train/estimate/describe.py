"""Sizes and costs of a model and of its training, computed before anything is allocated."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console, RenderableType

from train.assembly import make_task
from train.errors import UsageError
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.compile import CompiledStep, compile_step
from train.estimate.decoding import LARGE_BATCH, DecodingCost, count_decoding_variants
from train.estimate.memory import count_terms, estimate_memory
from train.estimate.quantities import Candidate, Quantities, StateShapes
from train.estimate.tables import format_bytes, format_count, memory_table, new_table
from train.estimate.target import local_target
from train.experiment import Experiment
from train.optim.adamw_8bit import AdamW8bit
from train.optim.optimizer_registry import OPTIMIZERS
from train.parallel.mesh import MeshConfig
from transformer import flops
from transformer.attention.full import AttentionConfig
from transformer.flops import AttentionTraffic, TokenFlops
from transformer.hardware import Hardware
from transformer.models.config import TransformerConfig
from transformer.parameter_counts import (
    ParameterCounts,
    count_parameters,
    estimate_parameters,
    layer_mixers,
)
from transformer.precision import Precision

SEQUENCE_LENGTHS = (128, 512, 2048, 8192, 32768)
"""Sequence lengths of the FLOPs table, in addition to the experiment's own length."""


TEXTBOOK_WEIGHT_BYTES = {"float32": 4, "bfloat16": 6}
"""Textbook bytes per parameter by precision policy: weights, with a 16-bit copy for `bfloat16`."""


TEXTBOOK_GRADIENT_BYTES = 4
"""Textbook bytes per parameter of a float32 gradient."""


TEXTBOOK_OPTIMIZER_BYTES = {"adamw": 8, "adamw8bit": 2, "sgd": 4}
"""Textbook bytes per parameter of optimizer state; SGD has momentum, 8-bit blocks have no scales.
"""


@dataclasses.dataclass(frozen=True)
class ActivationMemory:
    """Activations of one batch (or microbatch)."""

    bytes: int
    """Estimate for this model's rematerialization policy and attention backends."""
    textbook_elements: int
    """L B T (14 D + T N): every intermediate result of every layer, scores included."""
    textbook_bytes: int
    """The textbook's elements in the compute dtype."""
    sixteen_bit_bytes: int
    """L (34 B T D + 5 B N T^2): 16-bit training with dropout (Korthikanti et al. 2022, section
    4.1)."""


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training step by item, on one device that holds all of it."""

    weights: int
    """Weights as stored, vocabulary padding included."""
    compute_copy: int
    """Weights cast to the compute dtype; 0 if that is the storage dtype. The textbook counts them,
    the total does not: compilers cast a weight where it is used."""
    gradients: int
    """Gradients in float32; two copies while microbatches accumulate."""
    optimizer: int
    """Optimizer state, exactly as the optimizer initializes it."""
    activations: ActivationMemory
    """Estimate of the activations."""
    logits: int
    """Estimate of the float32 logits of one chunk of the loss."""
    textbook_logits: int
    """2 B T V elements in float32: logits of the whole batch and their gradient."""
    ema: int = 0
    """Exponential moving average of the weights in float32; 0 if none is stored."""

    @property
    def state(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.weights + self.gradients + self.optimizer + self.ema

    @property
    def working_set(self) -> int:
        """Bytes that depend on the batch."""
        return self.activations.bytes + self.logits

    @property
    def total(self) -> int:
        return self.state + self.working_set

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for `--json`."""
        return dataclasses.asdict(self) | {"total": self.total}


def training_memory(quantities: Quantities, states: StateShapes) -> TrainingMemory:
    """Return the memory of a step with a state, as `plan` estimates it for one device."""
    experiment = quantities.experiment
    precision, vocabulary = experiment.model.precision, experiment.model.vocab_size
    candidate = Candidate(MeshConfig(data=1), experiment.model.remat, experiment.grad_accum_steps)
    state = states.bytes_per_chip(candidate.mesh)
    terms = count_terms(quantities, candidate).estimated(quantities.hardware.platform)
    entries = sum(leaf.size for leaf in jax.tree.leaves((states.shapes.params, states.frozen)))
    itemsize = quantities.compute_itemsize
    rows = quantities.batch_size // experiment.grad_accum_steps
    targets = round(quantities.sequence_length * quantities.predicted_fraction)
    textbook, sixteen_bit = textbook_activations(experiment.model, rows, quantities.sequence_length)
    return TrainingMemory(
        weights=state.weights,
        compute_copy=0 if precision.compute == precision.parameters else entries * itemsize,
        gradients=int(terms.gradients),
        optimizer=state.optimizer,
        activations=ActivationMemory(
            bytes=int(terms.residuals + terms.layer + terms.gathered_layer),
            textbook_elements=textbook,
            textbook_bytes=itemsize * textbook,
            sixteen_bit_bytes=sixteen_bit,
        ),
        logits=int(terms.logits),
        textbook_logits=2 * 4 * rows * targets * vocabulary,
        ema=state.other,
    )


def textbook_activations(config: TransformerConfig, rows: int, length: int) -> tuple[int, int]:
    """Return the textbook's activations of `rows` sequences: elements, and bytes in 16 bits.

    Cross attention adds the attention share of a layer to its layer: 6 of 14 vectors of width D, 13
    of 34 bytes with dropout masks, and its scores.
    """
    tokens = rows * length
    elements, sixteen_bit = 0, 0
    for layer in layer_mixers(config):
        # A layer saves 6 vectors per token in attention and 8 in the feed-forward.
        vectors, sixteen = (6, 13) if layer.cross else (14, 34)
        heads = layer.mixer.num_heads if isinstance(layer.mixer, AttentionConfig) else 0
        elements += tokens * (vectors * config.d_model + length * heads)
        sixteen_bit += tokens * (sixteen * config.d_model + 5 * length * heads)
    return elements, sixteen_bit


class MemoryVariant(NamedTuple):
    """Training memory with one precision policy and one optimizer."""

    precision: str
    optimizer: str
    memory: TrainingMemory

    @property
    def textbook_bytes_per_parameter(self) -> tuple[int, int, int]:
        """Return textbook bytes per parameter of weights, gradients and optimizer state."""
        return (
            TEXTBOOK_WEIGHT_BYTES[self.precision],
            TEXTBOOK_GRADIENT_BYTES,
            TEXTBOOK_OPTIMIZER_BYTES[self.optimizer],
        )

    @property
    def state_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of weights, gradients and optimizer state."""
        return self.memory.weights, self.memory.gradients, self.memory.optimizer

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for `--json`."""
        weights, gradients, optimizer = self.textbook_bytes_per_parameter
        return {
            "precision": self.precision,
            "optimizer": self.optimizer,
            "textbook_bytes_per_parameter": {
                "weights": weights,
                "gradients": gradients,
                "optimizer": optimizer,
                "total": weights + gradients + optimizer,
            },
            "memory_bytes": self.memory.as_dict(),
        }


class EightBitStateBytes(NamedTuple):
    """State of 8-bit AdamW by component, in bytes."""

    codes: int
    """8-bit codes of both moments."""
    scales: int
    """One float32 scale per block of 256 elements, for each of the two moments."""
    unquantized: int
    """float32 moments of parameters with fewer than 4,096 elements per layer."""


def count_eight_bit_state(states: StateShapes) -> EightBitStateBytes:
    """Return the components of a state of 8-bit AdamW."""
    codes = scales = unquantized = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(states.shapes.optimizer):
        size = leaf.size * leaf.dtype.itemsize
        if leaf.dtype == jnp.uint8:
            codes += size
        elif any(getattr(entry, "name", "") == "scales" for entry in path):
            scales += size
        elif leaf.shape:
            unquantized += size
    return EightBitStateBytes(codes, scales, unquantized)


@dataclasses.dataclass(frozen=True)
class Description:
    """Sizes and costs of one model and of its training, each computed on first use."""

    quantities: Quantities
    """Counts of the experiment with resolved sizes, on the hardware that is described."""
    notes: tuple[str, ...] = ()
    """Assumptions that were made, and parts of the model that are not trained."""
    compiled: CompiledStep | None = None
    """The compiler's figures of the same step on the local devices; None unless asked for."""

    @property
    def experiment(self) -> Experiment:
        return self.quantities.experiment

    @property
    def config(self) -> TransformerConfig:
        return self.experiment.model

    @functools.cached_property
    def parameters(self) -> ParameterCounts:
        return count_parameters(self.quantities.model)

    @property
    def parameter_estimate(self) -> int:
        """Return the textbook estimate 12 L D^2 + V D."""
        return estimate_parameters(self.config)

    @property
    def trainable(self) -> int:
        """Return the parameters that are trained: fewer than in memory with LoRA.

        Weights of a new head (`lora.train_fully new`) are not counted, since they depend on the
        source of the weights.
        """
        params = self.quantities.state_shapes.shapes.params
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    @functools.cached_property
    def flops(self) -> tuple[TokenFlops, ...]:
        """Return FLOPs of a token's forward pass: at the experiment's own length, then others."""
        own, longest = self.quantities.sequence_length, self.config.max_length
        shown = (t for t in SEQUENCE_LENGTHS if t <= (longest or SEQUENCE_LENGTHS[-1]) and t != own)
        return tuple(
            flops.count_token_flops(
                self.quantities.model,
                length,
                self.quantities.predicted_fraction,
                self.quantities.lora,
            )
            for length in (own, *shown)
        )

    @functools.cached_property
    def training_flops(self) -> tuple[TokenFlops, ...]:
        """Return FLOPs to train on a token, forward and backward, at the same lengths."""
        return tuple(
            flops.count_training_flops(
                self.quantities.model,
                each.sequence_length,
                self.quantities.predicted_fraction,
                self.quantities.lora,
            )
            for each in self.flops
        )

    @property
    def training_flops_estimate(self) -> int:
        """Return the textbook estimate 6 N + 12 L D T, in FLOPs per training token."""
        length = self.quantities.sequence_length
        return flops.estimate_training_flops(self.config, self.parameters.active, length)

    @functools.cached_property
    def memory(self) -> TrainingMemory:
        return training_memory(self.quantities, self.quantities.state_shapes)

    @functools.cached_property
    def _states_by_optimizer(self) -> dict[str, StateShapes]:
        return {
            kind: StateShapes.from_experiment(
                dataclasses.replace(
                    _with_precision(self.experiment, Precision()), optimizer=OPTIMIZERS[kind]()
                )
            )
            for kind in TEXTBOOK_OPTIMIZER_BYTES
        }

    @functools.cached_property
    def memory_variants(self) -> tuple[MemoryVariant, ...]:
        """Return training memory for each precision and optimizer in the textbook's table."""
        variants = []
        for name in TEXTBOOK_WEIGHT_BYTES:
            precision, quantities = Precision.parse(name), self.quantities
            if precision != self.config.precision:
                other = _with_precision(self.experiment, precision)
                quantities = Quantities(other, quantities.hardware)
            variants += [
                MemoryVariant(name, kind, training_memory(quantities, states))
                for kind, states in self._states_by_optimizer.items()
            ]
        return tuple(variants)

    @property
    def eight_bit_state(self) -> EightBitStateBytes:
        """Return the state of 8-bit AdamW by component."""
        return count_eight_bit_state(self._states_by_optimizer[AdamW8bit().kind])

    @functools.cached_property
    def decoding_costs(self) -> tuple[DecodingCost, ...]:
        """Return the cost of one decoding step: this model first, then other key-value heads.

        Empty for models that do not decode from a cache or whose steps have no cost formula.
        """
        return count_decoding_variants(self.quantities.model, self.quantities.sequence_length)

    @property
    def attention_traffic(self) -> AttentionTraffic:
        return flops.attention_traffic(self.quantities.model, self.quantities.sequence_length)

    def as_dict(self) -> dict[str, Any]:
        """Return parameters, FLOPs per token and bytes as plain numbers for `--json`."""
        parameters = self.parameters
        return {
            "batch_size": self.quantities.batch_size,
            "sequence_length": self.quantities.sequence_length,
            "parameters": {
                "total": parameters.total,
                "padding": parameters.padding,
                "heads": parameters.task_heads,
                "active": parameters.active,
                "allocated": parameters.allocated,
                "parts": dict(parameters.by_part),
                "estimate": self.parameter_estimate,
                "trainable": self.trainable,
            },
            "flops_per_token": {
                "forward": _flops_as_dict(self.flops[0]),
                # Backward takes two products for each one forward: in the input and in the weight,
                # unless the weight is frozen.
                "training": _flops_as_dict(self.training_flops[0]),
                "training_estimate": self.training_flops_estimate,
                "forward_by_length": [_flops_as_dict(each) for each in self.flops],
            },
            "memory_bytes": self.memory.as_dict()
            | {"optimizer_kind": self.experiment.optimizer.kind},
            "memory_by_precision_and_optimizer": [each.as_dict() for each in self.memory_variants],
            "eight_bit_optimizer_bytes": self.eight_bit_state._asdict(),
            "compiler_bytes": self.compiled and self.compiled.as_dict(),
            "decoding": self._decoding_as_dict(),
            "attention_bytes_per_token": self.attention_traffic._asdict(),
            "notes": list(self.notes),
        }

    def _decoding_as_dict(self) -> dict[str, Any] | None:
        if not self.decoding_costs:
            return None
        own, *variants = (each.as_dict() for each in self.decoding_costs)
        return own | {"variants": variants}

    def print(self, console: Console | None = None) -> None:
        """Print tables to a console, by default standard output."""
        console, config = console or Console(highlight=False), self.config
        console.print(
            f"{config.num_layers} layers of width {config.d_model:,}, {config.vocab_size:,} "
            f"tokens, precision {config.precision.name}\n",
            style="bold",
        )
        for tables in (_parameter_table, _flops_table, _memory_tables, _decoding_table):
            for line in tables(self):
                console.print(line)
            console.print()
        for note in self.notes:
            console.print(f"Note: {note}.")


def _with_precision(experiment: Experiment, precision: Precision) -> Experiment:
    model = dataclasses.replace(experiment.model, precision=precision)
    return dataclasses.replace(experiment, model=model)


def _flops_as_dict(flops: TokenFlops) -> dict[str, Any]:
    return {
        "sequence_length": flops.sequence_length,
        "projections": flops.projections,
        "scores": flops.scores,
        "scores_causal": flops.scores_causal,
        "feed_forward": flops.feed_forward,
        "vocabulary": flops.vocabulary,
        "total": flops.total(causal=False),
        "total_causal": flops.total(causal=True),
        "uncounted": list(flops.uncounted),
    }


def describe(
    experiment: Experiment, hardware: Hardware | None = None, *, with_compiler: bool = False
) -> Description:
    """Describe an experiment without allocating its model.

    Data are read only if the vocabulary size or the number of labels depends on them.

    Args:
      experiment: The experiment; vocabulary size and number of labels may be left to its data.
      hardware: Hardware to run on, a CPU if None. It decides which attention backend is used.
      with_compiler: Compile the step for the local devices too, which `hardware` must describe.

    Raises:
      UserError: A size depends on data that cannot be read.
      UsageError: The model is invalid.
    """
    experiment, notes = resolve_sizes(experiment)
    task = make_task(experiment)
    if task.needs_base_weights:
        notes += ("a training step also has a forward pass of the reference, not counted here",)
    try:
        quantities = Quantities(experiment, hardware or Hardware())
        quantities.state_shapes.bytes_per_chip(MeshConfig(data=1))
    except ValueError as error:
        raise UsageError(str(error)) from error
    compiled = compile_step(experiment, local_target()) if with_compiler else None
    return Description(quantities, (*notes, *task.untrained_parts), compiled)


OPTIMIZER_NAMES = {"adamw": "AdamW", "adamw8bit": "8-bit AdamW", "sgd": "SGD"}
"""Names of optimizers for people."""


PART_TITLES = {"feed_forward": "feed-forward"}
"""Titles of parameter groups that differ from their names."""


def _parameter_table(description: Description) -> Iterable[RenderableType]:
    parameters, config = description.parameters, description.config
    table = new_table("Parameters", "part", "number", "share")
    for part, count in parameters.by_part.items():
        if count:
            table.add_row(
                PART_TITLES.get(part, part), f"{count:,}", f"{count / parameters.total:.1%}"
            )
    table.add_section()
    table.add_row("total", f"{parameters.total:,}", "", style="bold")
    table.add_row(f"padding of {config.padded_vocab_size:,} rows", f"{parameters.padding:,}")
    if description.trainable != parameters.allocated:
        fraction = f"{description.trainable / parameters.allocated:.2%}"
        table.add_row("trainable (LoRA)", f"{description.trainable:,}", fraction)
    if parameters.inactive:
        table.add_row("active per token, of all experts", f"{parameters.active:,}")
    if parameters.task_heads:
        table.add_row("task heads, not counted", f"{parameters.task_heads:,}")
    estimate = f"{description.parameter_estimate / parameters.total:.1%}"
    table.add_row("12 L D² + V D, for comparison", f"{description.parameter_estimate:,}", estimate)
    yield table


def _flops_table(description: Description) -> Iterable[RenderableType]:
    own, own_training = description.flops[0], description.training_flops[0]
    lengths = sorted(
        zip(description.flops, description.training_flops, strict=True),
        key=lambda each: each[0].sequence_length,
    )
    columns = ("projections", "scores", "causal", "feed-\nforward", "logits", "total", "training")
    table = new_table("FLOPs per token, forward", "T", *columns)
    for each, training in lengths:
        counts = (
            each.projections,
            each.scores,
            each.scores_causal,
            each.feed_forward,
            each.vocabulary,
            each.total(causal=False),
            training.total(causal=False),
        )
        style = "bold" if each is own else None
        table.add_row(f"{each.sequence_length:,}", *map(format_count, counts), style=style)
    yield table
    frozen = own_training.total(causal=False) != 3 * own.total(causal=False)
    origin = (
        "forward and backward, without gradients of frozen weights"
        if frozen
        else "three times forward"
    )
    yield (
        "[dim]Scores count all keys of each query's pattern, T with full attention; causal scores "
        "count the keys that a causal mask leaves, (T + 1) / 2 on average. Totals use the former. "
        f"Training is {origin}: with causal "
        f"scores {format_count(own_training.total(causal=True))} at T = {own.sequence_length:,}; "
        f"by 6 N + 12 L D T, {format_count(description.training_flops_estimate)}.[/dim]"
    )
    fraction = description.parameters.by_part["feed_forward"] / description.parameters.total
    yield (
        f"[dim]Feed-forward has {fraction:.0%} of the parameters and "
        f"{own.feed_forward_fraction():.0%} of the layers' FLOPs at "
        f"T = {own.sequence_length:,}.[/dim]"
    )
    if own.uncounted:
        yield f"[dim]Not counted: the scores of {', '.join(own.uncounted)}.[/dim]"


def _memory_tables(description: Description) -> Iterable[RenderableType]:
    """Yield tables by item, by precision and optimizer, and of the compiler's figures."""
    memory, config = description.memory, description.config
    activations = memory.activations
    b, t = description.quantities.batch_shape
    table = new_table(f"Training memory, {b:,} × {t:,} tokens per step", "what", "size")
    rows = {
        f"weights ({config.precision.parameters})": memory.weights,
        "gradients (float32)": memory.gradients,
        f"optimizer ({description.experiment.optimizer.kind})": memory.optimizer,
        "EMA of the weights (float32)": memory.ema,
        f"activations, estimated (remat {config.remat})": activations.bytes,
        "logits of one chunk, estimated": memory.logits,
    }
    for name, size in rows.items():
        if size:
            table.add_row(name, format_bytes(size))
    table.add_section()
    table.add_row("total over all devices", format_bytes(memory.total), style="bold")
    yield table
    yield (
        f"[dim]Textbook activations, L·B·T·(14 D + T N): {activations.textbook_elements:,} elements"
        f", {format_bytes(activations.textbook_bytes)} in {config.precision.compute}; in 16 bits, "
        f"L·(34 B·T·D + 5 B·N·T²): {format_bytes(activations.sixteen_bit_bytes)}. Logits of the "
        f"whole batch, 2 B·T·V in float32: {format_bytes(memory.textbook_logits)}. Weights alone, "
        f"for inference: {format_bytes(memory.weights)}.[/dim]"
    )
    yield ""
    yield from _variants_table(description)
    yield ""
    if description.compiled is None:
        yield (
            "[dim]Add --ask-compiler for the compiler's figures of the same step. It takes as long "
            "as the compilation before training.[/dim]"
        )
        return
    devices = description.quantities.hardware.count
    candidate = Candidate.from_experiment(description.experiment, devices)
    estimate = estimate_memory(description.quantities, candidate)
    where = "the device" if devices == 1 else f"one device of {devices}"
    yield memory_table(f"Memory of {where}", estimate, description.compiled)


def _variants_table(description: Description) -> Iterable[RenderableType]:
    columns = ("textbook", "here", "in all", "activations\nand logits", "total")
    title = "Bytes per parameter (weights + gradients + optimizer), and totals"
    table = new_table(title, "optimizer", *columns)
    count = description.parameters.allocated
    precision = ""
    for each in description.memory_variants:
        if each.precision != precision:
            precision = each.precision
            table.add_section()
            table.add_row(precision, style="italic")
        state, working_set = sum(each.state_bytes), each.memory.working_set
        table.add_row(
            OPTIMIZER_NAMES[each.optimizer],
            _sum(each.textbook_bytes_per_parameter),
            _sum(tuple(size / count for size in each.state_bytes)),
            format_bytes(state),
            format_bytes(working_set),
            format_bytes(state + working_set),
        )
    yield table
    eight = description.eight_bit_state
    yield (
        "[dim]bfloat16 stores float32 weights; the textbook adds a bfloat16 copy, which compilers "
        "make of a weight where it is used. SGD has momentum. 8-bit AdamW "
        f"takes {eight.codes / count:.3g} bytes per parameter for codes, "
        f"{eight.scales / count:.2g} for a scale per block of 256 elements and moment, and "
        f"{eight.unquantized / count:.2g} for float32 moments of parameters with fewer than 4,096 "
        "elements per layer.[/dim]"
    )
    if description.memory.gradients > 4 * count:
        yield "[dim]Gradients take twice the memory while microbatches accumulate.[/dim]"


def _sum(parts: tuple[float, ...]) -> str:
    """Format addends and their sum, for example `4+4+8=16`."""
    terms = [f"{part:.2f}".rstrip("0").rstrip(".") for part in (*parts, sum(parts))]
    return f"{'+'.join(terms[:-1])}={terms[-1]}"


def _decoding_table(description: Description) -> Iterable[RenderableType]:
    if not description.decoding_costs:
        return
    own = description.decoding_costs[0]
    large = f"per byte,\nbatch {LARGE_BATCH}"
    columns = ("cache,\nper token", "cache", "weights", "FLOPs", "per byte", large)
    after = f"Decoding after {own.context_length:,} tokens"
    if own.source_length:
        after += f", from a source of {own.source_length:,}"
    table = new_table(after, "key-value\nheads", *columns)
    for each in sorted(
        description.decoding_costs, key=lambda each: each.num_kv_heads, reverse=True
    ):
        table.add_row(
            ", ".join(map(str, each.num_kv_heads)) or "none",
            format_bytes(each.cache_bytes_per_token),
            format_bytes(each.cache_bytes),
            format_bytes(each.weight_bytes),
            format_count(each.flops),
            f"{each.arithmetic_intensity():.2f}",
            f"{each.arithmetic_intensity(LARGE_BATCH):.2f}",
            style="bold" if each is own else None,
        )
    yield table
    if own.source_length:
        heads = (
            " Key-value heads: self attention, then cross attention." if own.num_kv_heads else ""
        )
        yield (
            "[dim]The cache holds the generated tokens and the source, which takes "
            f"{format_bytes(own.cache_bytes_per_source_token)} per source token. Weights and FLOPs "
            "are those of one step: the decoder without the work done once per source, the output "
            f"table, and one row of each lookup table.{heads}[/dim]"
        )
    traffic = description.attention_traffic
    if traffic.plain:
        yield (
            f"[dim]Attention of a forward pass moves {format_bytes(traffic.plain)} per token with "
            "materialized scores (scores and weights written and read), "
            f"{format_bytes(traffic.flash)} in a flash kernel.[/dim]"
        )
