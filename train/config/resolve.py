"""Resolution of `auto` settings for some hardware. The choices are saved with the run."""

import dataclasses
from collections.abc import Mapping
from typing import cast

from train.experiment import Experiment
from transformer.attention.backends.choose import Backend
from transformer.attention.full import AttentionConfig
from transformer.hardware import Hardware
from transformer.models.stack import LayerLoop, should_unroll
from transformer.parameter_counts import LayerMixer
from transformer.precision import AUTO_POLICY

LAYER_LOOP = "model.layer_loop"


def backend_field(index: int) -> str:
    """Return the name of the attention backend of a place in the layer pattern."""
    return f"model.layer_pattern.{index}.mixer.backend"


def resolve_auto(
    experiment: Experiment, hardware: Hardware, context_shards: int = 1
) -> dict[str, str]:
    """Return what each `auto` setting becomes on some hardware, by field name, with a reason.

    `context_shards` is the number of shards of a sequence's tokens (context parallelism).
    """
    model, length = experiment.model, experiment.sequence_length
    if experiment.compile == "pmap":
        hardware = dataclasses.replace(hardware, count=1)
    choices = {}
    for index, block in enumerate(model.layer_pattern):
        choice = LayerMixer(block.mixer, model.causal).backend_choice(
            model,
            length,
            hardware=hardware,
            segments=experiment.has_segments,
            context_shards=context_shards,
            # As the model will ask: its activations are constrained to a mesh by `jit` alone, and
            # on one device not at all. `choose_backend` then answers the model from its cache.
            mesh_known=experiment.compile == "jit" and hardware.count > 1,
        )
        if choice is not None:
            choices[backend_field(index)] = f"{choice.backend} ({choice.reason})"
    unroll = should_unroll(model.layer_loop, model.remat, model.num_layers, hardware)
    choices[LAYER_LOOP] = "unroll" if unroll else "scan"
    flatten = hardware.platform == "cpu" and context_shards == 1
    choices["flattened tokens"] = "yes" if flatten else "no"
    return choices


def resolve_precision(
    experiment: Experiment, hardware: Hardware, previous: Experiment | None = None
) -> Experiment:
    """Return the experiment with `model.precision auto` resolved for some hardware.

    A resumed run (`previous`) keeps the precision that it began with, whatever the hardware.
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
    fallbacks = {}
    for index, block in enumerate(experiment.model.layer_pattern):
        name = backend_field(index)
        requested = block.mixer.backend if isinstance(block.mixer, AttentionConfig) else "auto"
        if requested != "auto" and requested != _backend_of(choices.get(name, requested)):
            fallbacks[name] = choices[name]
    return fallbacks


def pin_auto(experiment: Experiment, saved: Mapping[str, str], hardware: Hardware) -> Experiment:
    """Return the experiment with saved choices in place of `auto`, where they would differ now.

    `saved` are the choices that `resolve_auto` made when the run began.

    Raises:
      ValueError: a saved backend does not exist.
    """
    now, model = resolve_auto(experiment, hardware), experiment.model
    pattern = list(model.layer_pattern)
    for index, block in enumerate(pattern):
        name = backend_field(index)
        backend = _backend_of(saved.get(name, ""))
        mixer = block.mixer
        if not isinstance(mixer, AttentionConfig) or mixer.backend != "auto" or not backend:
            continue
        if backend != _backend_of(now[name]):
            mixer = dataclasses.replace(mixer, backend=cast(Backend, backend))
            pattern[index] = dataclasses.replace(block, mixer=mixer)
    if tuple(pattern) != model.layer_pattern:
        model = dataclasses.replace(model, layer_pattern=tuple(pattern))
    loop = saved.get(LAYER_LOOP)
    if model.layer_loop == "auto" and loop in ("scan", "unroll") and loop != now[LAYER_LOOP]:
        model = dataclasses.replace(model, layer_loop=cast(LayerLoop, loop))
    return dataclasses.replace(experiment, model=model)


def _backend_of(choice: str) -> str:
    """Return the backend of a choice, without the reason."""
    return choice.partition(" ")[0]
