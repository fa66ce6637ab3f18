"""Transfer of the learning rate over width: muP against one learning rate for all weights.

    python -m bench.studies.mup [--data DATA] [--widths 32 64 128 256] [--steps 600]
        [--minutes 10]

`versus:gpt` of one depth, at several widths and learning rates, with the rule `mup` from the
smallest width and with the rule `constant` with the same initial weights. The text is
WikiText-2 in DATA, without it the quickstart's. If a rule transfers, the best learning rate is
the same at every width (Yang et al. 2022, figure 1).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from bench.small_runs import corpus_name, on_wikitext
from bench.studies.record import (
    RESULTS,
    markdown_table,
    open_records,
    run_study,
    single_run,
    train_all,
    write_record,
)
from configs.versus import EXPERIMENTS
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.schedules import ScheduleConfig
from train.scaling.design import LearningRateRule, SizeRules, model_of_width, with_learning_rate
from train.sweep.grid import run_name

RULES: tuple[LearningRateRule, ...] = ("constant", "mup")


def experiment(
    rule: LearningRateRule,
    width: int,
    rate: float,
    *,
    base_width: int,
    depth: int,
    steps: int,
    vocab_size: int = 1024,
    data: Path | None = None,
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

    tuned = dataclasses.replace(
        at(base_width),
        schedule=ScheduleConfig("cosine", learning_rate=rate, warmup_steps=max(1, steps // 10)),
        steps=steps,
        evaluation=EvaluationConfig(every=0),
        sample=SampleConfig(),
        checkpoint=CheckpointConfig(every=200, keep_last=1),
    )
    return with_learning_rate(tuned, at(width).model, rule)


def draw(losses: Mapping[tuple[str, int], np.ndarray], rates: Sequence[float], path: Path) -> None:
    """Draw the loss over the learning rate, one panel per rule and one line per width."""
    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    panels = dict(zip(RULES, figure.subplots(1, 2, sharey=True), strict=True))
    widths = sorted({width for _, width in losses})
    for rule, axes in panels.items():
        for width, shade in zip(widths, np.linspace(0.1, 0.85, len(widths)), strict=True):
            values, color = losses[rule, width], colormaps["viridis"](shade)
            axes.plot(rates, values, "o-", color=color, ms=4, label=f"width {width}")
            if np.isfinite(values).any():
                best = int(np.nanargmin(values))
                axes.plot(rates[best], values[best], "*", color=color, ms=12)
        axes.set(xscale="log", xlabel="learning rate at the smallest width", title=f"rule {rule}")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.grid(visible=True, alpha=0.2)
    panels["constant"].set_ylabel("held-out loss (nats per token)")
    panels["mup"].legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(
    widths: tuple[int, ...] = (32, 64, 128, 256),
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    depth: int = 2,
    steps: int = 600,
    seeds: int = 3,
    vocab_size: int = 1024,
    data: Path | None = None,
    workdir: Path = Path("runs/mup"),
    output: Path = RESULTS,
    processes: int = 1,
    minutes: float = 0,
) -> None:
    """Train what is missing, and write mup.md, mup.json and mup.png."""
    runs = []
    for seed in range(seeds):
        for width in widths:
            for rule in RULES:
                for rate in rates:
                    settings = {"rule": rule, "width": str(width), "rate": f"{rate:g}"}
                    found = experiment(
                        rule,
                        width,
                        rate,
                        base_width=widths[0],
                        depth=depth,
                        steps=steps,
                        vocab_size=vocab_size,
                        data=data,
                    )
                    found = dataclasses.replace(found, seed=seed)
                    runs.append(single_run(run_name(settings, seed), settings, found))
    # A run that diverges is a result.
    records = open_records("mup", output)
    results = train_all(
        runs, workdir, records, accept_failed=True, processes=processes, minutes=minutes
    )
    values: dict[tuple[str, int], list[list[float]]] = {}
    for run in runs:
        key = run.settings["rule"], int(run.settings["width"])
        index = [f"{rate:g}" for rate in rates].index(run.settings["rate"])
        values.setdefault(key, [[] for _ in rates])[index].append(results[run.name].value)
    losses = {key: np.array([np.mean(each) for each in found]) for key, found in values.items()}
    draw(losses, rates, output / "mup.png")
    rows = []
    for (name, width), means in sorted(losses.items()):
        cells = [f"{value:.3f}" if math.isfinite(value) else "failed" for value in means]
        best = f"{rates[int(np.nanargmin(means))]:g}" if np.isfinite(means).any() else "-"
        rows.append([name, str(width), *cells, best])
    header = ["rule", "width", *(f"{rate:g}" for rate in rates), "best"]
    tokens = runs[0].experiment.batch_size * runs[0].experiment.sequence_length
    scale = (
        f"{depth} layers, a vocabulary of {vocab_size:,}, {steps} steps of {tokens:,} tokens, "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}: held-out loss (nats per token) by width "
        f"and learning rate at width {widths[0]}. The text is "
        f"{corpus_name(runs[0].experiment)}. The findings hold at this scale only."
    )
    record = {
        "rates": rates,
        "losses": {
            f"{name},{width}": [value if math.isfinite(value) else None for value in means]
            for (name, width), means in losses.items()
        },
    }
    body = f"{scale}\n\n{markdown_table(header, rows)}"
    title = "Transfer of the learning rate over width"
    write_record(
        "mup",
        title,
        body,
        record,
        results,
        trained_on=records.describe_machines(runs),
        folder=output,
    )


if __name__ == "__main__":
    run_study(main)
