"""A description as tables, for people."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from train.describe.decoding import LARGE_BATCH
from train.describe.layout import in_bytes, in_thousands, new_table
from train.describe.memory_tables import memory_tables

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

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
    for each in (_parameters, _flops, memory_tables, _decoding):
        for line in each(description):
            console.print(line)
        console.print()
    for note in description.notes:
        console.print(f"Note: {note}.")


def _parameters(description: "Description") -> Iterable["RenderableType"]:
    parameters, config = description.parameters, description.config
    table = new_table("Parameters", "part", "number", "share")
    for part, count in parameters.parts.items():
        if count:
            table.add_row(TITLES.get(part, part), f"{count:,}", f"{count / parameters.total:.1%}")
    table.add_section()
    table.add_row("total", f"{parameters.total:,}", "", style="bold")
    table.add_row(f"padding of {config.vocab_rows:,} rows", f"{parameters.padding:,}")
    if parameters.idle:
        table.add_row("that one token meets, of all experts", f"{parameters.active:,}")
    if parameters.heads:
        table.add_row("heads of the task, not counted", f"{parameters.heads:,}")
    estimate = f"{description.estimate / parameters.total:.1%}"
    table.add_row("12 L D² + V D, for comparison", f"{description.estimate:,}", estimate)
    yield table


def _flops(description: "Description") -> Iterable["RenderableType"]:
    own = description.flops[0]
    lengths = sorted(description.flops, key=lambda each: each.length)
    columns = ("projections", "scores", "causal", "feed-\nforward", "logits", "total", "training")
    table = new_table("Operations a token, forward", "T", *columns)
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
        table.add_row(f"{each.length:,}", *map(in_thousands, counts), style=style)
    yield table
    yield (
        "[dim]Scores are of the keys that each query's pattern holds, with full attention all T; "
        "causal: of those that a causal mask leaves, (T + 1) / 2. The totals take the former. "
        "Training is three times forward: with causal "
        f"scores {in_thousands(3 * own.total(causal=True))} at T = {own.length:,}; "
        f"by 6 N + 12 L D T, {in_thousands(description.training_estimate)}.[/dim]"
    )
    share = description.parameters.parts["feed_forward"] / description.parameters.total
    yield (
        f"[dim]Feed-forward has {share:.0%} of the parameters and {own.feed_forward_share():.0%} "
        f"of the layers' operations at T = {own.length:,}.[/dim]"
    )
    if own.uncounted:
        yield f"[dim]Not counted: the scores of {', '.join(own.uncounted)}.[/dim]"


def _decoding(description: "Description") -> Iterable["RenderableType"]:
    if not description.decoding:
        return
    own = description.decoding[0]
    batch = f"a byte,\nbatch {LARGE_BATCH}"
    columns = ("cache,\na token", "cache", "weights", "operations", "a byte", batch)
    after = f"Decoding after {own.context:,} tokens"
    if own.source:
        after += f", from a source of {own.source:,}"
    table = new_table(after, "key-value\nheads", *columns)
    for each in sorted(description.decoding, key=lambda each: each.kv_heads, reverse=True):
        table.add_row(
            ", ".join(map(str, each.kv_heads)) or "none",
            in_bytes(each.cache_bytes_per_token),
            in_bytes(each.cache_bytes),
            in_bytes(each.weight_bytes),
            in_thousands(each.flops),
            f"{each.intensity():.2f}",
            f"{each.intensity(LARGE_BATCH):.2f}",
            style="bold" if each is own else None,
        )
    yield table
    if own.source:
        heads = " Key-value heads: of its own tokens, then of the source." if own.kv_heads else ""
        yield (
            "[dim]The cache is of the tokens written, and of the source, of which it has "
            f"{in_bytes(own.cache_bytes_per_source_token)} a token in this model. Weights and "
            "operations are those of a step: the decoder's, less what is done once for a source, "
            f"and the output table; of look-up tables a row.{heads}[/dim]"
        )
    traffic = description.traffic
    if traffic.plain:
        yield (
            f"[dim]Attention of a forward pass moves {in_bytes(traffic.plain)} a token in plain "
            f"form (scores and weights each written and read), {in_bytes(traffic.flash)} in a "
            "flash kernel.[/dim]"
        )
