"""Scaling laws: one law for each of parameters, data and compute, and the joint law of two.

    python -m bench.studies.scaling [--data DATA] [--max-flops 1e14] [--minutes 10]

The corpus is the source of Python's standard library, or WikiText-2 in DATA/wikitext-2/. The
quickstart's recipe at every width and number of training tokens, except where that takes more
than `max_flops`. `python -m train scaling` designs, trains and fits such runs; this study adds what
the laws mean: how far the loss falls if parameters grow and tokens do not, the reverse, and both.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.claims.small_runs import corpus_name, on_wikitext
from bench.command import command
from bench.studies.record import NO_LIMIT, Page, QueueFlags, Study, markdown_table
from configs.quickstart import EXPERIMENTS
from train.experiment import CheckpointConfig
from train.scaling.analysis import CONSTANTS, Analysis
from train.scaling.design import SizedRun, SizeRules, design_runs, format_count, model_of_width
from train.scaling.laws import PowerLaw, fit_power_law
from train.scaling.scaling_report import check_design, draw_scaling, fit_results
from train.sweep.sweep_folder import RunResult


def design(
    widths: Sequence[int],
    tokens: Sequence[float],
    max_flops: float,
    seeds: int,
    vocab_size: int,
    data: Path | None,
) -> list[SizedRun]:
    """Return the runs of the quickstart's recipe, in the order of their compute."""
    base = on_wikitext(EXPERIMENTS["quickstart"], data)
    tokenizer = dataclasses.replace(base.text_data.tokenizer, vocab_size=vocab_size)
    text = dataclasses.replace(base.text_data, tokenizer=tokenizer)
    checkpoint = CheckpointConfig(every=400, keep_last=1)
    base, rules = dataclasses.replace(base, data=text, checkpoint=checkpoint), SizeRules()
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


def loss_table(losses: Mapping[tuple[int, int], float]) -> str:
    """Return the loss by N (rows) and D (columns) as Markdown."""
    sizes, counts = (sorted({at[index] for at in losses}) for index in (0, 1))
    rows = [
        [format_count(n), *(f"{losses[n, d]:.4f}" if (n, d) in losses else "" for d in counts)]
        for n in sizes
    ]
    return markdown_table(["N \\ D", *map(format_count, counts)], rows)


def describe(losses: Mapping[tuple[int, int], float], analysis: Analysis) -> list[str]:
    """Return the fits as paragraphs and tables of Markdown."""
    constants = [
        [
            name,
            f"{getattr(analysis.law, name):.4g}",
            f"{analysis.intervals[name].low:.3g} to {analysis.intervals[name].high:.3g}",
        ]
        for name in CONSTANTS
    ]
    singles = [
        [f"L({symbol}) at {other} = {format_count(value)}", *_law_cells(law), str(count)]
        for fixed, symbol, other in ((1, "N", "D"), (0, "D", "N"))
        for value, law, count in laws_at(losses, fixed)
    ]
    singles.append(["L(C), the best runs", *_law_cells(analysis.kaplan["compute"]), ""])
    parts = [
        "L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022), bootstrap over runs:",
        markdown_table(["constant", "fit", "95% interval"], constants),
        "One variable at a time, L(x) = (x_c / x)^α (Kaplan et al. 2020):",
        markdown_table(["law", "x_c", "α", "runs"], singles),
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
    if held := analysis.held_out:
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
    # The page has no law of N through the best runs, so no note on it.
    notes = [f"Note: {note}." for note in analysis.notes if not note.startswith("L(")]
    return [*parts, *notes]


def answer(losses: Mapping[tuple[int, int], float], analysis: Analysis) -> str:
    """Return what was found in two sentences."""
    law, found = analysis.law, {name: loss for name, *_, loss in held_back(losses)}
    powers = f"{law.A:.3g} / N^{law.alpha:.2g} + {law.B:.3g} / D^{law.beta:.2g}"
    sentences = [f"By the joint law: L = {law.E:.3g} + {powers} nats."]
    if analysis.held_out is not None:
        worst = np.abs(analysis.held_out.relative_errors).max()
        sentences.append(
            f"Fitted to the others, it predicts the runs of the most compute within {worst:.1%}."
        )
    if found:
        gains = [found["neither"] - found[name] for name in ("parameters", "tokens", "both")]
        sentences.append(
            "From the smallest run on, the loss falls by {:.3f} if parameters grow alone, by {:.3f}"
            " if tokens do, by {:.3f} if both do.".format(*gains)
        )
    return " ".join(sentences)


def _law_cells(law: PowerLaw | None) -> tuple[str, str]:
    return ("no fit", "") if law is None else (f"{law.scale:.3g}", f"{law.exponent:.4f}")


@command
def main(
    widths: tuple[int, ...] = (64, 128, 192, 256),
    tokens: tuple[float, ...] = (2e5, 4e5, 8e5, 1.6e6, 3.2e6, 6.4e6, 1.28e7),
    max_flops: float = 1e14,
    budgets: tuple[float, ...] = (),
    seeds: int = 1,
    vocab_size: int = 1024,
    data: Path | None = None,
    queue: QueueFlags = NO_LIMIT,
) -> None:
    """How does the loss fall with parameters, with tokens and with both?"""
    sized = design(widths, tokens, max_flops, seeds, vocab_size, data)
    check_design(sized)
    study = Study("scaling", queue)
    results = study.train([each.run for each in sized])
    analysis = fit_results(sized, results, budgets=budgets)
    losses = mean_over_seeds(sized, results)
    page = Page(
        title="Scaling laws",
        question="How does the loss fall with parameters N, with tokens D and with both?",
        answer=answer(losses, analysis),
        table=loss_table(losses),
        settings=(
            f"Held-out loss in nats per token. {len(sized)} runs of the quickstart's recipe on "
            f"{corpus_name(sized[0].run.experiment)} with a vocabulary of {vocab_size:,}, "
            f"{seeds} {'seed' if seeds == 1 else 'seeds'} of each; N without embeddings. The laws "
            "hold at this scale only: no constant should be carried beyond these runs."
        ),
        more=["## Fits", *describe(losses, analysis)],
    )
    plain: dict[str, Any] = analysis.as_dict()
    plain["fitted_runs"] = plain.pop("runs")  # `runs` is their number in every record
    study.write(page, draw_scaling(analysis), plain)


if __name__ == "__main__":
    sys.exit(main())
