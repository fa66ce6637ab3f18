"""The other side of the races: PyTorch, nanoGPT, Hugging Face, on the GPU if there is one.

`python -m bench.race.peers NAME SETTINGS`, as `bench.race.harness` does, with an interpreter that
has PyTorch and need not have this project's libraries. transformers is imported by
the work that needs it: nanoGPT and PyTorch alone do without.
"""

import contextlib
import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from bench.race.protocol import Work, peak_resident_bytes, resident_bytes, serve, status_bytes

Settings = dict[str, Any]


def use_device(settings: Settings) -> torch.device:
    """Return the GPU, if there is one, else the CPU with the requested threads.

    On a GPU float32 products are rounded to TF32, as JAX's default precision does.
    """
    torch.set_num_threads(settings["threads"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def peak_bytes() -> int:
    """Return the peak of the GPU's allocator, or of this process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()


def facts_of(libraries: Sequence[ModuleType], *modules: torch.nn.Module) -> dict[str, int | str]:
    """Return versions, the number of parameters and of threads."""
    found: dict[str, int | str] = {each.__name__: each.__version__ for each in (torch, *libraries)}
    found["parameters"] = sum(p.numel() for module in modules for p in module.parameters())
    return {**found, "threads": torch.get_num_threads()}


# A training step: forward, backward, clip, AdamW --------------------------------------------------

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens [B, T], targets [B, T]) -> the mean loss, a scalar."""


def training(
    settings: Settings,
    model: torch.nn.Module,
    loss_of: Loss,
    optimizer: torch.optim.Optimizer,
    facts: dict[str, int | str],
) -> Work:
    """Return a step over new random tokens, with the model on its device."""
    size = (settings["batch"], settings["context"] + 1)
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    model.train()

    def train() -> torch.Tensor:
        tokens = torch.randint(settings["vocabulary"], size, generator=generator)
        if device.type == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        mixed = settings["precision"] == "bfloat16"  # products alone: weights stay float32
        with torch.autocast(device.type, torch.bfloat16) if mixed else contextlib.nullcontext():
            loss = loss_of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def run(steps: int) -> float:
        for _ in range(steps - 1):
            train()
        last = train().item()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return last

    return Work(run, facts, peak_bytes)


def nanogpt(settings: Settings) -> Work:
    """Build nanoGPT of a checkout, with biases and without dropout, and its own optimizer."""
    device = use_device(settings)
    source = _nanogpt_source(settings["checkout"])
    model = source.GPT(
        source.GPTConfig(
            block_size=settings["context"],
            vocab_size=settings["vocabulary"],
            n_layer=settings["layers"],
            n_head=settings["heads"],
            n_embd=settings["width"],
            dropout=0.0,
            bias=True,
        )
    )
    model.to(device)
    optimizer = model.configure_optimizers(
        settings["weight_decay"], settings["learning_rate"], tuple(settings["betas"]), device.type
    )
    forward = torch.compile(model) if settings["compile"] else model
    return training(settings, model, lambda x, y: forward(x, y)[1], optimizer, facts_of((), model))


def _nanogpt_source(checkout: str) -> ModuleType:
    """Import ``model.py`` of a nanoGPT checkout."""
    sys.path.insert(0, checkout)
    return importlib.import_module("model")


def nanogpt_loss(settings: Settings) -> Work:
    """Return the loss of a trained nanoGPT over a whole text; nanoGPT itself samples batches.

    Nats per token, over windows that do not overlap; each token but the first is predicted once.
    """
    source = _nanogpt_source(settings["checkout"])
    saved = torch.load(settings["checkpoint"], map_location="cpu")
    model = source.GPT(source.GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    model.eval()
    tokens = torch.from_numpy(np.fromfile(settings["tokens"], np.uint16).astype(np.int64))

    def summed(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        logits, _ = model(inputs, targets)
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()

    @torch.no_grad()
    def run(steps: int) -> float:
        window = model.config.block_size
        count = (len(tokens) - 1) // window  # whole windows; the rest follows
        inputs = tokens[: count * window].view(count, window).split(64)
        targets = tokens[1 : count * window + 1].view(count, window).split(64)
        total = sum(summed(x, y) for x, y in zip(inputs, targets, strict=True))
        rest = tokens[count * window :][None]
        if rest.shape[1] > 1:
            total += summed(rest[:, :-1], rest[:, 1:])
        return total / (len(tokens) - 1)

    return Work(run)


def huggingface(settings: Settings) -> Work:
    """Build GPT-2 with random weights, without dropout, and its trainer's AdamW."""
    import transformers

    device = use_device(settings)
    model: torch.nn.Module = transformers.GPT2LMHeadModel(_gpt2(settings))
    model.to(device)
    parameters, decay = list(model.parameters()), settings["weight_decay"]
    optimizer = torch.optim.AdamW(
        [  # only matrices decay
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=settings["learning_rate"],
        betas=tuple(settings["betas"]),
        fused=True,  # the default of transformers.TrainingArguments
    )
    forward = torch.compile(model) if settings["compile"] else model

    # The model shifts labels itself. These targets are already shifted, so all T tokens count.
    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = forward(tokens, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    return training(settings, model, loss_of, optimizer, facts_of((transformers,), model))


def _gpt2(settings: Settings) -> Any:
    """Return the configuration of GPT-2 in the requested shape, without dropout."""
    import transformers

    return transformers.GPT2Config(
        vocab_size=settings["vocabulary"],
        n_positions=settings["context"],
        n_embd=settings["width"],
        n_layer=settings["layers"],
        n_head=settings["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )


# Decoding -----------------------------------------------------------------------------------------


def decode(settings: Settings) -> Work:
    """Build GPT-2 with random weights; a step continues new prompts by `generate`."""
    import transformers

    device = use_device(settings)
    model = transformers.GPT2LMHeadModel(_gpt2(settings))
    model = model.to(device, getattr(torch, settings["precision"])).eval()
    generator = torch.Generator().manual_seed(0)
    batch, length, count = (settings[name] for name in ("batch", "prompt", "new_tokens"))

    @torch.inference_mode()
    def run(steps: int) -> None:
        for _ in range(steps):
            prompts = torch.randint(settings["vocabulary"], (batch, length), generator=generator)
            _continue(model, prompts.to(device), count)

    return Work(run, facts_of((transformers,), model), peak_bytes)


def serving(settings: Settings) -> Work:
    """Load an exported run; a step continues all prompts, which have one length."""
    import transformers

    device = use_device(settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["folder"]).to(device).eval()
    prompts, count = torch.tensor(settings["prompts"], device=device), settings["new_tokens"]

    @torch.inference_mode()
    def run(steps: int) -> None:
        for _ in range(steps):
            _continue(model, prompts, count, min_new_tokens=count)  # no row ends early

    return Work(run, facts_of((transformers,), model))


def _continue(model: Any, prompts: torch.Tensor, count: int, **options: Any) -> None:
    made = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=count,
        do_sample=False,
        **options,
    )
    assert made.cpu().shape == (len(prompts), prompts.shape[1] + count)


# Attention ----------------------------------------------------------------------------------------


def attention(settings: Settings) -> Work:
    """Build causal `scaled_dot_product_attention`; a step ends with the gradients of q, k, v."""
    device = use_device(settings)
    batch, length = settings["batch"], settings["length"]
    shape = (4, batch, length, settings["num_heads"], settings["head_dim"])
    drawn = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    dtype = getattr(torch, settings["precision"])
    *heads, cotangent = (
        torch.from_numpy(each).to(device, dtype).transpose(1, 2).contiguous() for each in drawn
    )
    q, k, v = (each.requires_grad_() for each in heads)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else resident_bytes()

    def gradients() -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(y, (q, k, v), cotangent)

    def run(steps: int) -> float:
        for _ in range(steps - 1):
            gradients()
        return sum(each.float().abs().mean().item() for each in gradients())

    return Work(run, facts_of(()), lambda: peak_bytes() - before)


def long_attention(settings: Settings) -> Work:
    """Build Longformer's or BigBird's module and an output matrix; a step is a forward pass."""
    import transformers

    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    x = torch.randn(1, settings["length"], settings["width"])
    build = {"longformer": _longformer, "bigbird": _bigbird}[settings["mixer"]]
    module, given = build(settings)
    output = torch.nn.Linear(settings["width"], settings["width"])
    module.eval()
    before = resident_bytes()

    @torch.inference_mode()
    def run(steps: int) -> None:
        for _ in range(steps):
            output(module(x, **given)[0])

    growth = lambda: peak_resident_bytes() - before  # noqa: E731
    return Work(run, facts_of((transformers,), module, output), growth)


def _longformer(settings: Settings) -> tuple[torch.nn.Module, Settings]:
    """Build Longformer: the first token is global, the window counts both sides."""
    from transformers.models.longformer import modeling_longformer as longformer

    config = longformer.LongformerConfig(
        hidden_size=settings["width"],
        num_attention_heads=settings["heads"],
        attention_window=[2 * settings["window"]],
    )
    first = torch.arange(settings["length"])[None] == 0
    return longformer.LongformerSelfAttention(config, 0), dict(
        attention_mask=first * 10_000.0,
        is_index_masked=torch.zeros_like(first),
        is_index_global_attn=first,
        is_global_attn=True,
    )


def _bigbird(settings: Settings) -> tuple[torch.nn.Module, Settings]:
    """Build the block module itself, because its model computes short inputs in full."""
    from transformers.models.big_bird import modeling_big_bird as big_bird

    block = settings["block"]
    config = big_bird.BigBirdConfig(
        hidden_size=settings["width"],
        num_attention_heads=settings["heads"],
        block_size=block,
        max_position_embeddings=settings["length"],
    )
    real = torch.ones(1, settings["length"])
    make_masks = big_bird.BigBirdModel.create_masks_for_block_sparse_attn
    blocked, band, from_mask, to_mask = make_masks(real, block)
    return big_bird.BigBirdBlockSparseAttention(config), dict(
        band_mask=band,
        from_mask=from_mask,
        to_mask=to_mask,
        from_blocked_mask=blocked,
        to_blocked_mask=blocked,
    )


# Files --------------------------------------------------------------------------------------------


def data(settings: Settings) -> Work:
    """Train a byte-level BPE on a file and write its tokens, with `tokenizers` alone."""
    import tokenizers

    facts: dict[str, int] = {}

    def prepare(folder: str) -> int:
        tokenizer = tokenizers.ByteLevelBPETokenizer()
        tokenizer.train(
            settings["path"], vocab_size=settings["vocabulary"], special_tokens=["<|endoftext|>"],
            show_progress=False,
        )  # fmt: skip
        with Path(settings["path"]).open(encoding="utf-8") as file:
            encoded = tokenizer.encode_batch(file.readlines())
        tokens = np.concatenate([np.asarray(each.ids, np.uint16) for each in encoded])
        tokens.tofile(Path(folder) / "tokens.bin")
        return len(tokens)

    def run(steps: int) -> None:
        for _ in range(steps):
            with tempfile.TemporaryDirectory() as folder:
                facts["tokens"] = prepare(folder)

    return Work(run, facts)


def read_weights(settings: Settings) -> Work:
    """Read a model by `AutoModelForCausalLM.from_pretrained`, in bfloat16."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.models.llama.LlamaForCausalLM  # noqa: B018  imported before memory is measured
    before, anonymous_before = resident_bytes(), status_bytes("RssAnon")
    facts = facts_of((transformers,))

    def run(steps: int) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            settings["folder"], dtype=torch.bfloat16
        )
        # Pages of a mapped file count once they are read: sum all weights, as a first step would.
        for parameter in model.parameters():
            parameter.float().sum()
        facts["device"] = sum(p.numel() * p.element_size() for p in model.parameters())
        facts["anonymous"] = status_bytes("RssAnon") - anonymous_before

    return Work(run, facts, lambda: peak_resident_bytes() - before)


WORK: Mapping[str, Callable[[Settings], Work]] = {
    "nanogpt": nanogpt,
    "nanogpt_loss": nanogpt_loss,
    "hf": huggingface,
    "decode": decode,
    "serving": serving,
    "attention": attention,
    "long_attention": long_attention,
    "data": data,
    "read_weights": read_weights,
}

if __name__ == "__main__":
    serve(WORK[sys.argv[1]])
