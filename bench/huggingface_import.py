"""Peak host memory and seconds of reading a Llama of 1.3 billion parameters, against transformers.

    python -m bench.huggingface_import [--layers 24] [--rounds 3] [--folder FOLDER]

A random model in bfloat16 is written in shards, then read in one process each: by `read_model`, by
`read_model` onto a mesh of 8 CPU devices, and by `AutoModelForCausalLM.from_pretrained`. Memory is
the largest resident size while reading, minus that after the imports; `anonymous` excludes pages
of mapped files, which the system can drop. Readers take turns in `--rounds`, and the ratio is that
of pairs, for a machine that others use too. Needs the extra `hf`, and disk space for the model.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

MESH_DEVICES = 8
READERS = ("ours", "ours on a mesh", "transformers")


def write_random_model(folder: Path, layers: int) -> int:
    """Write the model's folder in shards of a layer each; return its bytes."""
    import jax.numpy as jnp

    from transformer.interop.weight_files import write_safetensors

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
    rng, total = np.random.default_rng(0), 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"

        def draw(tensor: str, shard: Any = shard) -> Any:
            return (rng.random(shard[tensor], np.float32) * 0.02).astype(jnp.bfloat16)

        write_safetensors(folder / name, shard, "bfloat16", draw)
        weight_map |= dict.fromkeys(shard, name)
        total += sum(2 * math.prod(shape) for shape in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


class MemoryWatch:
    """Peak resident and anonymous memory of this process, sampled every 5 ms."""

    def __init__(self) -> None:
        self._start = self._read()
        self._peak = self._start
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[int, int]:
        """Return the growth of resident and of anonymous memory, in bytes."""
        self._stopped.set()
        self._thread.join()
        resident, anonymous = (p - s for p, s in zip(self._peak, self._start, strict=True))
        return resident, anonymous

    def _run(self) -> None:
        while not self._stopped.wait(0.005):
            resident, anonymous = self._read()
            self._peak = max(self._peak[0], resident), max(self._peak[1], anonymous)

    @staticmethod
    def _read() -> tuple[int, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
        resident, anonymous = (int(sizes[name].split()[0]) for name in ("VmRSS", "RssAnon"))
        return resident * 1024, anonymous * 1024


def read_and_report(reader: str, folder: str) -> None:
    """Read the model in this process; print one JSON line."""
    largest_slice = 0
    if reader == "transformers":
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.models.llama.LlamaForCausalLM  # noqa: B018  imported before the watch begins
        watch, begun, cpu_begun = MemoryWatch(), time.perf_counter(), time.process_time()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        size = sum(each.numel() * each.element_size() for each in model.parameters())
        # Pages of a mapped file count once they are read: sum all weights, as a first step would.
        for parameter in model.parameters():
            parameter.float().sum()
    else:
        import jax

        from transformer.interop.pretrained import read_model
        from transformer.precision import Precision

        def shardings(model: Any) -> Any:
            mesh = jax.make_mesh((MESH_DEVICES,), ("model",))

            def shard(axes: Any) -> Any:
                split = next((n for n in axes.names if n in ("mlp", "heads", "vocab")), None)
                split = split or next((n for n in axes.names if n == "kv_heads"), None)
                names = ["model" if n == split else None for n in axes.names]
                return jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*names))

            is_axes = lambda node: hasattr(node, "stack")  # noqa: E731
            return jax.tree.map(shard, model.logical_axes(), is_leaf=is_axes)

        jax.devices()
        watch, begun, cpu_begun = MemoryWatch(), time.perf_counter(), time.process_time()
        _, params = read_model(
            folder,
            precision=Precision.parse("pure_bfloat16"),
            shardings=shardings if reader == "ours on a mesh" else None,
        )
        leaves = jax.tree.leaves(jax.block_until_ready(params))
        size = sum(leaf.nbytes for leaf in leaves)
        by_device: dict[Any, int] = {}
        for leaf in leaves:
            for piece in leaf.addressable_shards:
                by_device[piece.device] = by_device.get(piece.device, 0) + piece.data.nbytes
        largest_slice = max(by_device.values())
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    resident, anonymous = watch.stop()
    report = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "resident": resident,
        "anonymous": anonymous,
        "parameters": size,
        "device": largest_slice or size,
    }
    print(json.dumps(report))


def read_in_process(reader: str, folder: str) -> dict[str, float]:
    """Return the report of one reader, in a process of its own."""
    devices = str(MESH_DEVICES if reader == "ours on a mesh" else 1)
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--read", reader, "--folder", folder],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": devices, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    report: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return report


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--folder", default="")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--read", choices=READERS, default="")
    options = parser.parse_args()
    if options.read:
        read_and_report(options.read, options.folder)
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        total = write_random_model(Path(folder), options.layers)
        print(f"{total / 2e9:.2f} billion parameters, {total / 1e9:.2f} GB in bfloat16")
        print(
            f"{'reader':16} {'seconds':>8} {'CPU':>6} {'peak GB':>8} {'anonymous':>9} "
            f"{'a device':>8}"
        )
        rounds: list[dict[str, float]] = []
        for _ in range(options.rounds):
            rounds.append({})
            for reader in READERS:
                report = read_in_process(reader, folder)
                rounds[-1][reader] = report["seconds"]
                resident, anonymous, device = (
                    report[name] / 1e9 for name in ("resident", "anonymous", "device")
                )
                print(
                    f"{reader:16} {report['seconds']:8.1f} {report['cpu_seconds']:6.1f} "
                    f"{resident:8.2f} {anonymous:9.2f} {device:8.2f}",
                    flush=True,
                )
        ratios = [each["ours"] / each["transformers"] for each in rounds]
        print(f"seconds, ours / transformers, median of {len(ratios)}: {np.median(ratios):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
