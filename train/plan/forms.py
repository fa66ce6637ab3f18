"""Which forms of attention a step takes on its target."""

import dataclasses
from typing import Any

from train.describe.shape import window
from train.experiment import Experiment
from transformer.attend.choose import Form
from transformer.block import BlockConfig
from transformer.hardware import Hardware
from transformer.sizes import LayerMixer

KERNELS = ("cudnn", "splash")
"""Forms that only their own hardware, or its libraries, can trace."""


def form_of(experiment: Experiment, hardware: Hardware, layer: LayerMixer) -> Form | None:
    """The form of a layer's attention; None of other mixers."""
    length = window(experiment)[1]
    choice = layer.choice(experiment.model, length, hardware=hardware, segments=experiment.segments)
    return None if choice is None else choice.form


def traceable(experiment: Experiment, hardware: Hardware) -> Experiment:
    """The experiment with tiles in place of kernels: both keep the same for the backward pass."""
    model = experiment.model

    def replaced(block: BlockConfig) -> BlockConfig:
        layer = LayerMixer(block.mixer, model.causal, cross=False)
        if form_of(experiment, hardware, layer) not in KERNELS:
            return block
        mixer: Any = block.mixer
        return dataclasses.replace(block, mixer=dataclasses.replace(mixer, form="blockwise"))

    pattern = tuple(replaced(block) for block in model.pattern)
    return dataclasses.replace(experiment, model=dataclasses.replace(model, pattern=pattern))
