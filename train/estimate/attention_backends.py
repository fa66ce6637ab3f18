"""Attention backends of an experiment's layers on a target."""

import dataclasses
from typing import Any

from train.estimate.batch_shapes import max_batch_shape
from train.experiment import Experiment
from transformer.attention.config import Backend
from transformer.config import BlockConfig
from transformer.hardware import Hardware
from transformer.parameter_counts import LayerMixer

HARDWARE_KERNELS = ("cudnn", "splash")
"""Backends that can be traced only on their own hardware."""


def layer_backend(experiment: Experiment, hardware: Hardware, layer: LayerMixer) -> Backend | None:
    """Return the attention backend of a layer; None for other mixers."""
    length = max_batch_shape(experiment)[1]
    choice = layer.backend_choice(
        experiment.model, length, hardware=hardware, segments=experiment.has_segments
    )
    return None if choice is None else choice.backend


def replace_kernels(experiment: Experiment, hardware: Hardware) -> Experiment:
    """Return the experiment with `blockwise` in place of hardware kernels.

    Both save the same residuals, and `blockwise` can be traced on any machine.
    """
    model = experiment.model

    def replaced(block: BlockConfig) -> BlockConfig:
        layer = LayerMixer(block.mixer, model.causal, cross=False)
        if layer_backend(experiment, hardware, layer) not in HARDWARE_KERNELS:
            return block
        mixer: Any = block.mixer
        return dataclasses.replace(block, mixer=dataclasses.replace(mixer, backend="blockwise"))

    pattern = tuple(replaced(block) for block in model.layer_pattern)
    return dataclasses.replace(experiment, model=dataclasses.replace(model, layer_pattern=pattern))
