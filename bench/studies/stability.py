"""Stability: pre- against post-norm, with and without warm-up, by depth; gradients by layer.

`versus:transformer` and the same with pre-norm, narrow, at several depths. Each is trained with and
without warm-up at one learning rate. A run that diverges is a result, not an error. The norm of the
loss's gradient in the weights of each layer is taken on held-out text, at the start and after
training with warm-up.
"""

import dataclasses
import math
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
from bench.results import over_seeds
from bench.studies.record import Study, at_the_end, markdown_table, sweep_run
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
DEPTHS = (6, 12, 24, 48)
WARMUP = 100  # steps


def experiment(placement: str, depth: int, warmup: int, steps: int) -> Experiment:
    """Return a run of a depth; `warmup` in steps."""
    base = EXPERIMENTS[RECIPES[placement]]
    narrow = model_of_width(base.model, WIDTH, SizeRules())
    return dataclasses.replace(
        base,
        model=dataclasses.replace(narrow, num_layers=depth, layer_loop="scan"),
        schedule=ScheduleConfig("cosine", learning_rate=2e-3, warmup_steps=warmup),
        steps=steps,
        batch_size=8,
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


def main(steps: int = 300, seeds: int = 3, minutes: float = 0) -> None:
    """Do pre- and post-norm train without warm-up, by depth, and how do gradients differ?"""
    study = Study("stability", minutes)
    runs = [
        sweep_run(
            {"norm": placement, "depth": str(depth), "warmup": str(warmup)},
            at_the_end(experiment(placement, depth, warmup, steps), seed),
        )
        for seed in range(seeds)
        for depth in DEPTHS
        for placement in RECIPES
        for warmup in (WARMUP, 0)
    ]
    found = study.train(runs, measure=measure_gradients, accept_failed=True)
    norms: dict[tuple[str, int], Mapping[str, list[float]]] = {}
    losses: dict[tuple[str, str, str], list[float]] = {}
    for run in runs:
        placement, layers, warmup = run.settings.values()
        losses.setdefault((layers, placement, warmup), []).append(found[run.name].result.value)
        if measured := found[run.name].measured:
            norms[placement, int(layers)] = measured

    def loss(depth: int, placement: str, warmup: int) -> str:
        values = losses[str(depth), placement, str(warmup)]
        finite = [value for value in values if math.isfinite(value)]
        if len(finite) == seeds:
            return over_seeds(finite, 3)
        return f"{over_seeds(finite, 3)} ({seeds - len(finite)} failed)" if finite else "failed"

    def last_over_first(depth: int, placement: str, when: str) -> str:
        if (placement, depth) not in norms:
            return "-"
        of_layers = norms[placement, depth][when]
        ratio = of_layers[-1] / of_layers[0]
        return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2f}"

    header = ["layers"]
    for placement in RECIPES:
        header += [f"{placement}, warm-up", f"{placement}, none"]
        header += [f"{placement}: gradient, start", "trained"]
    rows = []
    for depth in DEPTHS:
        rows.append([str(depth)])
        for placement in RECIPES:
            rows[-1] += [loss(depth, placement, warmup) for warmup in (WARMUP, 0)]
            rows[-1] += [last_over_first(depth, placement, when) for when in ("start", "trained")]
    data = {
        "losses": {
            ",".join(key): [value if math.isfinite(value) else None for value in values]
            for key, values in losses.items()
        },
        "gradient_norms": {
            f"{placement},{depth}": found for (placement, depth), found in norms.items()
        },
    }
    study.write([markdown_table(header, rows)], draw(norms), data)
