"""Sizes and costs of a model and of its training, computed before anything is allocated."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

import jax
from rich.console import Console, RenderableType

from train.assembly import make_task
from train.errors import UsageError
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.compile import CompiledStep, compile_step
from train.estimate.decoding import LARGE_BATCH, DecodingCost, count_decoding_variants
from train.estimate.memory import Memory, estimate_memory
from train.estimate.quantities import Candidate, Quantities, StateShapes
from train.estimate.tables import format_bytes, format_count, memory_table, new_table
from train.estimate.target import local_target
from train.experiment import Experiment
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
    weight_bytes,
)
from transformer.precision import Precision
from transformer.quantization import Quantization

SEQUENCE_LENGTHS = (128, 512, 2048, 8192, 32768)
"""Sequence lengths of the FLOPs table, in addition to the experiment's own length."""


TEXTBOOK_WEIGHT_BYTES = {"float32": 4, "bfloat16": 6}
"""Textbook bytes per parameter by precision policy: weights, with a 16-bit copy for `bfloat16`."""


TEXTBOOK_GRADIENT_BYTES = 4
"""Textbook bytes per parameter of a float32 gradient."""


TEXTBOOK_OPTIMIZER_BYTES = {"adamw": 8, "adamw8bit": 2, "sgd": 4}
"""Textbook bytes per parameter of optimizer state; SGD has momentum, 8-bit blocks have no scales.
"""


class TextbookActivations(NamedTuple):
    """What a batch (or microbatch) would save if every intermediate result were kept."""

    elements: int
    """L B T (14 D + T N): every intermediate result of every layer, scores included."""
    bytes: int
    """The elements in the compute dtype."""
    sixteen_bit_bytes: int
    """L (34 B T D + 5 B N T^2): 16-bit training with dropout (Korthikanti et al. 2022, section
    4.1)."""
    logits_bytes: int
    """2 B T V elements in float32: logits of the whole batch and their gradient."""


def textbook_activations(quantities: Quantities) -> TextbookActivations:
    """Return the textbook's activations.

    Cross attention adds the attention share of a layer to its layer: 6 of 14 vectors of width D, 13
    of 34 bytes with dropout masks, and its scores.
    """
    config, length = quantities.experiment.model, quantities.sequence_length
    rows = quantities.batch_size // quantities.experiment.grad_accum_steps
    tokens = rows * length
    elements = sixteen_bit = 0
    for layer in layer_mixers(config):
        # A layer saves 6 vectors per token in attention and 8 in the feed-forward.
        vectors, sixteen = (6, 13) if layer.cross else (14, 34)
        heads = layer.mixer.num_heads if isinstance(layer.mixer, AttentionConfig) else 0
        elements += tokens * (vectors * config.d_model + length * heads)
        sixteen_bit += tokens * (sixteen * config.d_model + 5 * length * heads)
    targets = rows * round(length * quantities.predicted_fraction)
    logits = 2 * 4 * targets * config.vocab_size
    return TextbookActivations(
        elements, quantities.compute_itemsize * elements, sixteen_bit, logits
    )


class OptimizerState(NamedTuple):
    """Bytes of weights, gradients and optimizer state in float32 with one optimizer."""

    optimizer: str
    weights: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer_state

    def textbook(self, precision: str) -> tuple[int, int, int]:
        """Return the textbook's bytes per parameter: weights, gradients, optimizer state."""
        return (
            TEXTBOOK_WEIGHT_BYTES[precision],
            TEXTBOOK_GRADIENT_BYTES,
            TEXTBOOK_OPTIMIZER_BYTES[self.optimizer],
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for `--json`."""
        textbook = {name: sum(self.textbook(name)) for name in TEXTBOOK_WEIGHT_BYTES}
        return {
            **self._asdict(),
            "total": self.total,
            "textbook_bytes_per_parameter": textbook,
        }


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
    def memory(self) -> Memory:
        """Return the memory of a step on one device that holds all of it."""
        whole = Candidate(MeshConfig(data=1), self.config.remat, self.experiment.grad_accum_steps)
        return estimate_memory(self.quantities, whole)

    @property
    def textbook(self) -> TextbookActivations:
        return textbook_activations(self.quantities)

    @functools.cached_property
    def optimizer_states(self) -> tuple[OptimizerState, ...]:
        """Return the state with each optimizer of the textbook's table, in float32."""
        model = dataclasses.replace(self.config, precision=Precision())
        states = []
        for kind in TEXTBOOK_OPTIMIZER_BYTES:
            other = dataclasses.replace(self.experiment, model=model, optimizer=OPTIMIZERS[kind]())
            size = StateShapes.from_experiment(other).bytes_per_chip(MeshConfig(data=1))
            states.append(OptimizerState(kind, size.weights, size.gradients, size.optimizer))
        return tuple(states)

    @functools.cached_property
    def decoding_costs(self) -> tuple[DecodingCost, ...]:
        """Return the cost of one decoding step: this model first, then other key-value heads.

        Empty for models that do not decode from a cache or whose steps have no cost formula.
        """
        return count_decoding_variants(self.quantities.model, self.quantities.sequence_length)

    @functools.cached_property
    def weight_bytes(self) -> dict[Quantization, int]:
        """Return the bytes of all weights for inference, by `quantize`."""
        model = self.quantities.model
        return {kind: weight_bytes(model, kind) for kind in get_args(Quantization)}

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
            "memory_bytes": {
                **dataclasses.asdict(self.memory),
                "total": self.memory.total,
                "optimizer_kind": self.experiment.optimizer.kind,
            },
            "inference_weight_bytes": self.weight_bytes,
            "textbook_activations": self.textbook._asdict(),
            "state_bytes_by_optimizer": [each.as_dict() for each in self.optimizer_states],
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
    """Yield tables by item, by optimizer, and of the compiler's figures."""
    memory, textbook, config = description.memory, description.textbook, description.config
    rows, length = description.quantities.batch_shape
    yield memory_table(f"Training memory, {rows:,} × {length:,} tokens per step", memory, None)
    yield (
        f"[dim]Over all devices, with {description.experiment.optimizer.kind} and remat "
        f"{config.remat}. Textbook activations, L·B·T·(14 D + T N): {textbook.elements:,} elements"
        f", {format_bytes(textbook.bytes)} in {config.precision.compute}; in 16 bits, "
        f"L·(34 B·T·D + 5 B·N·T²): {format_bytes(textbook.sixteen_bit_bytes)}. Logits of the "
        f"whole batch, 2 B·T·V in float32: {format_bytes(textbook.logits_bytes)}. Weights alone, "
        f"for inference: {format_bytes(description.weight_bytes['none'])}; with --quantize "
        + " or ".join(
            f"{kind} {format_bytes(description.weight_bytes[kind])}" for kind in ("int8", "int4")
        )
        + ".[/dim]"
    )
    yield ""
    yield from _optimizer_table(description)
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


def _optimizer_table(description: Description) -> Iterable[RenderableType]:
    table = new_table(
        "Bytes per parameter: weights + gradients + optimizer",
        "optimizer",
        "textbook,\nfloat32",
        "textbook,\nbfloat16",
        "here",
        "in all",
    )
    count = description.parameters.allocated
    for each in description.optimizer_states:
        sizes = (each.weights, each.gradients, each.optimizer_state)
        table.add_row(
            OPTIMIZER_NAMES[each.optimizer],
            _sum(each.textbook("float32")),
            _sum(each.textbook("bfloat16")),
            _sum(tuple(size / count for size in sizes)),
            format_bytes(each.total),
        )
    yield table
    yield (
        "[dim]bfloat16 stores float32 weights; the textbook adds a bfloat16 copy, which compilers "
        "make of a weight where it is used. SGD has momentum. 8-bit AdamW also stores a scale per "
        "block of 256 elements and moment, and float32 moments of parameters with fewer than 4,096 "
        "elements per layer. Gradients take twice the memory while microbatches accumulate.[/dim]"
    )


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
