"""Reading of a model in Hugging Face's format, against transformers."""

import functools
import json
import math
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.race.harness import OURS, Contender, Record, peer, print_machine, race, take_turns
from transformer.interop.weight_files import write_safetensors

MESH_DEVICES = 8
LAYERS = 24


def hf_import(torch_python: Path = Path(sys.executable), rounds: int = 1) -> None:
    """Compare memory and seconds of reading a Llama of 1.3 billion parameters with transformers.

    A random model in bfloat16 is written in shards, then read in one process each: by `read_model`,
    by `read_model` onto a mesh of 8 CPU devices, and by `AutoModelForCausalLM.from_pretrained`.
    Memory is what reading adds to that after the imports; `anonymous` is what stays without pages
    of mapped files, which the system can drop. Needs disk space for the model.

    Args:
      torch_python: The interpreter that has PyTorch and transformers.
      rounds: Readings of each side.
    """
    print_machine()
    with tempfile.TemporaryDirectory() as folder:
        total = _write_random_model(Path(folder))
        ours = (*OURS, "read_weights")
        meshed = ("env", f"JAX_NUM_CPU_DEVICES={MESH_DEVICES}", "JAX_PLATFORMS=cpu", *ours)
        commands = {
            "ours": ("env", "JAX_PLATFORMS=cpu", *ours),
            "ours on a mesh": meshed,
            "transformers": peer(torch_python, "read_weights"),
        }

        def reading(name: str, command: tuple[str, ...]) -> Record:
            contender = Contender(name, command, {"folder": folder})
            return race([contender], rounds=1, steps=1, warmup=0)[0]

        sides = {name: functools.partial(reading, name, each) for name, each in commands.items()}
        results = take_turns(sides, rounds)
    columns = ("reader", "seconds", "CPU", "peak GB", "anonymous", "a device")
    table = Table(*columns, title=f"{total / 1e9:.2f} GB in bfloat16")
    for name, records in results.items():
        for record in records:
            kept = (int(record.facts[each]) for each in ("anonymous", "device"))
            gigabytes = (f"{each / 1e9:.2f}" for each in (record.peak_memory_bytes, *kept))
            seconds = (f"{each[0]:.1f}" for each in (record.seconds, record.cpu_seconds))
            table.add_row(name, *seconds, *gigabytes)
    Console().print(table)


def _write_random_model(folder: Path) -> int:
    """Write the model's folder in shards of a layer each; return its bytes."""
    width, inner, vocab = 2048, 5504, 32_000
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    matrices = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
    matrices |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    matrices |= {"mlp.down_proj": (width, inner)}
    norms = ("input_layernorm", "post_attention_layernorm")
    shards: list[dict[str, tuple[int, ...]]] = [
        {
            **{f"model.layers.{i}.{name}.weight": shape for name, shape in matrices.items()},
            **{f"model.layers.{i}.{name}.weight": (width,) for name in norms},
        }
        for i in range(LAYERS)
    ]
    ends = {"model.embed_tokens.weight": (vocab, width), "lm_head.weight": (vocab, width)}
    shards.append({**ends, "model.norm.weight": (width,)})
    drawn, total, weight_map = np.random.default_rng(0), 0, dict[str, str]()
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"

        def draw(tensor: str, shard: dict[str, tuple[int, ...]] = shard) -> np.ndarray:
            return (drawn.random(shard[tensor], np.float32) * 0.02).astype(jnp.bfloat16)

        write_safetensors(folder / name, shard, "bfloat16", draw)
        weight_map |= dict.fromkeys(shard, name)
        total += sum(2 * math.prod(shape) for shape in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total
