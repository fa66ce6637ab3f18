"""A description as tables, for people."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from train.describe.decoding import LARGE_BATCH
from train.describe.memory import TEXTBOOK_GRADIENTS, TEXTBOOK_OPTIMIZERS, TEXTBOOK_WEIGHTS

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from train.describe import Description

TITLES = {"feed_forward": "feed-forward"}


def show(description: "Description", console: "Console | None" = None) -> None:
    """Prints all tables."""
    from rich.console import Console

    console = console or Console(highlight=False)
    config = description.config
    console.print(
        f"{config.layers} layers of width {config.width:,}, {config.vocab_size:,} words, "
        f"precision {config.precision.name}\n",
        style="bold",
    )
    for each in (_parameters, _flops, _memory, _textbook_memory, _decoding):
        for line in each(description):
            console.print(line)
        console.print()
    for note in description.notes:
        console.print(f"Note: {note}.")


def _parameters(description: "Description") -> Iterable["RenderableType"]:
    parameters, config = description.parameters, description.config
    table = _table("Parameters", "part", "number", "share")
    for part, count in parameters.parts.items():
        if count:
            table.add_row(TITLES.get(part, part), f"{count:,}", f"{count / parameters.total:.1%}")
    table.add_section()
    table.add_row("total", f"{parameters.total:,}", "", style="bold")
    table.add_row(f"padding of {config.vocab_rows:,} rows", f"{parameters.padding:,}")
    if parameters.heads:
        table.add_row("heads of the task, not counted", f"{parameters.heads:,}")
    estimate = f"{description.estimate / parameters.total:.1%}"
    table.add_row("12 L D² + V D, for comparison", f"{description.estimate:,}", estimate)
    yield table


def _flops(description: "Description") -> Iterable["RenderableType"]:
    own = description.flops[0]
    lengths = sorted(description.flops, key=lambda each: each.length)
    columns = ("projections", "scores", "causal", "feed-\nforward", "logits", "total", "training")
    table = _table("Operations a token, forward", "T", *columns)
    for each in lengths:
        total = each.total(causal=False)
        counts = (
            each.projections,
            each.scores,
            each.scores_causal,
            each.feed_forward,
            each.vocabulary,
            total,
            3 * total,
        )
        style = "bold" if each is own else None
        table.add_row(f"{each.length:,}", *map(_count, counts), style=style)
    yield table
    yield (
        "[dim]Scores are of all T keys for each query; causal: of the (T + 1) / 2 that a causal "
        "mask shows. The totals take them in full. Training is three times forward: with causal "
        f"scores {_count(3 * own.total(causal=True))} at T = {own.length:,}; by 6 N + 12 L D T, "
        f"{_count(description.training_estimate)}.[/dim]"
    )
    share = description.parameters.parts["feed_forward"] / description.parameters.total
    yield (
        f"[dim]Feed-forward has {share:.0%} of the parameters and {own.feed_forward_share():.0%} "
        f"of the layers' operations at T = {own.length:,}.[/dim]"
    )
    if own.uncounted:
        yield f"[dim]Not counted: the scores of {', '.join(own.uncounted)}.[/dim]"


def _memory(description: "Description") -> Iterable["RenderableType"]:
    memory, config = description.memory, description.config
    activations = memory.activations
    b, t = description.batch_size, description.sequence_length
    table = _table(f"Memory of training, {b:,} × {t:,} tokens a step", "what", "size")
    rows = {
        f"weights ({config.precision.parameters})": memory.weights,
        f"weights cast for products ({config.precision.compute})": memory.compute_copy,
        "gradients (float32)": memory.gradients,
        "optimizer": memory.optimizer,
        f"activations, estimated (remat {config.remat})": activations.bytes,
        "logits of one chunk, and their gradient": memory.logits,
    }
    for name, size in rows.items():
        if size:
            table.add_row(name, _bytes(size))
    table.add_section()
    table.add_row("total, over all devices", _bytes(memory.total), style="bold")
    yield table
    yield (
        f"[dim]Activations by L·B·T·(14 D + T N): {activations.textbook_elements:,} elements, "
        f"{_bytes(activations.textbook_bytes)} in {config.precision.compute}; in 16 bits by "
        f"L·(34 B·T·D + 5 B·N·T²): {_bytes(activations.sixteen_bit_bytes)}. Logits of the whole "
        f"batch, 2 B·T·V in float32, would take {_bytes(memory.textbook_logits)}. A compiler "
        "may take more for its own work: on a CPU, twice the activations.[/dim]"
    )


def _textbook_memory(description: "Description") -> Iterable["RenderableType"]:
    total = description.parameters.total
    title = "The textbook's bytes a parameter, and in all"
    table = _table(title, "optimizer", *TEXTBOOK_WEIGHTS)
    for name, optimizer in TEXTBOOK_OPTIMIZERS.items():
        each = [weights + TEXTBOOK_GRADIENTS + optimizer for weights in TEXTBOOK_WEIGHTS.values()]
        table.add_row(name, *(f"{n} B, {_bytes(n * total)}" for n in each))
    yield table


def _decoding(description: "Description") -> Iterable["RenderableType"]:
    if not description.decoding:
        return
    own = description.decoding[0]
    batch = f"a byte,\nbatch {LARGE_BATCH}"
    columns = ("cache,\na token", "cache", "weights", "operations", "a byte", batch)
    table = _table(f"Decoding after {own.context:,} tokens", "key-value\nheads", *columns)
    for each in sorted(description.decoding, key=lambda each: each.kv_heads, reverse=True):
        table.add_row(
            ", ".join(map(str, each.kv_heads)) or "none",
            _bytes(each.cache_bytes_per_token),
            _bytes(each.cache_bytes),
            _bytes(each.weight_bytes),
            _count(each.flops),
            f"{each.intensity():.2f}",
            f"{each.intensity(LARGE_BATCH):.2f}",
            style="bold" if each is own else None,
        )
    yield table
    traffic = description.traffic
    if traffic.plain:
        yield (
            f"[dim]Attention of a forward pass moves {_bytes(traffic.plain)} a token in plain "
            f"form (scores and weights each written and read), {_bytes(traffic.flash)} in a "
            "flash kernel.[/dim]"
        )


def _table(title: str, first: str, *columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _count(number: float) -> str:
    return _scaled(number, 1000, ("", " k", " M", " G", " T", " P"))


def _bytes(size: float) -> str:
    return _scaled(size, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    """Three digits, or all that stand before the point, and the unit that suits them."""
    power = 0
    while round(number) >= base and power < len(units) - 1:
        number /= base
        power += 1
    digits = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
    return digits + units[power]
