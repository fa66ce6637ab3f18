"""Transfer of the learning rate over width: muP against one learning rate for all weights.

`versus:gpt` of one depth, at several widths and learning rates, with the rule `mup` from the
smallest width and with the rule `constant` with the same initial weights, on WikiText-2.
If a rule transfers, the best learning rate is the same at every width (Yang et al. 2022, figure 1).
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bench.claims.small_runs import on_wikitext, with_vocabulary
from bench.studies.record import Study, at_the_end, markdown_table, sweep_run
from configs.versus import EXPERIMENTS
from train.experiment import Experiment
from train.figures import shades
from train.optim.schedules import ScheduleConfig
from train.scaling.design import LearningRateRule, SizeRules, model_of_width, with_learning_rate

RULES: tuple[LearningRateRule, ...] = ("constant", "mup")
WIDTHS = (32, 64, 128, 256)
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
STEPS = 600


def experiment(rule: LearningRateRule, width: int, rate: float, data: Path) -> Experiment:
    """Return a run at a width, by a rule that starts from the smallest width."""
    base = with_vocabulary(on_wikitext(EXPERIMENTS["gpt"], data), 1024)
    start = dataclasses.replace(base.model.initialization, std=0.0)  # by fan-in for both rules
    model = dataclasses.replace(base.model, initialization=start)
    small, wide = (
        dataclasses.replace(model_of_width(model, each, SizeRules()), num_layers=2)
        for each in (WIDTHS[0], width)
    )
    schedule = ScheduleConfig("cosine", learning_rate=rate, warmup_steps=STEPS // 10)
    tuned = dataclasses.replace(base, model=small, schedule=schedule, steps=STEPS)
    return with_learning_rate(tuned, wide, rule)


def draw(losses: Mapping[tuple[str, int], np.ndarray]) -> Figure:
    """Draw the loss over the learning rate, one panel per rule and one line per width."""
    figure = Figure(figsize=(9, 4.2))
    panels = dict(zip(RULES, figure.subplots(1, 2, sharey=True), strict=True))
    for rule, axes in panels.items():
        for width, color in zip(WIDTHS, shades(len(WIDTHS)), strict=True):
            values = losses[rule, width]
            axes.plot(RATES, values, "o-", color=color, label=f"width {width}")
            best = int(np.nanargmin(values))
            axes.plot(RATES[best], values[best], "*", color=color, markersize=14)
        axes.set(xscale="log", xlabel="learning rate at the smallest width", title=f"rule {rule}")
        axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
        axes.minorticks_off()
    panels["constant"].set_ylabel("held-out loss (nats per token)")
    panels["mup"].legend(title="star: the best rate", loc="upper center")
    return figure


def main(data: Path, seeds: int = 3, minutes: float = 0) -> None:
    """Is the best learning rate the same at every width, by muP and by one rate for all weights?"""
    study = Study("mup", minutes)
    runs = [
        sweep_run(
            {"rule": rule, "width": str(width), "rate": f"{rate:g}"},
            at_the_end(experiment(rule, width, rate, data), seed),
        )
        for seed in range(seeds)
        for width in WIDTHS
        for rule in RULES
        for rate in RATES
    ]
    found = study.train(runs, accept_failed=True)
    values: dict[tuple[str, int], list[list[float]]] = {}
    for run in runs:
        key = run.settings["rule"], int(run.settings["width"])
        index = [f"{rate:g}" for rate in RATES].index(run.settings["rate"])
        values.setdefault(key, [[] for _ in RATES])[index].append(found[run.name].result.value)
    losses = {key: np.array([np.mean(each) for each in lists]) for key, lists in values.items()}
    rows = []
    for (rule, width), means in sorted(losses.items()):
        cells = [f"{value:.3f}" if math.isfinite(value) else "failed" for value in means]
        rows.append([rule, str(width), *cells, f"{RATES[int(np.nanargmin(means))]:g}"])
    table = markdown_table(["rule", "width", *(f"{rate:g}" for rate in RATES), "best"], rows)
    numbers = {
        "rates": RATES,
        "losses": {
            f"{rule},{width}": [value if math.isfinite(value) else None for value in means]
            for (rule, width), means in losses.items()
        },
    }
    study.write([table], draw(losses), numbers)
