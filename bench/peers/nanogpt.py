"""Contender nanoGPT, from a local checkout: its model and its own choice of optimizer."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.peers.torch_step import device_of, torch_work
from bench.protocol import Work, serve

ACTIVATIONS = {
    "erf": torch.nn.GELU(),
    "tanh": torch.nn.GELU(approximate="tanh"),
}


def load_model_file(checkout: Path) -> ModuleType:
    """Import ``model.py`` of a nanoGPT checkout."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", checkout / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build(settings: dict[str, Any]) -> Work:
    """Build nanoGPT in the requested shape, with biases and without dropout."""
    device = device_of(settings)
    torch.manual_seed(0)
    source = load_model_file(Path(settings["checkout"]))
    model = source.GPT(
        source.GPTConfig(
            block_size=settings["context"],
            vocab_size=settings["vocabulary"],
            n_layer=settings["layers"],
            n_head=settings["heads"],
            n_embd=settings["width"],
            dropout=0.0,
            bias=True,
        )
    )
    for block in model.transformer.h:
        block.mlp.gelu = ACTIVATIONS[settings["gelu"]]
    model.to(device)
    optimizer = model.configure_optimizers(
        settings["weight_decay"], settings["learning_rate"], tuple(settings["betas"]), device.type
    )
    forward = torch.compile(model) if settings["compile"] else model
    return torch_work(settings, model, lambda x, y: forward(x, y)[1], optimizer, versions={})


if __name__ == "__main__":
    serve(build)
