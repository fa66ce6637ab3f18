"""Transfer of the learning rate over width: muP against one learning rate for all weights.

    python -m bench.studies.mup [--data DATA] [--widths 32 64 128 256] [--minutes 10]

`versus:gpt` of one depth, at several widths and learning rates, with the rule `mup` from the
smallest width and with the rule `constant` with the same initial weights. The text is
WikiText-2 in DATA, without it the quickstart's. If a rule transfers, the best learning rate is
the same at every width (Yang et al. 2022, figure 1).
"""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bench.claims.small_runs import corpus_name, on_wikitext
from bench.command import command
from bench.studies.record import (
    NO_LIMIT,
    Page,
    QueueFlags,
    Study,
    at_the_end,
    markdown_table,
    seeds_of,
    sweep_run,
)
from configs.versus import EXPERIMENTS
from train.experiment import Experiment
from train.figures import shades
from train.optim.schedules import ScheduleConfig
from train.scaling.design import LearningRateRule, SizeRules, model_of_width, with_learning_rate

RULES: tuple[LearningRateRule, ...] = ("constant", "mup")


def experiment(
    rule: LearningRateRule,
    width: int,
    rate: float,
    *,
    base_width: int,
    depth: int,
    steps: int,
    vocab_size: int,
    data: Path | None,
) -> Experiment:
    """Return a run at a width, by a rule that starts from the base width."""
    base = on_wikitext(EXPERIMENTS["gpt"], data)
    tokenizer = dataclasses.replace(base.text_data.tokenizer, vocab_size=vocab_size)
    base = dataclasses.replace(base, data=dataclasses.replace(base.text_data, tokenizer=tokenizer))
    start = dataclasses.replace(base.model.initialization, std=0.0)  # by fan-in for both rules
    model = dataclasses.replace(base.model, initialization=start)

    def at(width: int) -> Experiment:
        sized = dataclasses.replace(model_of_width(model, width, SizeRules()), num_layers=depth)
        return dataclasses.replace(base, model=sized)

    schedule = ScheduleConfig("cosine", learning_rate=rate, warmup_steps=max(1, steps // 10))
    tuned = dataclasses.replace(at(base_width), schedule=schedule, steps=steps)
    return with_learning_rate(tuned, at(width).model, rule)


def draw(losses: Mapping[tuple[str, int], np.ndarray], rates: Sequence[float]) -> Figure:
    """Draw the loss over the learning rate, one panel per rule and one line per width."""
    figure = Figure(figsize=(9, 4.2))
    panels = dict(zip(RULES, figure.subplots(1, 2, sharey=True), strict=True))
    widths = sorted({width for _, width in losses})
    for rule, axes in panels.items():
        for width, color in zip(widths, shades(len(widths)), strict=True):
            values = losses[rule, width]
            axes.plot(rates, values, "o-", color=color, label=f"width {width}")
            if np.isfinite(values).any():
                best = int(np.nanargmin(values))
                axes.plot(rates[best], values[best], "*", color=color, markersize=14)
        axes.set(xscale="log", xlabel="learning rate at the smallest width", title=f"rule {rule}")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
    panels["constant"].set_ylabel("held-out loss (nats per token)")
    panels["mup"].legend(title="star: the best rate", loc="upper center")
    return figure


@command
def main(
    widths: tuple[int, ...] = (32, 64, 128, 256),
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    depth: int = 2,
    steps: int = 600,
    seeds: int = 3,
    vocab_size: int = 1024,
    data: Path | None = None,
    queue: QueueFlags = NO_LIMIT,
) -> None:
    """Is the best learning rate the same at every width, by muP and by one rate for all weights?"""
    study = Study("mup", queue)
    common: Any = dict(base_width=widths[0], depth=depth, steps=steps, vocab_size=vocab_size)
    runs = [
        sweep_run(
            {"rule": rule, "width": str(width), "rate": f"{rate:g}"},
            at_the_end(experiment(rule, width, rate, **common, data=data), seed),
        )
        for seed in range(seeds)
        for width in widths
        for rule in RULES
        for rate in rates
    ]
    results = study.train(runs, accept_failed=True)
    values: dict[tuple[str, int], list[list[float]]] = {}
    for run in runs:
        key = run.settings["rule"], int(run.settings["width"])
        index = [f"{rate:g}" for rate in rates].index(run.settings["rate"])
        values.setdefault(key, [[] for _ in rates])[index].append(results[run.name].value)
    losses = {key: np.array([np.mean(each) for each in found]) for key, found in values.items()}
    rows: list[list[str]] = []
    best: dict[str, list[str]] = {rule: [] for rule in RULES}
    for (rule, width), means in sorted(losses.items()):
        cells = [f"{value:.3f}" if math.isfinite(value) else "failed" for value in means]
        finite = np.isfinite(means).any()
        best[rule].append(f"{rates[int(np.nanargmin(means))]:g}" if finite else "-")
        rows.append([rule, str(width), *cells, best[rule][-1]])
    first = runs[0].experiment
    tokens = (first.batch_size or 1) * first.sequence_length
    page = Page(
        title="Transfer of the learning rate over width",
        question="Is the best learning rate the same at every width?",
        answer=(
            f"At widths {', '.join(map(str, widths))} the best rate is "
            f"{', '.join(best['constant'])} with one rate for all weights and "
            f"{', '.join(best['mup'])} with muP. A rule transfers if it stays the same."
        ),
        table=markdown_table(["rule", "width", *(f"{rate:g}" for rate in rates), "best"], rows),
        settings=(
            f"Held-out loss (nats per token) by width and learning rate at width {widths[0]}. "
            f"{depth} layers, a vocabulary of {vocab_size:,}, {steps} steps of {tokens:,} tokens "
            f"of {corpus_name(first)}, {seeds_of(seeds).removesuffix(' and standard deviation')}. "
            "The findings hold at this scale only."
        ),
    )
    data_of_page = {
        "rates": rates,
        "losses": {
            f"{rule},{width}": [value if math.isfinite(value) else None for value in means]
            for (rule, width), means in losses.items()
        },
    }
    study.write(page, draw(losses, rates), data_of_page)


if __name__ == "__main__":
    sys.exit(main())
