"""Ablations of a small language model: the held-out loss after one change at a time.

    python -m bench.ablations heads
    python -m bench.ablations documents --steps 1000 --seeds 3 [--data DATA]

Model and corpus are the quickstart's; with DATA, the text is WikiText-2. Every row is trained with
the same recipe.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from bench.small_runs import (
    LENGTH,
    losses_by_position,
    on_wikitext,
    small,
    trained,
    with_mixer,
    with_model,
)
from configs.versus import CHANGES
from configs.versus import EXPERIMENTS as RIVALS
from train.experiment import Experiment
from transformer import FeedForwardConfig, NormConfig

Group = Literal["heads", "documents", "residual", "norms", "feed_forward", "rivals"]


def heads(base: Experiment) -> dict[str, Experiment]:
    """Return different numbers of heads at the same total width."""
    counts = (1, 2, 3, 6, 12)
    changed = {n: with_mixer(base.model, num_heads=n, num_kv_heads=n) for n in counts}
    return {f"{n} heads": with_model(base, layer_pattern=each) for n, each in changed.items()}


def documents(base: Experiment) -> dict[str, Experiment]:
    """Return windows as one token stream, or packed documents masked from each other."""
    masked = dataclasses.replace(base.text_data, document_masking=True)
    return {"one stream": base, "documents apart": dataclasses.replace(base, data=masked)}


def residual(base: Experiment) -> dict[str, Experiment]:
    """Return blocks with and without residual connections."""
    [block] = base.model.layer_pattern
    without = dataclasses.replace(block, residual=False)
    return {"with": base, "without": with_model(base, layer_pattern=(without,))}


def norms(base: Experiment) -> dict[str, Experiment]:
    """Return norm placements and kinds."""
    [block] = base.model.layer_pattern
    rows = {}
    for placement in ("pre", "post", "sandwich"):
        for kind in ("rms", "layer"):
            norm = NormConfig(kind)
            changed = dataclasses.replace(block, norm_placement=placement, norm=norm)
            final = None if placement == "post" else norm
            rows[f"{placement}, {kind}"] = with_model(
                base, layer_pattern=(changed,), final_norm=final
            )
    return rows


def feed_forward(base: Experiment) -> dict[str, Experiment]:
    """Return activations, plain and gated, at nearly the same number of weights."""
    [block] = base.model.layer_pattern
    rows = {}
    for gated in (False, True):
        for name in ("relu", "gelu", "silu", "squared_relu"):
            kind = FeedForwardConfig(activation=name, gated=gated, bias=False)
            label = f"{name}, {'gated' if gated else 'plain'}"
            changed = dataclasses.replace(block, feed_forward=kind)
            rows[label] = with_model(base, layer_pattern=(changed,))
    return rows


def rivals(base: Experiment) -> dict[str, Experiment]:
    """Return the recipes of `configs/versus.py` unchanged, with the same number of steps."""
    return {
        name: dataclasses.replace(each, steps=base.steps)
        for name, each in RIVALS.items()
        if name not in CHANGES
    }


GROUPS: dict[Group, Callable[[Experiment], dict[str, Experiment]]] = {
    "heads": heads,
    "documents": documents,
    "residual": residual,
    "norms": norms,
    "feed_forward": feed_forward,
    "rivals": rivals,
}


def main(
    group: tyro.conf.Positional[Group],
    steps: int = 600,
    seeds: int = 1,
    data: Path | None = None,
    only: tuple[str, ...] = (),
) -> None:
    """Print the held-out loss of each row, its spread over seeds, and the training time.

    Args:
      group: What is changed.
      steps: Steps of each run.
      seeds: Number of runs of each row.
      data: Folder with WikiText-2 in `wikitext-2`; without it, the quickstart's text.
      only: Rows to train; without it, all.
    """
    rows = GROUPS[group](small(steps))
    if unknown := sorted(set(only) - set(rows)):
        raise SystemExit(f"--only {unknown[0]}: the rows of {group} are {', '.join(rows)}")
    table = Table(group, "loss", "spread", "seconds", title=f"{steps} steps, {seeds} seeds")
    for name, experiment in rows.items():
        if only and name not in only:
            continue
        losses, seconds = [], []
        for seed in range(seeds):
            start = time.perf_counter()
            run = trained(on_wikitext(dataclasses.replace(experiment, seed=seed), data))
            seconds.append(time.perf_counter() - start)
            losses.append(losses_by_position(run, LENGTH, windows=512).mean())
        spread = f"{max(losses) - min(losses):.3f}" if seeds > 1 else "-"
        loss = f"{statistics.mean(losses):.4f}"
        row = name, loss, spread, f"{statistics.median(seconds):.0f}"
        table.add_row(*row)
        print(*row, file=sys.stderr, flush=True)
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
