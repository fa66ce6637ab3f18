"""Contender Hugging Face, decoding: ``GPT2LMHeadModel.generate`` with its key-value cache."""

from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from bench.peers.torch_step import device_of, peak_memory_bytes
from bench.protocol import Work, serve


def build(settings: dict[str, Any]) -> Work:
    """Build GPT-2 in the requested shape with random weights; a step continues new prompts."""
    device = device_of(settings)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=settings["vocabulary"],
            n_positions=settings["context"],
            n_embd=settings["width"],
            n_layer=settings["layers"],
            n_head=settings["heads"],
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    model = model.to(device, getattr(torch, settings["precision"])).eval()
    generator = torch.Generator().manual_seed(0)
    # A cache of fixed size is what generate compiles a step for, on a GPU.
    cache = {"cache_implementation": "static"} if settings["compile"] else {}
    batch, length, count = (settings[name] for name in ("batch", "prompt", "new_tokens"))

    @torch.inference_mode()
    def run(steps: int) -> None:
        for _ in range(steps):
            prompts = torch.randint(settings["vocabulary"], (batch, length), generator=generator)
            prompts = prompts.to(device)
            made = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=count,
                do_sample=False,
                **cache,
            )
            assert made.cpu().shape == (batch, length + count)

    return Work(
        run=run,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        facts={
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "threads": torch.get_num_threads(),
        },
        peak_memory=peak_memory_bytes,
    )


if __name__ == "__main__":
    serve(build)
