"""Files: preparation of a text, and reading of a model, against Hugging Face."""

import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from bench.race.harness import (
    OURS,
    Contender,
    Record,
    peer,
    print_machine,
    print_race,
    race,
    take_turns,
)
from transformer.interop.weight_files import write_safetensors

# A text -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataOptions:
    """Train a byte-level BPE on a text and write its tokens: ours beside `tokenizers` alone.

    Ours is what `fit` does before it trains: it reads the file in pieces, holds out text, trains
    the tokenizer, and writes the tokens with their checksums. The peer reads all lines, trains
    Hugging Face's `ByteLevelBPETokenizer`, encodes them as one batch and writes uint16.
    """

    data: Path
    """A text file in UTF-8."""
    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch and tokenizers."""
    vocabulary: int = 8192
    rounds: int = 5
    """Number of turns per side; a turn prepares the text once."""


def data(argv: list[str]) -> None:
    """Race the preparation of a text."""
    options = tyro.cli(DataOptions, args=argv)
    if not options.data.is_file():
        raise SystemExit(f"--data {options.data}: is not a file; give a text")
    print_machine(Console())
    settings = {"path": str(options.data.resolve()), "vocabulary": options.vocabulary}
    theirs = Contender("tokenizers", peer(options.torch_python, "data"), settings)
    kilobytes = options.data.stat().st_size / 1000
    print_race(
        f"preparing {kilobytes:,.0f} kB of text, V {options.vocabulary:,}",
        [Contender("ours", (*OURS, "data"), settings), theirs],
        reference=theirs.name,
        work=kilobytes,
        unit="kB",
        rounds=options.rounds,
        steps=1,
        warmup=1,
    )


# A model ------------------------------------------------------------------------------------------

MESH_DEVICES = 8


@dataclass(frozen=True)
class ImportOptions:
    """Compare memory and seconds of reading a Llama of 1.3 billion parameters with transformers.

    A random model in bfloat16 is written in shards, then read in one process each: by `read_model`,
    by `read_model` onto a mesh of 8 CPU devices, and by `AutoModelForCausalLM.from_pretrained`.
    Memory is what reading adds to that after the imports; `anonymous` is what stays without pages
    of mapped files, which the system can drop. Needs disk space for the model.
    """

    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch and transformers."""
    layers: int = 24
    folder: str = ""
    """Folder for the model, below which it is written and removed; empty: the system's."""
    rounds: int = 1
    """Readings of each side."""


def hf_import(argv: list[str]) -> None:
    """Write a model, let all readers read it in turns, and print the table."""
    options, console = tyro.cli(ImportOptions, args=argv), Console()
    print_machine(console)
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        total = _write_random_model(Path(folder), options.layers)
        ours = (*OURS, "read_weights")
        meshed = ("env", f"JAX_NUM_CPU_DEVICES={MESH_DEVICES}", "JAX_PLATFORMS=cpu", *ours)
        commands = {
            "ours": ("env", "JAX_PLATFORMS=cpu", *ours),
            "ours on a mesh": meshed,
            "transformers": peer(options.torch_python, "read_weights"),
        }

        def reading(name: str) -> Callable[[], Record]:
            contender = Contender(name, commands[name], {"folder": folder})
            return lambda: race([contender], rounds=1, steps=1, warmup=0)[0]

        results = take_turns({name: reading(name) for name in commands}, options.rounds)
    table = Table(
        "reader",
        "seconds",
        "CPU",
        "peak GB",
        "anonymous",
        "a device",
        title=f"{total / 2e9:.2f} billion parameters, {total / 1e9:.2f} GB in bfloat16",
    )
    for name, records in results.items():
        for record in records:
            kept = (int(record.facts[each]) for each in ("anonymous", "device"))
            gigabytes = (f"{each / 1e9:.2f}" for each in (record.peak_memory_bytes, *kept))
            table.add_row(
                name, f"{record.seconds[0]:.1f}", f"{record.cpu_seconds[0]:.1f}", *gigabytes
            )
    console.print(table)
    pairs = zip(results["ours"], results["transformers"], strict=True)
    ratio = median(one.seconds[0] / other.seconds[0] for one, other in pairs)
    console.print(f"seconds, ours / transformers, median of {options.rounds}: {ratio:.2f}")


def _write_random_model(folder: Path, layers: int) -> int:
    """Write the model's folder in shards of a layer each; return its bytes."""
    width, inner, vocab = 2048, 5504, 32_000
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
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
        for i in range(layers)
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
