"""Contender PyTorch: causal softmax attention alone, forward and backward."""

from typing import Any

import numpy as np
import torch

from bench.protocol import Work, peak_resident_bytes, resident_bytes, serve


def build(settings: dict[str, Any]) -> Work:
    """Build `scaled_dot_product_attention`; a step ends with three gradients."""
    torch.set_num_threads(settings["threads"])
    shape = (4, 1, settings["length"], settings["num_heads"], settings["head_dim"])
    drawn = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    *heads, cotangent = (torch.from_numpy(each).transpose(1, 2).contiguous() for each in drawn)
    q, k, v = (each.requires_grad_() for each in heads)
    before = resident_bytes()

    def step() -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(y, (q, k, v), cotangent)

    def run(steps: int) -> float:
        for _ in range(steps - 1):
            step()
        gradients = step()
        return sum(each.abs().mean().item() for each in gradients)

    versions = {"torch": torch.__version__}
    facts = {"threads": torch.get_num_threads()}
    return Work(run, versions, facts, lambda: peak_resident_bytes() - before)


if __name__ == "__main__":
    serve(build)
