"""Full training step in PyTorch: forward, backward, clip, AdamW."""

from collections.abc import Callable
from typing import Any

import torch

from bench.protocol import Work

# (tokens [B, T], targets [B, T]) -> the mean loss, a scalar
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def torch_work(
    settings: dict[str, Any],
    model: torch.nn.Module,
    loss_of: Loss,
    optimizer: torch.optim.Optimizer,
    versions: dict[str, str],
) -> Work:
    """Return a float32 step over new random tokens."""
    batch = (settings["batch"], settings["context"] + 1)
    generator = torch.Generator().manual_seed(0)
    model.train()

    def step() -> torch.Tensor:
        tokens = torch.randint(settings["vocabulary"], batch, generator=generator)
        loss = loss_of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def run(steps: int) -> float:
        for _ in range(steps - 1):
            step()
        return step().item()

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Work(
        run=run,
        versions={"torch": torch.__version__, **versions},
        facts={"parameters": parameters, "threads": torch.get_num_threads()},
    )


def decayed_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: only matrices decay."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
