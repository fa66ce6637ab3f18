"""Stability: pre- against post-norm, with and without warm-up, by depth; gradients by layer.

    python -m bench.studies.stability [--depths 6 12 24 48] [--steps 300] [--minutes 10]

`versus:transformer` and the same with pre-norm, narrow, at several depths. Each is trained with and
without warm-up at one learning rate. A run that diverges is a result, not an error. The norm of the
loss's gradient in the weights of each layer is taken on held-out text, at the start and after
training with warm-up.
"""

import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import train
from bench.claims.architecture import norms_by_layer
from bench.claims.small_runs import LENGTH, held_out
from bench.command import command
from bench.studies.record import (
    NO_LIMIT,
    Page,
    QueueFlags,
    Study,
    at_the_end,
    markdown_table,
    over_seeds,
    seeds_of,
    sweep_run,
)
from configs.versus import EXPERIMENTS
from train.assembly import make_task
from train.experiment import Experiment
from train.figures import shades
from train.optim.schedules import ScheduleConfig
from train.run import Run
from train.scaling.design import SizeRules, model_of_width
from train.sweep.grid import SweepRun
from transformer import LanguageModel

RECIPES = {"post": "transformer", "pre": "transformer_pre_norm"}
WIDTH = 64


def experiment(
    placement: str, depth: int, warmup: int, *, rate: float, steps: int, batch_size: int
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
    )


def gradient_norms(run: Run, params: Any) -> np.ndarray:  # [L]
    """Return the norm of the gradient in each layer, on one batch of held-out text."""
    model = run.model
    assert isinstance(model, LanguageModel)
    corpus: Any = make_task(run.experiment).prepare_corpus(run.tokenizer)
    rows = next(held_out(corpus.split("validation"), LENGTH, segments=False))

    def loss(params: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, rows["tokens"]).logits
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.mean(jnp.take_along_axis(log_probs, rows["targets"][..., None], axis=-1))

    return norms_by_layer(jax.jit(jax.grad(loss))(params)["layers"]["place_0"])


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


Norms = Mapping[tuple[str, int], Mapping[str, list[float]]]
"""By placement and depth, at the `start` and `trained`: the norm of each layer's gradient [L]."""


def draw(norms: Norms) -> Figure:
    """Draw the norms by layer, a panel for each placement."""
    figure = Figure(figsize=(9, 4.4))
    panels = dict(zip(RECIPES, figure.subplots(1, 2, sharey=True), strict=True))
    depths = sorted({depth for _, depth in norms})
    colors = dict(zip(depths, shades(len(depths)), strict=True))
    for (placement, depth), pair in norms.items():
        share = np.arange(1, depth + 1) / depth
        for when, style in (("start", "-"), ("trained", ":")):
            label = f"{depth} layers, {when}"
            look = {"color": colors[depth], "linestyle": style, "marker": "none"}
            panels[placement].semilogy(share, pair[when], label=label, **look)
    for placement, axes in panels.items():
        axes.set(title=f"{placement}-norm", xlabel="layer / number of layers")
    panels["post"].set_ylabel("norm of a layer's gradient")
    panels["pre"].legend(loc="lower left", ncols=2)
    return figure


@command
def main(
    depths: tuple[int, ...] = (6, 12, 24, 48),
    steps: int = 300,
    warmup: int = 100,
    rate: float = 2e-3,
    batch_size: int = 8,
    seeds: int = 3,
    queue: QueueFlags = NO_LIMIT,
) -> None:
    """Do pre- and post-norm train without warm-up, by depth, and how do gradients differ?"""
    study = Study("stability", queue)
    options: dict[str, Any] = {"rate": rate, "steps": steps, "batch_size": batch_size}
    runs = [
        sweep_run(
            {"norm": placement, "depth": str(depth), "warmup": str(rise)},
            at_the_end(experiment(placement, depth, rise, **options), seed),
        )
        for seed in range(seeds)
        for depth in depths
        for placement in RECIPES
        for rise in (warmup, 0)
    ]
    results = study.train(runs, measure=measure_gradients, accept_failed=True)
    norms: dict[tuple[str, int], Mapping[str, list[float]]] = {}
    losses: dict[tuple[str, str, str], list[float]] = {}
    for run in runs:
        placement, layers, rise = run.settings.values()
        result = results[run.name]
        losses.setdefault((layers, placement, rise), []).append(result.value)
        if result.status == "finished" and (measured := study.measured(run)):
            norms[placement, int(layers)] = measured

    def finite(depth: int, placement: str, rise: int) -> list[float]:
        return [x for x in losses[str(depth), placement, str(rise)] if math.isfinite(x)]

    def cell(depth: int, placement: str, rise: int) -> str:
        values = finite(depth, placement, rise)
        if not values:
            return "failed"
        failed = seeds - len(values)
        return over_seeds(values, 3) + (f" ({failed} failed)" if failed else "")

    def ratio(placement: str, depth: int, when: str) -> str:
        if (placement, depth) not in norms:
            return "-"
        found = norms[placement, depth][when]
        last_over_first = found[-1] / found[0]
        return f"{last_over_first:,.0f}" if last_over_first >= 100 else f"{last_over_first:.2f}"

    header = ["layers"]
    for placement in RECIPES:
        header += [f"{placement}, warm-up", f"{placement}, none"]
        header += [f"{placement}: gradient, start", "trained"]
    rows = [
        [
            str(depth),
            *(
                shown
                for placement in RECIPES
                for shown in (
                    cell(depth, placement, warmup),
                    cell(depth, placement, 0),
                    ratio(placement, depth, "start"),
                    ratio(placement, depth, "trained"),
                )
            ),
        ]
        for depth in depths
    ]

    def by_depth(placement: str, rise: int) -> str:
        means = [
            np.mean(values) if (values := finite(d, placement, rise)) else math.nan for d in depths
        ]
        return ", ".join(f"{mean:.2f}" if math.isfinite(mean) else "failed" for mean in means)

    page = Page(
        title="Norm placement, warm-up and depth",
        question="Do pre- and post-norm train without warm-up, by depth?",
        answer=(
            f"With {', '.join(map(str, depths))} layers the loss is {by_depth('pre', warmup)} for "
            f"pre-norm with warm-up and {by_depth('pre', 0)} without; for post-norm "
            f"{by_depth('post', warmup)} and {by_depth('post', 0)}. Predicting words by their "
            "frequency alone has 6.63."
        ),
        table=markdown_table(header, rows),
        settings=(
            f"Held-out loss in nats per token, and the norm of the last layer's gradient over that "
            f"of the first, at the start and after training with warm-up. Width {WIDTH}, {steps} "
            f"steps of {batch_size * LENGTH:,} tokens, peak learning rate {rate:g}, warm-up of "
            f"{warmup} steps or none, {seeds_of(seeds)}. The findings hold at this scale only."
        ),
    )
    data = {
        "losses": {
            ",".join(key): [value if math.isfinite(value) else None for value in values]
            for key, values in losses.items()
        },
        "gradient_norms": {
            f"{placement},{depth}": found for (placement, depth), found in norms.items()
        },
    }
    study.write(page, draw(norms), data)


if __name__ == "__main__":
    sys.exit(main())
