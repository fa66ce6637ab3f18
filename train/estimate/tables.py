"""Print a description as tables for people."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from train.estimate.decoding import LARGE_BATCH
from train.estimate.memory_tables import format_bytes, format_count, memory_tables, new_table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from train.estimate.description import Description


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
    if parameters.inactive:
        table.add_row("active per token, of all experts", f"{parameters.active:,}")
    if parameters.task_heads:
        table.add_row("task heads, not counted", f"{parameters.task_heads:,}")
    estimate = f"{description.parameter_estimate / parameters.total:.1%}"
    table.add_row("12 L D² + V D, for comparison", f"{description.parameter_estimate:,}", estimate)
    yield table


def _flops_table(description: "Description") -> Iterable["RenderableType"]:
    own = description.flops[0]
    lengths = sorted(description.flops, key=lambda each: each.sequence_length)
    columns = ("projections", "scores", "causal", "feed-\nforward", "logits", "total", "training")
    table = new_table("FLOPs per token, forward", "T", *columns)
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
        table.add_row(f"{each.sequence_length:,}", *map(format_count, counts), style=style)
    yield table
    yield (
        "[dim]Scores count all keys of each query's pattern, T with full attention; causal scores "
        "count the keys that a causal mask leaves, (T + 1) / 2 on average. Totals use the former. "
        "Training is three times forward: with causal "
        f"scores {format_count(3 * own.total(causal=True))} at T = {own.sequence_length:,}; "
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
