"""GPUs: all measurements on one in one call, and a step compiled for one and read."""

import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from bench.race.harness import ROOT
from train.config.experiment_files import find_experiment
from train.config.resolve import resolve_precision
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.compile import compile_step
from train.estimate.target import parse_target, target_devices
from transformer import (
    AttentionConfig,
    BlockConfig,
    LanguageModel,
    LearnedPositions,
    Precision,
    TransformerConfig,
)
from transformer.generation.generate import continue_rows, start_rows
from transformer.generation.sampling import SamplingConfig
from transformer.models.unstacked import unstack_for_decoding

# All measurements on a GPU ------------------------------------------------------------------------

PARTS = (
    "pytest -q -c tests_device/pytest.ini --rootdir . tests_device",
    "bench decode --variants --batch 1 --precision bfloat16 --rounds 3",
    "bench decode --variants --batch 1 --precision bfloat16 --layers 48 --width 1600 --heads 25",
    "bench step --precision bfloat16 --rounds 3 --steps 10 --warmup 5 --compile --shapes gpt2-1k",
    "bench plan_time",
)
MAX_SECONDS = 150
"""Of each part."""


def on_a_gpu(nanogpt: Path | None = None) -> int:
    """Run all measurements on a GPU that results refer to, in ten minutes.

    The tests for devices, decoding with 124 million and 1.5 billion parameters, a training step of
    124 million, and steps beside the estimates of `plan`. Each is a process with a time limit.

    Args:
      nanogpt: A checkout of nanoGPT; without it the training step races against its own products.
    """
    peer = ("--against", "nanogpt", "--nanogpt", str(nanogpt))
    failed = 0
    for part in PARTS:
        command = (sys.executable, "-m", *part.split())
        if "step" in command:
            command += peer if nanogpt else ("--against", "products")
        print("==", *command, flush=True)
        start = time.monotonic()
        with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
            try:
                code = process.wait(MAX_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its contenders too
                code = process.wait()
        failed += code != 0
        print(f"-- status {code} after {time.monotonic() - start:.0f} s", flush=True)
    return failed


# A step compiled for a GPU ------------------------------------------------------------------------

TARGET = parse_target("h200:1")
CACHE_LENGTH = 256

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """Compile a decoding step of GPT-2 in bfloat16, or a training step, for an H200, and read it.

    The GPU need not be here. A kernel reads its operands from memory and writes its results, but of
    an operand that it slices the slice alone. For a token of decoding, the body of one loop, what
    no program can avoid stands beside the sum: every weight and every cached key and value, once. A
    training step is shown by kind of kernel and the part of the model that it belongs to, without
    the loops over chunks of the loss. XLA tunes nothing without the GPU, so the kernels of matrix
    products may be others there. Needs JAX's compiler for GPUs
    (`pip install 'jax[cuda13]'`).
    """

    train: str = ""
    """Config whose training step is read; none: the decoding step of the model below."""
    batch: tuple[int, ...] = (1, 8)
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50_257


class Kernel(NamedTuple):
    """An instruction that runs as a kernel."""

    kind: str
    num_bytes: int
    text: str


def decoding_program(options: ProgramOptions, batch: int, *, stacked: bool) -> str:
    """Return the compiled HLO of the loop over tokens."""
    mesh = Mesh(np.array(target_devices(TARGET)[:1]), ("device",))
    placed = NamedSharding(mesh, PartitionSpec())
    config = TransformerConfig(
        vocab_size=options.vocabulary,
        d_model=options.width,
        num_layers=options.layers,
        layer_pattern=(BlockConfig(mixer=AttentionConfig(num_heads=options.heads)),),
        position_embedding=LearnedPositions(1024),
        precision=dataclasses.replace(Precision.parse("bfloat16"), parameters="bfloat16"),
    )
    model = LanguageModel(config, TARGET.hardware)

    def abstract(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), tree
        )

    params = meta.unbox(jax.eval_shape(model.init_params, jax.random.key(0)))
    if not stacked:
        params = jax.eval_shape(unstack_for_decoding, params)
    sizes = np.full(batch, 16, np.int32)
    state, _ = jax.eval_shape(
        lambda params: start_rows(
            params,
            jnp.zeros((batch, 16), jnp.int32),
            sizes,
            sizes,
            jnp.zeros((batch, 3), jnp.uint32),
            np.array([-1], np.int32),
            SamplingConfig(temperature=0.0).values(batch),
            model=model,
            cache_length=CACHE_LENGTH,
        ),
        params,
    )
    count = jnp.int32(32)
    arguments = abstract((params, state, jnp.array([-1], jnp.int32), count, count))
    return continue_rows.lower(*arguments, model=model).compile().as_text() or ""


def computations(text: str) -> dict[str, list[str]]:
    """Return the lines of each computation of a program by name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            lines = found.setdefault(match[1], [])
        elif line.startswith(" "):
            lines.append(line.strip())
    return found


INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
NO_KERNEL = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all")


def size_of(shape: str) -> int:
    """Return the bytes of all arrays in a shape such as `(f32[2,3]{1,0}, s32[])`."""
    return sum(
        BYTES.get(dtype, 4) * math.prod(int(n) for n in sizes.split(",") if n)
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shape)
    )


def training_program(options: ProgramOptions, batch: int) -> str:
    """Return the compiled HLO of a training step, with all rows in one microbatch."""
    experiment = resolve_precision(find_experiment(options.train), TARGET.hardware)
    # That of a tokenizer which is not trained here.
    size = experiment.model.vocab_size or options.vocabulary
    experiment, _ = resolve_sizes(
        dataclasses.replace(
            experiment,
            model=dataclasses.replace(experiment.model, vocab_size=size),
            batch_size=batch,
            grad_accum_steps=1,
        )
    )
    return compile_step(experiment, TARGET).program.as_text() or ""


def kernels_of(text: str, *, of_loop: bool) -> list[Kernel]:
    """Return the kernels of a program without its loops, or those of its longest loop."""
    parts = computations(text)
    names = re.findall(r"body=%?([\w.\-]+)" if of_loop else r"ENTRY %?([\w.\-]+)", text)
    return list(_kernels(max((parts[name] for name in names), key=len), parts))


def _kernels(body: Sequence[str], parts: dict[str, list[str]]) -> Iterator[Kernel]:
    shapes: dict[str, str] = {}
    for line in body:
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        name, shape, kind, rest = match.groups()
        shapes[name] = shape
        if kind in NO_KERNEL:
            continue
        operands = [size_of(shapes[n]) for n in re.findall(r"%([\w.\-]+)", rest.split(")")[0])]
        written = size_of(shape)
        if kind == "fusion" and (called := re.search(r"calls=%?([\w.\-]+)", line)):
            operands, written = _fusion_bytes(parts[called[1]], operands, written)
            kind = re.sub(r"[.\d_]+$", "", name)
        yield Kernel(kind, sum(operands) + written, line)


def _fusion_bytes(lines: Sequence[str], operands: list[int], written: int) -> tuple[list[int], int]:
    """Return the bytes of a fusion's operands and results, of slices as far as they are used."""
    instructions = [match for line in lines if (match := INSTRUCTION.match(line))]

    def users(name: str) -> Iterator[re.Match[str]]:
        for each in instructions:
            if f"%{name}" in re.findall(r"%[\w.\-]+", each[4].split(")")[0]):
                if each[3] == "bitcast":
                    yield from users(each[1])
                else:
                    yield each

    for parameter in instructions:
        if parameter[3] != "parameter":
            continue
        index, readers = int(parameter[4].split(")")[0]), list(users(parameter[1]))
        if readers and all(each[3] in ("dynamic-slice", "gather", "slice") for each in readers):
            operands[index] = sum(size_of(each[2]) for each in readers)
        if any(each[3] in ("dynamic-update-slice", "scatter") for each in readers):
            written -= size_of(parameter[2])  # in place
            operands[index] = 0
    return operands, max(written, 0)


def show_training(options: ProgramOptions) -> None:
    """Print the kernels of a training step for each batch size."""
    for batch in options.batch:
        kernels = kernels_of(training_program(options, batch), of_loop=False)
        total = sum(kernel.num_bytes for kernel in kernels)
        count: Counter[tuple[str, str]] = Counter()
        num_bytes: Counter[tuple[str, str]] = Counter()
        for kernel in kernels:
            name = re.search(r'op_name="([^"]*)"', kernel.text)
            part = re.findall(r"feed_forward|mixer|cross|norm|layers", name[1] if name else "")
            target = re.search(r'custom_call_target="(\w+)', kernel.text)
            key = (target[1] if target else kernel.kind, part[-1] if part else "")
            count[key] += 1
            num_bytes[key] += kernel.num_bytes
        title = f"{options.train}, {batch} rows: {len(kernels)} kernels, {total / 1e9:.1f} GB"
        grid = Table("kernel", "part", "number", "GB", title=title)
        for key, size in num_bytes.most_common(20):
            grid.add_row(*key, str(count[key]), f"{size / 1e9:.2f}")
        Console().print(grid)


def gpu_program(options: ProgramOptions) -> None:
    """Print the number of kernels and their bytes for each batch size."""
    if options.train:
        show_training(options)
        return
    columns = ("rows", "weights", "kernels", "bytes", "of the least")
    grid = Table(*columns, title=f"a token of {options.layers} x {options.width}, bfloat16")
    layer = 12 * options.width**2
    weights = 2 * (options.layers * layer + options.vocabulary * options.width)
    for batch in options.batch:
        cached = 2 * 2 * batch * options.layers * CACHE_LENGTH * options.width
        for stacked in (True, False):
            program = decoding_program(options, batch, stacked=stacked)
            kernels = kernels_of(program, of_loop=True)
            total = sum(kernel.num_bytes for kernel in kernels)
            grid.add_row(
                str(batch),
                "stacked" if stacked else "by layer",
                str(len(kernels)),
                f"{total / 1e6:.0f} MB",
                f"{total / (weights + cached):.2f}",
            )
    Console().print(grid)
