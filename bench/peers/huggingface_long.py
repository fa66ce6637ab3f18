"""Contender Hugging Face, one module: Longformer's or BigBird's attention, forward."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.models.big_bird.modeling_big_bird import (
    BigBirdBlockSparseAttention,
    BigBirdModel,
)
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from bench.protocol import Work, peak_resident_bytes, resident_bytes, serve


def build(settings: dict[str, Any]) -> Work:
    """Build the module and its output matrix with random weights; a step is a forward pass."""
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    x = torch.randn(1, settings["length"], settings["width"])
    module, call = MODULES[settings["mixer"]](settings)
    output = torch.nn.Linear(settings["width"], settings["width"])
    module.eval()
    before = resident_bytes()

    @torch.inference_mode()
    def run(steps: int) -> None:
        for _ in range(steps):
            output(call(x)[0])

    parameters = [*module.parameters(), *output.parameters()]
    return Work(
        run=run,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        facts={
            "parameters": sum(parameter.numel() for parameter in parameters),
            "threads": torch.get_num_threads(),
        },
        peak_memory=lambda: peak_resident_bytes() - before,
    )


Made = tuple[torch.nn.Module, Callable[[Any], Any]]


def longformer(settings: dict[str, Any]) -> Made:
    """Build Longformer: the first token is global, the window counts both sides."""
    config = transformers.LongformerConfig(
        hidden_size=settings["width"],
        num_attention_heads=settings["heads"],
        attention_window=[2 * settings["window"]],
    )
    module = LongformerSelfAttention(config, 0)
    first = torch.arange(settings["length"])[None] == 0
    given: Any = dict(
        attention_mask=first * 10_000.0,
        is_index_masked=torch.zeros_like(first),
        is_index_global_attn=first,
        is_global_attn=True,
    )
    return module, lambda x: module(x, **given)


def bigbird(settings: dict[str, Any]) -> Made:
    """Build the block module itself, because its model computes short inputs in full."""
    config = transformers.BigBirdConfig(
        hidden_size=settings["width"],
        num_attention_heads=settings["heads"],
        block_size=settings["block"],
        max_position_embeddings=settings["length"],
    )
    module = BigBirdBlockSparseAttention(config)
    real = torch.ones(1, settings["length"])
    blocked, band, own, theirs = BigBirdModel.create_masks_for_block_sparse_attn(
        real, settings["block"]
    )
    return module, lambda x: module(x, band, own, theirs, blocked, blocked)


MODULES: dict[str, Callable[[dict[str, Any]], Made]] = {
    "longformer": longformer,
    "bigbird": bigbird,
}


if __name__ == "__main__":
    serve(build)
