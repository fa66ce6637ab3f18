"""Resolve every `auto` of an experiment for some hardware; the choices are saved with the run."""

import dataclasses
from collections.abc import Mapping
from typing import cast

from train.experiment import Experiment
from transformer.attend import Form
from transformer.attention import AttentionConfig
from transformer.hardware import Hardware
from transformer.precision import AUTOMATIC
from transformer.sizes import LayerMixer
from transformer.stack import Loop, unrolls


def choices(experiment: Experiment, hardware: Hardware, parts: int = 1) -> dict[str, str]:
    """Setting -> what is used, and why; the tokens of a sequence lie in so many `parts`."""
    model, length = experiment.model, experiment.length
    chosen = {}
    for place, block in enumerate(model.pattern):
        choice = LayerMixer(block.mixer, model.causal).choice(
            model,
            length,
            hardware=hardware,
            segments=experiment.segments,
            parts=parts,
            meshed=experiment.compile == "jit",
        )
        if choice is not None:
            chosen[f"model.pattern.{place}.mixer.form"] = f"{choice.form} ({choice.why})"
    unrolled = unrolls(model.loop, model.remat, model.layers, hardware)
    chosen["model.loop"] = "unroll" if unrolled else "scan"
    chosen["flattened tokens"] = "yes" if hardware.flattens_tokens and parts == 1 else "no"
    return chosen


def with_precision(
    experiment: Experiment, hardware: Hardware, before: Experiment | None = None
) -> Experiment:
    """Return the experiment with `model.precision auto` decided for some hardware.

    A run that is resumed keeps the precision that it began with, whatever hardware it is on now.
    """
    model = experiment.model
    if before is not None and model.precision == AUTOMATIC:
        precision = before.model.precision
    else:
        precision = model.precision.on(hardware)
    if precision == model.precision:
        return experiment
    return dataclasses.replace(experiment, model=dataclasses.replace(model, precision=precision))


def fallen_back(chosen: Mapping[str, str], experiment: Experiment) -> dict[str, str]:
    """Return those of `choices` whose attention backend is not the one asked for by name."""
    found = {}
    for place, block in enumerate(experiment.model.pattern):
        name = f"model.pattern.{place}.mixer.form"
        asked = block.mixer.form if isinstance(block.mixer, AttentionConfig) else "auto"
        if asked != "auto" and asked != chosen.get(name, asked).partition(" ")[0]:
            found[name] = chosen[name]
    return found


def kept(experiment: Experiment, saved: Mapping[str, str], hardware: Hardware) -> Experiment:
    """The experiment with what a run chose before, where `auto` would be something else by now.

    Raises ValueError for a form that there is not.
    """
    now, model = choices(experiment, hardware), experiment.model
    pattern = list(model.pattern)
    for place, block in enumerate(pattern):
        name = f"model.pattern.{place}.mixer.form"
        form = saved.get(name, "").partition(" ")[0]
        if not isinstance(block.mixer, AttentionConfig) or block.mixer.form != "auto" or not form:
            continue
        if form != now[name].partition(" ")[0]:
            mixer = dataclasses.replace(block.mixer, form=cast(Form, form))
            pattern[place] = dataclasses.replace(block, mixer=mixer)
    if tuple(pattern) != model.pattern:
        model = dataclasses.replace(model, pattern=tuple(pattern))
    loop = saved.get("model.loop")
    if model.loop == "auto" and loop in ("scan", "unroll") and loop != now["model.loop"]:
        model = dataclasses.replace(model, loop=cast(Loop, loop))
    return dataclasses.replace(experiment, model=model)
