"""Stability: pre- against post-norm, with and without warm-up, by depth; gradients by layer.

    python -m bench.studies.stability [--depths 6 12 24 48] [--steps 300] [--minutes 10]

`versus:transformer` and the same with pre-norm, narrow, at several depths. Each is trained with and
without warm-up at one learning rate. A run that diverges is a result, not an error. The norm of the
loss's gradient in the weights of each layer is taken on held-out text, at the start and after
training with warm-up.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

import train
from bench.norm_placement import by_layer
from bench.small_runs import LENGTH, held_out
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
from train.assembly import make_task
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.schedules import ScheduleConfig
from train.run import Run
from train.scaling.design import SizeRules, model_of_width
from train.sweep.grid import SweepRun, run_name
from transformer import LanguageModel

RECIPES = {"post": "transformer", "pre": "transformer_pre_norm"}
WIDTH = 64


def experiment(
    placement: str, depth: int, warmup: int, *, rate: float, steps: int, batch_size: int = 16
) -> Experiment:
    """Return a run of a depth; `warmup` in steps."""
    base = EXPERIMENTS[RECIPES[placement]]
    narrow = model_of_width(base.model, WIDTH, SizeRules())
    return dataclasses.replace(
        base,
        model=dataclasses.replace(narrow, num_layers=depth, layer_loop="scan"),
        schedule=ScheduleConfig("cosine", learning_rate=rate, warmup_steps=warmup),
        steps=steps,
        batch_size=batch_size,
        evaluation=EvaluationConfig(every=0),
        sample=SampleConfig(),
        checkpoint=CheckpointConfig(every=100, keep_last=1),
    )


def gradient_norms(run: Run, params: Any) -> np.ndarray:  # [L]
    """Return the norm of the gradient in each layer, on one batch of held-out text."""
    model = run.model
    assert isinstance(model, LanguageModel)
    corpus: Any = make_task(run.experiment).prepare_corpus(run.tokenizer)
    rows = next(held_out(corpus.split("validation"), LENGTH, segments=False))

    def loss(params: Any) -> jax.Array:
        logits = model.apply({"params": params}, rows["tokens"]).logits
        assert logits is not None
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        return -jax.numpy.mean(
            jax.numpy.take_along_axis(log_probs, rows["targets"][..., None], axis=-1)
        )

    return by_layer(jax.jit(jax.grad(loss))(params)["layers"]["place_0"])


def measure_gradients(run: SweepRun, folder: Path) -> dict[str, list[float]]:
    """Return the norms by layer at the start and at the end of a first run with warm-up."""
    if run.experiment.seed or run.settings["warmup"] == "0":
        return {}
    loaded = train.load(str(folder))
    start = loaded.model.init_params(jax.random.key(0))
    return {
        name: [float(f"{norm:.4g}") for norm in gradient_norms(loaded, params)]
        for name, params in (("start", start), ("trained", loaded.params))
    }


def draw(norms: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    """Draw the norms by layer, a panel for each placement: at the start and after training."""
    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    panels = dict(zip(RECIPES, figure.subplots(1, 2, sharey=True), strict=True))
    depths = sorted({depth for _, depth in norms})
    for (placement, depth), pair in norms.items():
        shade = 0.1 + 0.75 * depths.index(depth) / max(1, len(depths) - 1)
        share = np.arange(1, depth + 1) / depth
        for values, style, when in zip(pair, ("-", ":"), ("start", "trained"), strict=True):
            label = f"{depth} layers, {when}"
            color = colormaps["viridis"](shade)
            panels[placement].semilogy(share, values, style, color=color, label=label)
    for placement, axes in panels.items():
        axes.set(title=f"{placement}-norm", xlabel="layer / number of layers")
        axes.grid(visible=True, alpha=0.2)
    panels["post"].set_ylabel("norm of a layer's gradient")
    panels["pre"].legend(frameon=False, fontsize="x-small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(
    depths: tuple[int, ...] = (6, 12, 24, 48),
    steps: int = 300,
    warmup: int = 100,
    rate: float = 2e-3,
    batch_size: int = 8,
    seeds: int = 3,
    workdir: Path = Path("runs/stability"),
    output: Path = RESULTS,
    processes: int = 1,
    minutes: float = 0,
) -> None:
    """Train what is missing, and write stability.md, stability.json and stability.png."""
    runs: list[SweepRun] = []
    for seed in range(seeds):
        for depth in depths:
            for placement in RECIPES:
                for rise in (warmup, 0):
                    settings = {"norm": placement, "depth": str(depth), "warmup": str(rise)}
                    norms_of_run = experiment(
                        placement, depth, rise, rate=rate, steps=steps, batch_size=batch_size
                    )
                    norms_of_run = dataclasses.replace(norms_of_run, seed=seed)
                    runs.append(single_run(run_name(settings, seed), settings, norms_of_run))
    records = open_records("stability", output)
    # A run that diverges is a result.
    results = train_all(
        runs,
        workdir,
        records,
        measure=measure_gradients,
        accept_failed=True,
        processes=processes,
        minutes=minutes,
    )
    norms: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}
    losses: dict[tuple[str, str, str], list[float]] = {}
    for run in runs:
        placement, layers, length = run.settings.values()
        result = results[run.name]
        losses.setdefault((layers, placement, length), []).append(result.value)
        if result.status == "finished" and (measured := records.measured(run)):
            norms[placement, int(layers)] = (
                np.array(measured["start"]),
                np.array(measured["trained"]),
            )
    draw(norms, output / "stability.png")

    def cell(depth: int, placement: str, length: int) -> str:
        values = losses[str(depth), placement, str(length)]
        finite = [value for value in values if math.isfinite(value)]
        failed = len(values) - len(finite)
        spread = f" ± {np.std(finite, ddof=1):.3f}" if len(finite) > 1 else ""
        shown = f"{np.mean(finite):.3f}{spread}" if finite else "failed"
        return f"{shown} ({failed} failed)" if finite and failed else shown

    def ratio(placement: str, depth: int, when: int) -> str:
        pair = norms.get((placement, depth))
        if pair is None:
            return "-"
        last_over_first = pair[when][-1] / pair[when][0]
        return f"{last_over_first:,.0f}" if last_over_first >= 100 else f"{last_over_first:.2f}"

    header = ["layers"]
    for placement in RECIPES:
        header += [f"{placement}, warm-up", f"{placement}, none"]
        header += [f"{placement}: gradient, start", "trained"]
    rows = []
    for depth in depths:
        row = [str(depth)]
        for placement in RECIPES:
            row += [cell(depth, placement, length) for length in (warmup, 0)]
            row += [ratio(placement, depth, when) for when in (0, 1)]
        rows.append(row)
    scale = (
        f"Width {WIDTH}, {steps} steps of {batch_size * LENGTH:,} tokens, peak learning rate "
        f"{rate:g}, warm-up of "
        f"{warmup} steps or none, {'one seed' if seeds == 1 else f'{seeds} seeds'}: held-out loss "
        f"in nats per token{'' if seeds == 1 else ' (mean and standard deviation)'}, and the norm "
        "of the last layer's gradient over that of the first, at the start and after training with "
        "warm-up. The findings hold at this scale only."
    )
    data = {
        "losses": {
            ",".join(key): [value if math.isfinite(value) else None for value in values]
            for key, values in losses.items()
        },
        "gradient_norms": {
            f"{placement},{depth}": {"start": first.tolist(), "trained": last.tolist()}
            for (placement, depth), (first, last) in norms.items()
        },
    }
    body = f"{scale}\n\n{markdown_table(header, rows)}"
    write_record(
        "stability",
        "Norm placement, warm-up and depth",
        body,
        data,
        results,
        trained_on=records.describe_machines(runs),
        folder=output,
    )


if __name__ == "__main__":
    run_study(main)
