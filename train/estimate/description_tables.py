"""Number formats, and the tables of a description for people."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from train.estimate.decoding import LARGE_BATCH

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from train.estimate.compile import CompiledMemory
    from train.estimate.description import Description
    from train.estimate.training_memory import MemoryVariant


def new_table(title: str, first: str, *columns: str) -> "Table":
    """Return an empty table; all columns but the first are right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def format_count(number: float) -> str:
    """Format a count with a decimal prefix, for example `12.3 M`."""
    return _scaled(number, 1000, ("", " k", " M", " G", " T", " P"))


def format_bytes(size: float) -> str:
    """Format a size, possibly negative, for example `12.3 MiB`."""
    sign = "-" if size < 0 else ""
    return sign + _scaled(abs(size), 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    """Format with three significant digits and the largest prefix that leaves 1 or more."""
    power = 0
    # By the rounded number: 999.7 is 1 k, and not 1000.
    while round(number) >= base and power < len(units) - 1:
        number /= base
        power += 1
    digits = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
    return digits + units[power]


OPTIMIZER_NAMES = {"adamw": "AdamW", "adamw8bit": "8-bit AdamW", "sgd": "SGD"}
"""Names of optimizers for people."""


def memory_tables(description: "Description") -> Iterable["RenderableType"]:
    """Yield tables by item, by precision and optimizer, and of the compiler's figures."""
    yield from _items(description)
    yield ""
    yield from _combinations(description)
    yield ""
    yield from _compiled(description)


def _items(description: "Description") -> Iterable["RenderableType"]:
    memory, config = description.memory, description.config
    activations = memory.activations
    b, t = description.batch_size, description.sequence_length
    table = new_table(f"Training memory, {b:,} × {t:,} tokens per step", "what", "size")
    rows = {
        f"weights ({config.precision.parameters})": memory.weights,
        f"weights in compute dtype ({config.precision.compute})": memory.compute_copy,
        "gradients (float32)": memory.gradients,
        f"optimizer ({description.optimizer})": memory.optimizer,
        "EMA of the weights (float32)": memory.ema,
        f"activations, estimated (remat {config.remat})": activations.bytes,
        "logits of one chunk and their gradient": memory.logits,
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


def _combinations(description: "Description") -> Iterable["RenderableType"]:
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
        table.add_row(*_combination(each, count))
    yield table
    eight = description.eight_bit_state
    yield (
        "[dim]bfloat16 stores float32 weights and a bfloat16 copy. SGD has momentum. 8-bit AdamW "
        f"takes {eight.codes / count:.3g} bytes per parameter for codes, "
        f"{eight.scales / count:.2g} for a scale per block of 256 elements and moment, and "
        f"{eight.unquantized / count:.2g} for float32 moments of parameters with fewer than 4,096 "
        "elements per layer.[/dim]"
    )
    if description.memory.gradients > 4 * count:
        yield "[dim]Gradients take twice the memory while microbatches accumulate.[/dim]"


def _combination(each: "MemoryVariant", count: int) -> tuple[str, ...]:
    state = sum(each.state_bytes)
    return (
        OPTIMIZER_NAMES[each.optimizer],
        _sum(each.textbook_bytes_per_parameter),
        _sum(tuple(size / count for size in each.state_bytes)),
        format_bytes(state),
        format_bytes(each.memory.working_set),
        format_bytes(state + each.memory.working_set),
    )


def _sum(parts: tuple[float, ...]) -> str:
    """Format addends and their sum, for example `4+4+8=16`."""
    terms = [f"{part:.2f}".rstrip("0").rstrip(".") for part in (*parts, sum(parts))]
    return f"{'+'.join(terms[:-1])}={terms[-1]}"


def _compiled(description: "Description") -> Iterable["RenderableType"]:
    compiled = description.compiled_memory
    if compiled is None:
        yield (
            "[dim]Add --ask-compiler for the compiler's figures of the same step. It takes as long "
            "as the compilation before training.[/dim]"
        )
        return
    where = "the device" if compiled.devices == 1 else f"one device of {compiled.devices}"
    table = new_table(f"Compiled memory of {where}", "what", "described", "compiler")
    inputs = compiled.state + compiled.batch
    table.add_row("state: weights, optimizer, counters", format_bytes(compiled.state), "")
    table.add_row("batch", format_bytes(compiled.batch), "")
    table.add_row(
        "arguments of the step",
        format_bytes(inputs),
        format_bytes(compiled.arguments),
        style="bold",
    )
    table.add_row("donated outputs", format_bytes(compiled.state), format_bytes(compiled.donated))
    table.add_row("other outputs", "", format_bytes(compiled.results))
    table.add_section()
    for name, size in _temporaries(compiled).items():
        table.add_row(name, format_bytes(size), "")
    sizes = format_bytes(compiled.estimated_temporaries), format_bytes(compiled.temporaries)
    table.add_row("temporaries", *sizes, style="bold")
    table.add_section()
    for name, size in temporaries_differences(compiled).items():
        table.add_row(name, "", f"{'' if size < 0 else '+'}{format_bytes(size)}")
    yield table
    yield (
        "[dim]Batch fields that the step does not read "
        f"({format_bytes(inputs - compiled.arguments)}) are not arguments. Residuals are traced "
        "from the real step: inputs of norms and activation functions, masks, rotated queries. The "
        "compiler recomputes cheap ones and shares memory between arrays that are not alive "
        "together (less), or copies arrays into other layouts (more).[/dim]"
    )


def _temporaries(compiled: "CompiledMemory") -> dict[str, int]:
    items = {
        "weights in compute dtype": compiled.compute_copy,
        "gradients": compiled.gradients,
        "activations, estimated": compiled.activations,
        "logits of one chunk and their gradient": compiled.logits,
    }
    return {name: size for name, size in items.items() if size}


def temporaries_differences(compiled: "CompiledMemory") -> dict[str, int]:
    """Return the steps from the estimated temporaries to the compiler's, in order."""
    return {
        "residual activations beyond the estimate": compiled.residual_activations
        - compiled.activations,
        "residual weights in other forms": compiled.residual_weights - compiled.compute_copy,
        "recomputed, shared or copied": compiled.temporaries - compiled.traced_temporaries,
    }


PART_TITLES = {"feed_forward": "feed-forward"}
"""Titles of parameter groups that differ from their names."""


def print_description(description: "Description", console: "Console | None" = None) -> None:
    """Print all tables of a description."""
    from rich.console import Console

    console = console or Console(highlight=False)
    config = description.config
    console.print(
        f"{config.num_layers} layers of width {config.d_model:,}, {config.vocab_size:,} tokens, "
        f"precision {config.precision.name}\n",
        style="bold",
    )
    for each in (_parameter_table, _flops_table, memory_tables, _decoding_table):
        for line in each(description):
            console.print(line)
        console.print()
    for note in description.notes:
        console.print(f"Note: {note}.")


def _parameter_table(description: "Description") -> Iterable["RenderableType"]:
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


def _flops_table(description: "Description") -> Iterable["RenderableType"]:
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


def _decoding_table(description: "Description") -> Iterable["RenderableType"]:
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
