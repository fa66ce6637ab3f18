"""Contender Hugging Face, decoding: ``GPT2LMHeadModel.generate`` with its key-value cache."""

from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from bench.protocol import Work, serve


def build(settings: dict[str, Any]) -> Work:
    """Build GPT-2 in the requested shape with random weights; a step continues new prompts."""
    torch.set_num_threads(settings["threads"])
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
    ).eval()
    generator = torch.Generator().manual_seed(0)
    batch, length, count = (settings[name] for name in ("batch", "prompt", "new_tokens"))

    @torch.inference_mode()
    def run(steps: int) -> None:
        for _ in range(steps):
            prompts = torch.randint(settings["vocabulary"], (batch, length), generator=generator)
            made = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=count,
                do_sample=False,
            )
            assert made.shape == (batch, length + count)

    return Work(
        run=run,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        facts={
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "threads": torch.get_num_threads(),
        },
    )


if __name__ == "__main__":
    serve(build)
