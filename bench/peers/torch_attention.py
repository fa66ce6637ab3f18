"""Contender PyTorch: causal softmax attention alone, forward and backward."""

from typing import Any

import numpy as np
import torch

from bench.peers.torch_step import device_of, peak_memory_bytes
from bench.protocol import Work, resident_bytes, serve


def build(settings: dict[str, Any]) -> Work:
    """Build `scaled_dot_product_attention`; a step ends with three gradients.

    Windows and segments are a dense mask, which its flash kernel does not take.
    """
    device = device_of(settings)
    batch, length = settings["batch"], settings["length"]
    shape = (4, batch, length, settings["num_heads"], settings["head_dim"])
    drawn = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    dtype = getattr(torch, settings["precision"])
    *heads, cotangent = (
        torch.from_numpy(each).to(device, dtype).transpose(1, 2).contiguous() for each in drawn
    )
    q, k, v = (each.requires_grad_() for each in heads)
    mask = _dense_mask(settings, device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else resident_bytes()

    def step() -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )
        return torch.autograd.grad(y, (q, k, v), cotangent)

    def run(steps: int) -> float:
        for _ in range(steps - 1):
            step()
        gradients = step()
        return sum(each.float().abs().mean().item() for each in gradients)

    versions = {"torch": torch.__version__}
    facts = {"threads": torch.get_num_threads()}
    return Work(run, versions, facts, lambda: peak_memory_bytes() - before)


def _dense_mask(settings: dict[str, Any], device: torch.device) -> torch.Tensor | None:
    """Return the visible keys of each query [T, T], or None for a causal mask alone."""
    length, window, segments = settings["length"], settings["window"], settings["segments"]
    if not window and not segments:
        return None
    token = torch.arange(length, device=device)
    distance = token[:, None] - token[None, :]
    visible = distance >= 0
    if window:
        visible &= distance < window
    if segments:
        document = token * segments // length
        visible &= document[:, None] == document[None, :]
    return visible


if __name__ == "__main__":
    serve(build)
