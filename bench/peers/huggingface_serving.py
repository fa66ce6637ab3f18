"""Contender Hugging Face, `generate` of an exported run on one batch of prompts."""

from typing import Any

import torch
import transformers

from bench.protocol import Work, serve


def build(settings: dict[str, Any]) -> Work:
    """Load the export; a step continues all prompts, which have one length."""
    torch.set_num_threads(settings["threads"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["folder"]).to(device).eval()
    prompts = torch.tensor(settings["prompts"], device=device)
    count = settings["new_tokens"]

    @torch.inference_mode()
    def run(steps: int) -> None:
        for _ in range(steps):
            made = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=count,  # so that no row ends early
                max_new_tokens=count,
                do_sample=False,
            )
            assert made.cpu().shape == (len(prompts), prompts.shape[1] + count)

    return Work(
        run=run,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        facts={"parameters": sum(parameter.numel() for parameter in model.parameters())},
    )


if __name__ == "__main__":
    serve(build)
