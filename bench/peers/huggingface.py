"""Contender Hugging Face: GPT-2 or Llama with random weights, and its trainer's AdamW."""

from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bench.peers.torch_step import decayed_groups, device_of, torch_work
from bench.protocol import Work, serve

# "gelu_new" is what GPT-2's published configurations say.
ACTIVATIONS = {"erf": "gelu", "tanh": "gelu_new"}


def build(settings: dict[str, Any]) -> Work:
    """Build the model in the requested shape with random weights, without dropout."""
    device = device_of(settings)
    torch.manual_seed(0)
    is_llama = settings["family"] == "llama"
    made = LlamaForCausalLM(_llama(settings)) if is_llama else GPT2LMHeadModel(_config(settings))
    model = made.to(device)
    optimizer = torch.optim.AdamW(
        decayed_groups(model, settings["weight_decay"]),
        lr=settings["learning_rate"],
        betas=tuple(settings["betas"]),
        fused=True,  # the default of transformers.TrainingArguments
    )
    forward = torch.compile(model) if settings["compile"] else model

    # The model shifts labels itself. These targets are already shifted, so all T tokens count.
    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = forward(tokens, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    versions = {"transformers": transformers.__version__}
    return torch_work(settings, model, loss_of, optimizer, versions)


def _config(settings: dict[str, Any]) -> GPT2Config:
    return GPT2Config(
        vocab_size=settings["vocabulary"],
        n_positions=settings["context"],
        n_embd=settings["width"],
        n_layer=settings["layers"],
        n_head=settings["heads"],
        activation_function=ACTIVATIONS[settings["gelu"]],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )


def _llama(settings: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=settings["vocabulary"],
        hidden_size=settings["width"],
        intermediate_size=settings["width"] * 11 // 4,
        num_hidden_layers=settings["layers"],
        num_attention_heads=settings["heads"],
        max_position_embeddings=settings["context"],
        bos_token_id=None,
        eos_token_id=None,
    )


if __name__ == "__main__":
    serve(build)
