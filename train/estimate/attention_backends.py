"""Which forms of attention a step takes on its target.

One way of training an experiment on a target: what a search goes through.

Every way of cutting a step for a target, ranked by the estimates.

`fit --mesh auto`: the mesh that a plan for the devices that are here would take.
"""

import dataclasses
from typing import Any

from train.estimate.batch_shapes import max_batch_shape
from train.experiment import Experiment
from transformer.attention.config import Backend
from transformer.config import BlockConfig
from transformer.hardware import Hardware
from transformer.parameter_counts import LayerMixer

HARDWARE_KERNELS = ("cudnn", "splash")
"""Forms that only their own hardware, or its libraries, can trace."""


def layer_backend(experiment: Experiment, hardware: Hardware, layer: LayerMixer) -> Backend | None:
    """The form of a layer's attention; None of other mixers."""
    length = max_batch_shape(experiment)[1]
    choice = layer.backend_choice(
        experiment.model, length, hardware=hardware, segments=experiment.has_segments
    )
    return None if choice is None else choice.backend


def replace_kernels(experiment: Experiment, hardware: Hardware) -> Experiment:
    """The experiment with tiles in place of kernels: both keep the same for the backward pass."""
    model = experiment.model

    def replaced(block: BlockConfig) -> BlockConfig:
        layer = LayerMixer(block.mixer, model.causal, cross=False)
        if layer_backend(experiment, hardware, layer) not in HARDWARE_KERNELS:
            return block
        mixer: Any = block.mixer
        return dataclasses.replace(block, mixer=dataclasses.replace(mixer, backend="blockwise"))

    pattern = tuple(replaced(block) for block in model.layer_pattern)
    return dataclasses.replace(experiment, model=dataclasses.replace(model, layer_pattern=pattern))
