"""Full training step in PyTorch: forward, backward, clip, AdamW. On the GPU if there is one."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.protocol import Work, peak_resident_bytes

# (tokens [B, T], targets [B, T]) -> the mean loss, a scalar
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def device_of(settings: Mapping[str, Any]) -> torch.device:
    """Return the GPU, if there is one, else the CPU with the requested threads.

    On a GPU float32 products are rounded to TF32, as JAX's default precision does.
    """
    torch.set_num_threads(settings["threads"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def peak_memory_bytes() -> int:
    """Return the peak of the GPU's allocator, or of this process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()


def mixed_precision(settings: Mapping[str, Any], device: torch.device) -> Any:
    """Return a context that computes in bfloat16 over float32 weights, if the settings say so."""
    if settings["precision"] == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def torch_work(
    settings: dict[str, Any],
    model: torch.nn.Module,
    loss_of: Loss,
    optimizer: torch.optim.Optimizer,
    versions: dict[str, str],
) -> Work:
    """Return a step over new random tokens, with the model on its device."""
    batch = (settings["batch"], settings["context"] + 1)
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    model.train()

    def step() -> torch.Tensor:
        tokens = torch.randint(settings["vocabulary"], batch, generator=generator)
        if device.type == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        with mixed_precision(settings, device):
            loss = loss_of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def run(steps: int) -> float:
        for _ in range(steps - 1):
            step()
        last = step().item()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return last

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Work(
        run=run,
        versions={"torch": torch.__version__, **versions},
        facts={"parameters": parameters, "threads": torch.get_num_threads()},
        peak_memory=peak_memory_bytes,
    )


def decayed_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: only matrices decay."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
