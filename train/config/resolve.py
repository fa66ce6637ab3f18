"""Resolve every `auto` of an experiment for some hardware; the choices are saved with the run."""

import dataclasses
from collections.abc import Mapping
from typing import cast

from train.experiment import Experiment
from transformer.attention.config import AttentionConfig, Backend
from transformer.config import LayerLoop
from transformer.hardware import Hardware
from transformer.layers.stack import should_unroll
from transformer.parameter_counts import LayerMixer
from transformer.precision import AUTO_POLICY


def resolve_auto(
    experiment: Experiment, hardware: Hardware, context_shards: int = 1
) -> dict[str, str]:
    """Setting -> what is used, and why; the tokens of a sequence lie in so many `context_shards`."""
    model, length = experiment.model, experiment.sequence_length
    chosen = {}
    for place, block in enumerate(model.layer_pattern):
        choice = LayerMixer(block.mixer, model.causal).backend_choice(
            model,
            length,
            hardware=hardware,
            segments=experiment.has_segments,
            context_shards=context_shards,
            mesh_known=experiment.compile == "jit",
        )
        if choice is not None:
            chosen[f"model.layer_pattern.{place}.mixer.backend"] = (
                f"{choice.backend} ({choice.reason})"
            )
    unrolled = should_unroll(model.layer_loop, model.remat, model.num_layers)
    chosen["model.layer_loop"] = "unroll" if unrolled else "scan"
    chosen["flattened tokens"] = "yes" if hardware.platform == "cpu" and context_shards == 1 else "no"
    return chosen


def resolve_precision(
    experiment: Experiment, hardware: Hardware, previous: Experiment | None = None
) -> Experiment:
    """Return the experiment with `model.precision auto` decided for some hardware.

    A run that is resumed keeps the precision that it began with, whatever hardware it is on now.
    """
    model = experiment.model
    if previous is not None and model.precision == AUTO_POLICY:
        precision = previous.model.precision
    else:
        precision = model.precision.resolve(hardware)
    if precision == model.precision:
        return experiment
    return dataclasses.replace(experiment, model=dataclasses.replace(model, precision=precision))


def unavailable_backends(choices: Mapping[str, str], experiment: Experiment) -> dict[str, str]:
    """Return those of `choices` whose attention backend is not the one asked for by name."""
    found = {}
    for place, block in enumerate(experiment.model.layer_pattern):
        name = f"model.layer_pattern.{place}.mixer.backend"
        asked = block.mixer.backend if isinstance(block.mixer, AttentionConfig) else "auto"
        if asked != "auto" and asked != choices.get(name, asked).partition(" ")[0]:
            found[name] = choices[name]
    return found


def pin_auto(experiment: Experiment, saved: Mapping[str, str], hardware: Hardware) -> Experiment:
    """The experiment with what a run chose before, where `auto` would be something else by now.

    Raises ValueError for a form that there is not.
    """
    now, model = resolve_auto(experiment, hardware), experiment.model
    pattern = list(model.layer_pattern)
    for place, block in enumerate(pattern):
        name = f"model.layer_pattern.{place}.mixer.backend"
        form = saved.get(name, "").partition(" ")[0]
        if (
            not isinstance(block.mixer, AttentionConfig)
            or block.mixer.backend != "auto"
            or not form
        ):
            continue
        if form != now[name].partition(" ")[0]:
            mixer = dataclasses.replace(block.mixer, backend=cast(Backend, form))
            pattern[place] = dataclasses.replace(block, mixer=mixer)
    if tuple(pattern) != model.layer_pattern:
        model = dataclasses.replace(model, layer_pattern=tuple(pattern))
    loop = saved.get("model.layer_loop")
    if (
        model.layer_loop == "auto"
        and loop in ("scan", "unroll")
        and loop != now["model.layer_loop"]
    ):
        model = dataclasses.replace(model, layer_loop=cast(LayerLoop, loop))
    return dataclasses.replace(experiment, model=model)
