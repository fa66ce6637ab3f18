"""How tables and numbers of a description look.

The memory of training as tables, for people.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
from collections.abc import Iterable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from train.estimate.compiled_memory import CompiledMemory
    from train.estimate.description import Description
    from train.estimate.memory import MemoryVariant


def new_table(title: str, first: str, *columns: str) -> "Table":
    """A table without rows; all columns but the first are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def format_count(number: float) -> str:
    """`12.3 M`: a number of things."""
    return _scaled(number, 1000, ("", " k", " M", " G", " T", " P"))


def format_bytes(size: float) -> str:
    """`12.3 MiB`: a size, which may be negative."""
    sign = "-" if size < 0 else ""
    return sign + _scaled(abs(size), 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    """Three digits, or all that stand before the point, and the unit that suits them."""
    power = 0
    while round(number) >= base and power < len(units) - 1:
        number /= base
        power += 1
    digits = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
    return digits + units[power]


OPTIMIZER_NAMES = {"adamw": "AdamW", "adamw8bit": "8-bit AdamW", "sgd": "SGD"}


def memory_tables(description: "Description") -> Iterable["RenderableType"]:
    """Item by item; by precision and optimizer; and what the compiler says."""
    yield from _items(description)
    yield ""
    yield from _combinations(description)
    yield ""
    yield from _compiled(description)


def _items(description: "Description") -> Iterable["RenderableType"]:
    memory, config = description.memory, description.config
    activations = memory.activations
    b, t = description.batch_size, description.sequence_length
    table = new_table(f"Memory of training, {b:,} × {t:,} tokens a step", "what", "size")
    rows = {
        f"weights ({config.precision.parameters})": memory.weights,
        f"weights cast for products ({config.precision.compute})": memory.compute_copy,
        "gradients (float32)": memory.gradients,
        f"optimizer ({description.optimizer})": memory.optimizer,
        "moving average of the weights (float32)": memory.ema,
        f"activations, estimated (remat {config.remat})": activations.bytes,
        "logits of one chunk, and their gradient": memory.logits,
    }
    for name, size in rows.items():
        if size:
            table.add_row(name, format_bytes(size))
    table.add_section()
    table.add_row("total, over all devices", format_bytes(memory.total), style="bold")
    yield table
    yield (
        f"[dim]Activations by L·B·T·(14 D + T N): {activations.textbook_elements:,} elements, "
        f"{format_bytes(activations.textbook_bytes)} in {config.precision.compute}; in 16 bits by "
        f"L·(34 B·T·D + 5 B·N·T²): {format_bytes(activations.sixteen_bit_bytes)}. Logits of the whole "
        f"batch, 2 B·T·V in float32, would take {format_bytes(memory.textbook_logits)}. Without "
        f"training, weights alone: {format_bytes(memory.weights)}.[/dim]"
    )


def _combinations(description: "Description") -> Iterable["RenderableType"]:
    columns = ("textbook", "here", "these", "activations\nand logits", "total")
    title = "Bytes a parameter of weights + gradients + optimizer, and in all"
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
        "[dim]bfloat16 keeps float32 weights beside; SGD is with momentum. 8 bits are "
        f"{eight.codes / count:.3g} bytes a parameter, {eight.scales / count:.2g} for a scale of "
        "each block of 256 numbers and of each of two moments, and "
        f"{eight.unquantized / count:.2g} for parameters of fewer than 4,096 numbers in a layer, which "
        "keep 32 bits.[/dim]"
    )
    if description.memory.gradients > 4 * count:
        yield "[dim]Gradients are there twice while microbatches are added up.[/dim]"


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
    """`4+4+8=16`, with two digits after the point where there are any."""
    shown = [f"{part:.2f}".rstrip("0").rstrip(".") for part in (*parts, sum(parts))]
    return f"{'+'.join(shown[:-1])}={shown[-1]}"


def _compiled(description: "Description") -> Iterable["RenderableType"]:
    compiled = description.compiled_memory
    if compiled is None:
        yield (
            "[dim]What the compiler says of the same step: add --ask-compiler. It takes as long as "
            "compiling does before training.[/dim]"
        )
        return
    where = "the device" if compiled.devices == 1 else f"one device of {compiled.devices}"
    table = new_table(f"What the compiler says of {where}", "what", "described", "compiler")
    given = compiled.state + compiled.batch
    table.add_row("state: weights, optimizer, counters", format_bytes(compiled.state), "")
    table.add_row("batch", format_bytes(compiled.batch), "")
    table.add_row(
        "given to the step", format_bytes(given), format_bytes(compiled.arguments), style="bold"
    )
    table.add_row(
        "results in its place", format_bytes(compiled.state), format_bytes(compiled.donated)
    )
    table.add_row("other results", "", format_bytes(compiled.results))
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
        f"[dim]What the step does not read of a batch ({format_bytes(given - compiled.arguments)}) is "
        "not given to it. Differentiation "
        "keeps what the backward pass asks for, traced from the real step: the inputs of norms and "
        "activation functions, masks, turned queries. The compiler computes cheap ones again and "
        "lets what is not needed at the same time share its place (less), or holds copies in other "
        "layouts (more).[/dim]"
    )


def _temporaries(compiled: "CompiledMemory") -> dict[str, int]:
    items = {
        "weights cast for products": compiled.compute_copy,
        "gradients": compiled.gradients,
        "activations, estimated": compiled.activations,
        "logits of one chunk, and their gradient": compiled.logits,
    }
    return {name: size for name, size in items.items() if size}


def temporaries_differences(compiled: "CompiledMemory") -> dict[str, int]:
    """What leads from the temporaries that are described to those of the compiler, in order."""
    return {
        "activations kept, beyond the estimate": compiled.residual_activations
        - compiled.activations,
        "weights kept in other forms": compiled.residual_weights - compiled.compute_copy,
        "computed again, shared or copied": compiled.temporaries - compiled.traced_temporaries,
    }
