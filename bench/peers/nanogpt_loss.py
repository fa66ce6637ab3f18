"""Loss of a trained nanoGPT over a whole text; nanoGPT itself samples a few batches.

    python -m bench.peers.nanogpt_loss CHECKOUT CHECKPOINT TOKENS

TOKENS is a file of uint16 ids, as nanoGPT prepares it. Prints {"loss": ...}: nats per token, over
windows that do not overlap; each token but the first is predicted once.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from bench.peers.nanogpt import load_model_file

WINDOWS_AT_ONCE = 64


def load(checkout: Path, checkpoint: Path) -> torch.nn.Module:
    """Return the model that nanoGPT's ``train.py`` saved."""
    source = load_model_file(checkout)
    saved = torch.load(checkpoint, map_location="cpu")
    model = source.GPT(source.GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    return model.eval()


@torch.no_grad()
def mean_loss(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Return the mean over all tokens [count] but the first, in windows of the context length."""
    window = model.config.block_size
    inputs, targets = tokens[:-1].split(window), tokens[1:].split(window)
    total = 0.0
    whole = len(targets[-1]) == window
    full = len(inputs) if whole else len(inputs) - 1
    for start in range(0, full, WINDOWS_AT_ONCE):
        stop = min(start + WINDOWS_AT_ONCE, full)
        total += _summed(model, torch.stack(inputs[start:stop]), torch.stack(targets[start:stop]))
    if not whole:
        total += _summed(model, inputs[-1][None], targets[-1][None])
    return total / (len(tokens) - 1)


def _summed(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    logits, _ = model(inputs, targets)
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()


def main() -> None:
    """Read the three arguments and print the loss."""
    checkout, checkpoint, tokens = (Path(argument) for argument in sys.argv[1:])
    ids = torch.from_numpy(np.fromfile(tokens, dtype=np.uint16).astype(np.int64))
    loss = mean_loss(load(checkout, checkpoint), ids)
    print(json.dumps({"loss": loss}))


if __name__ == "__main__":
    main()
