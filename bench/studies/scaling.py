"""Scaling laws: one law for each of parameters, data and compute, and the joint law of two.

    python -m bench.studies.scaling [--data DATA] [--widths 64 128 192 256] [--max-flops 1e14]
        [--minutes 10]

The corpus is the source of Python's standard library, or WikiText-2 in DATA/wikitext-2/.

The quickstart's recipe at every width and number of training tokens, except where that takes more
than `max_flops`. `python -m train scaling` designs, trains and fits such runs; this study adds what
the laws mean: how far the loss falls if parameters grow and tokens do not, the reverse, and both.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.small_runs import corpus_name, on_wikitext
from bench.studies.record import (
    RESULTS,
    markdown_table,
    open_records,
    run_study,
    train_all,
    write_record,
)
from configs.quickstart import EXPERIMENTS
from train.experiment import CheckpointConfig, Experiment
from train.scaling.analysis import CONSTANTS, Analysis, format_csv
from train.scaling.design import SizedRun, SizeRules, design_runs, format_count, model_of_width
from train.scaling.laws import PowerLaw, fit_power_law
from train.scaling.scaling_report import check_design, fit_results, plot_scaling
from train.sweep.sweep_folder import RunResult


def base_experiment(vocab_size: int, data: Path | None = None) -> Experiment:
    """Return the quickstart with a vocabulary of this size."""
    base = on_wikitext(EXPERIMENTS["quickstart"], data)
    tokenizer = dataclasses.replace(base.text_data.tokenizer, vocab_size=vocab_size)
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.text_data, tokenizer=tokenizer),
        checkpoint=CheckpointConfig(every=400, keep_last=1),
    )


def design(
    widths: Sequence[int],
    tokens: Sequence[float],
    max_flops: float,
    seeds: int,
    vocab_size: int,
    data: Path | None = None,
) -> list[SizedRun]:
    """Return the runs, in the order of their compute."""
    base, rules = base_experiment(vocab_size, data), SizeRules()
    models = [model_of_width(base.model, width, rules) for width in widths]
    sized = design_runs(base, models, tokens=tokens, seeds=seeds, rules=rules)
    return [each for each in sized if each.flops <= max_flops]


def mean_over_seeds(
    sized: Sequence[SizedRun], results: Mapping[str, RunResult]
) -> dict[tuple[int, int], float]:
    """Return the mean loss by (N, D)."""
    losses: dict[tuple[int, int], list[float]] = {}
    for each in sized:
        at = each.parameters, each.tokens
        losses.setdefault(at, []).append(results[each.run.name].value)
    return {at: float(np.mean(values)) for at, values in losses.items()}


def held_back(losses: Mapping[tuple[int, int], float]) -> list[tuple[str, int, int, float]]:
    """Return the corners of the largest rectangle of runs: neither, one, and both grow.

    Its smaller corner is the smallest model with the fewest tokens; of the others the one of the
    most compute that has both neighbours is taken.

    Returns:
      (what grows, N, D, loss) of its four corners.
    """
    small, few = min(n for n, _ in losses), min(d for _, d in losses)
    corners = [
        (n, d)
        for n, d in losses
        if n > small and d > few and {(n, few), (small, d), (small, few)} <= losses.keys()
    ]
    if not corners:
        return []
    large, many = max(corners, key=lambda at: at[0] * at[1])
    named = {
        "neither": (small, few),
        "parameters": (large, few),
        "tokens": (small, many),
        "both": (large, many),
    }
    return [(name, *at, losses[at]) for name, at in named.items()]


def laws_at(
    losses: Mapping[tuple[int, int], float], fixed: int
) -> list[tuple[int, PowerLaw | None, int]]:
    """Return a power law of one of N and D at each value of the other that has 3 runs or more.

    Args:
      losses: By (N, D).
      fixed: 0: laws of D at each N. 1: laws of N at each D.

    Returns:
      (fixed value, law or None if the loss does not fall, number of runs), in order.
    """
    found = []
    for value in sorted({at[fixed] for at in losses}):
        points = sorted((at[1 - fixed], loss) for at, loss in losses.items() if at[fixed] == value)
        if len(points) < 3:
            continue
        x, y = np.array(points, float).T
        try:
            law: PowerLaw | None = fit_power_law(x, y)
        except ValueError:
            law = None
        found.append((value, law, len(points)))
    return found


def describe(losses: Mapping[tuple[int, int], float], analysis: Analysis, scale: str) -> str:
    """Return the findings as Markdown, with the scale at which they stand."""
    sizes, counts = (sorted({at[index] for at in losses}) for index in (0, 1))
    measured = markdown_table(
        ["N \\ D", *map(format_count, counts)],
        [
            [
                format_count(n),
                *(f"{losses[n, d]:.4f}" if (n, d) in losses else "" for d in counts),
            ]
            for n in sizes
        ],
    )
    rows = [
        [f"L({symbol}) at {other} = {format_count(value)}", *_law_cells(law), str(count)]
        for fixed, symbol, other in ((1, "N", "D"), (0, "D", "N"))
        for value, law, count in laws_at(losses, fixed)
    ]
    rows.append(["L(C), the best runs", *_law_cells(analysis.kaplan["compute"]), ""])
    singles = markdown_table(["law", "x_c", "α", "runs"], rows)
    joint = markdown_table(
        ["constant", "fit", "95% interval"],
        [
            [
                name,
                f"{getattr(analysis.law, name):.4g}",
                f"{analysis.intervals[name].low:.3g} to {analysis.intervals[name].high:.3g}",
            ]
            for name in CONSTANTS
        ],
    )
    parts = [
        scale,
        measured,
        "One variable at a time, L(x) = (x_c / x)^α (Kaplan et al. 2020):",
        singles,
        "Both, L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022), bootstrap over runs:",
        joint,
    ]
    if found := held_back(losses):
        first = found[0][-1]
        rows = [
            [name, format_count(n), format_count(d), f"{loss:.4f}", f"{loss - first:+.4f}"]
            for name, n, d, loss in found
        ]
        parts += [
            "The loss falls by what grows:",
            markdown_table(["grows", "N", "D", "loss", "change"], rows),
        ]
    if analysis.held_out is not None:
        held = analysis.held_out
        rows = [
            [format_count(n), format_count(d), f"{loss:.4f}", f"{predicted:.4f}", f"{error:+.2%}"]
            for n, d, loss, predicted, error in zip(
                *held.runs, held.predicted, held.relative_errors, strict=True
            )
        ]
        parts += [
            "The runs of the most compute, predicted by the joint law of the others:",
            markdown_table(["N", "D", "loss", "predicted", "error"], rows),
        ]
    return "\n\n".join([*parts, *(f"Note: {note}." for note in _notes(analysis))])


def _notes(analysis: Analysis) -> list[str]:
    """Return the notes; not that on L(N) through the best runs, which the page does not have."""
    return [note for note in analysis.notes if not note.startswith("L(")]


def _law_cells(law: PowerLaw | None) -> tuple[str, str]:
    return ("no fit", "") if law is None else (f"{law.scale:.3g}", f"{law.exponent:.4f}")


def main(
    widths: tuple[int, ...] = (64, 128, 192, 256),
    tokens: tuple[float, ...] = (2e5, 4e5, 8e5, 1.6e6, 3.2e6, 6.4e6, 1.28e7),
    max_flops: float = 1e14,
    budgets: tuple[float, ...] = (),
    seeds: int = 1,
    vocab_size: int = 1024,
    data: Path | None = None,
    workdir: Path = Path("runs/scaling"),
    output: Path = RESULTS,
    processes: int = 1,
    minutes: float = 0,
) -> None:
    """Train what is missing, and write scaling.md, scaling.json, scaling.csv and scaling.png."""
    sized = design(widths, tokens, max_flops, seeds, vocab_size, data)
    check_design(sized)
    runs = [each.run for each in sized]
    records = open_records("scaling", output)
    results = train_all(runs, workdir, records, processes=processes, minutes=minutes)
    analysis = fit_results(sized, results, budgets=budgets)
    output.mkdir(parents=True, exist_ok=True)
    (output / "scaling.csv").write_text(format_csv(analysis.runs))
    plot_scaling(analysis, output / "scaling.png")
    losses = mean_over_seeds(sized, results)
    scale = (
        f"{len(runs)} runs of the quickstart's recipe on {corpus_name(runs[0].experiment)} with a "
        f"vocabulary of {vocab_size:,}, "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'} of each, of up to "
        f"{format_count(max(losses)[0])} parameters N without embeddings and "
        f"{format_count(max(d for _, d in losses))} training "
        "tokens D: held-out loss in nats per token, mean over seeds. The laws hold at this scale "
        "only: no constant should be carried beyond these runs."
    )
    body = describe(losses, analysis, scale)
    plain: dict[str, Any] = analysis.as_dict()
    plain["fitted_runs"] = plain.pop("runs")  # `runs` is their number in every record
    write_record(
        "scaling",
        "Scaling laws",
        body,
        plain,
        results,
        trained_on=records.describe_machines(runs),
        folder=output,
    )


if __name__ == "__main__":
    run_study(main)
