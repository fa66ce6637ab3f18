"""GPUs: all measurements on one in one call, and a step compiled for one and read."""

import dataclasses
import importlib.metadata
import importlib.util
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
import tyro
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

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint", "torch")


@dataclasses.dataclass(frozen=True)
class GpuOptions:
    """Run all measurements on a GPU that results refer to, in ten minutes.

    Parts run one after the other, each a process with a time limit, and write what they print as
    they go. A part whose packages are missing is skipped with their names.
    """

    output: Path = Path("gpu-results")
    """Folder for what each part prints."""
    parts: str = "eabdf"
    """Parts in this order: e tests, a decoding, b training step of 124M, d Llama of 1.3B, f plan
    beside what was measured."""
    nanogpt: Path | None = None
    """A checkout of nanoGPT; without it part b has no peer."""
    tiny: bool = False
    """Small models, to try every part, on a CPU too."""


class Part(NamedTuple):
    """One process: what it is for, its command and its time limit."""

    letter: str
    title: str
    command: tuple[str, ...]
    seconds: int
    needs: tuple[str, ...] = ()
    """Modules without which it is skipped."""


def parts_of(options: GpuOptions) -> list[Part]:
    """Return the processes of all parts."""
    tests = ("pytest", "-q", "-c", "tests_device/pytest.ini", "--rootdir", ".", "tests_device")
    decode: tuple[str, ...] = ("bench", "decode", "--variants", "--batch", "1", "--precision")
    step: tuple[str, ...] = ("bench", "step", "--precision")
    products: tuple[str, ...] = ("--against", "products")
    if options.nanogpt:
        products = ("--against", "nanogpt", "--nanogpt", str(options.nanogpt))
    torch = ("torch",) if options.nanogpt else ()
    if options.tiny:
        decode += ("float32", "--rounds", "1", "--layers", "2", "--width", "64", "--heads", "2")
        decode += ("--vocabulary", "512")
        step += ("float32", "--rounds", "1", "--steps", "1", "--warmup", "1", "--shapes")
        return [
            Part("e", "tests", (*tests, "--collect-only"), 150, ("pytest",)),
            Part("a", "decoding", decode, 70),
            Part("b", "training step", (*step, "small", *products), 80, torch),
            Part("d", "Llama", (*step, "llama-tiny", "--against", "hf"), 110, ("transformers",)),
            Part("f", "plan", ("bench.drills.plan_time", "--steps", "2"), 50),
        ]
    decode += ("bfloat16", "--rounds")
    large = ("2", "--layers", "48", "--width", "1600", "--heads", "25")
    step += ("bfloat16", "--rounds", "3", "--steps", "10", "--warmup", "5", "--compile", "--shapes")
    plan = ("bench.drills.plan_time", "--cases", "gpt2", "transformer_base", "bert_base")
    return [
        Part("e", "tests", tests, 150, ("pytest",)),
        Part("a", "decoding, 124M", (*decode, "3"), 70),
        Part("a", "decoding, 1.5B", (*decode, *large), 80),
        Part("b", "training step, 124M", (*step, "gpt2-1k", *products), 80, torch),
        Part("d", "Llama, 1.3B", (*step, "llama-1b", "--against", "hf"), 110, ("transformers",)),
        Part("f", "plan", plan, 50),
    ]


def on_a_gpu(argv: list[str]) -> int:
    """Run the parts; return the number of those that failed."""
    options, failed = tyro.cli(GpuOptions, args=argv), 0
    options.output.mkdir(parents=True, exist_ok=True)
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    print(", ".join(f"{name} {installed.get(name, 'missing')}" for name in PACKAGES), flush=True)
    chosen = (p for letter in options.parts for p in parts_of(options) if p.letter == letter)
    for number, part in enumerate(chosen):
        print(f"== {part.letter} {part.title}", flush=True)
        missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
        if missing:
            print(f"-- not run, without {', '.join(missing)}", flush=True)
            continue
        start, path = time.monotonic(), options.output / f"{part.letter}{number}.txt"
        with path.open("w") as log:
            process = subprocess.Popen(
                (sys.executable, "-m", *part.command),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(part.seconds * (10 if options.tiny else 1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its contenders too
                code = -1
        failed += code != 0
        print("\n".join(path.read_text().splitlines()[-25:]))
        ended = {0: "done", -1: "out of time"}.get(code, f"failed with {code}")
        print(f"-- {ended} after {time.monotonic() - start:.0f} s, {path}", flush=True)
    return failed


# A step compiled for a GPU ------------------------------------------------------------------------

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """Compile a decoding step of GPT-2 in bfloat16, or a training step, for a GPU, and read it.

    The GPU need not be here. A kernel reads its operands from memory and writes its results, but of
    an operand that it slices the slice alone. For a token of decoding, the body of one loop, what
    no program can avoid stands beside the sum: every weight and every cached key and value, once. A
    training step is shown by kind of kernel and the part of the model that it belongs to, without
    the loops over chunks of the loss. XLA tunes nothing without the GPU, so the kernels of matrix
    products may be others there. Needs JAX's compiler for the target
    (`pip install 'jax[cuda13]'`).
    """

    target: str = "h200:1"
    train: str = ""
    """Config whose training step is read; none: the decoding step of the model below."""
    batch: tuple[int, ...] = (1, 8)
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50_257
    cache: int = 256
    """Tokens of the cache."""


class Kernel(NamedTuple):
    """An instruction that runs as a kernel."""

    kind: str
    num_bytes: int
    text: str


def decoding_program(options: ProgramOptions, batch: int, *, stacked: bool) -> str:
    """Return the compiled HLO of the loop over tokens."""
    target = parse_target(options.target)
    mesh = Mesh(np.array(target_devices(target)[:1]), ("device",))
    placed = NamedSharding(mesh, PartitionSpec())
    config = TransformerConfig(
        vocab_size=options.vocabulary,
        d_model=options.width,
        num_layers=options.layers,
        layer_pattern=(BlockConfig(mixer=AttentionConfig(num_heads=options.heads)),),
        position_embedding=LearnedPositions(1024),
        precision=dataclasses.replace(Precision.parse("bfloat16"), parameters="bfloat16"),
    )
    model = LanguageModel(config, target.hardware)

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
            cache_length=options.cache,
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
    target = parse_target(options.target)
    experiment = resolve_precision(find_experiment(options.train), target.hardware)
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
    return compile_step(experiment, target).program.as_text() or ""


def kernels_of_entry(text: str) -> list[Kernel]:
    """Return the kernels of a program, without those of loops."""
    entry = re.search(r"ENTRY %?([\w.\-]+)", text)
    assert entry is not None
    parts = computations(text)
    return list(_kernels(parts[entry[1]], parts))


def kernels_of_loop(text: str) -> list[Kernel]:
    """Return the kernels of the longest loop of a program."""
    parts = computations(text)
    bodies = [parts[name] for name in re.findall(r"body=%?([\w.\-]+)", text)]
    return list(_kernels(max(bodies, key=len), parts))


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


def show_training(options: ProgramOptions, console: Console) -> None:
    """Print the kernels of a training step for each batch size."""
    for batch in options.batch:
        kernels = kernels_of_entry(training_program(options, batch))
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
        title = f"{options.train}, {batch} rows, {options.target}: {len(kernels)} kernels"
        grid = Table(title=f"{title}, {total / 1e9:.1f} GB")
        for heading in ("kernel", "part", "number", "GB"):
            grid.add_column(heading)
        for key, size in num_bytes.most_common(20):
            grid.add_row(*key, str(count[key]), f"{size / 1e9:.2f}")
        console.print(grid)


def gpu_program(argv: list[str]) -> None:
    """Print the number of kernels and their bytes for each batch size."""
    options, console = tyro.cli(ProgramOptions, args=argv), Console()
    if options.train:
        show_training(options, console)
        return
    grid = Table(title=f"a token of {options.layers} x {options.width}, {options.target}, bfloat16")
    for heading in ("batch", "weights", "kernels", "bytes", "of the least", "most bytes"):
        grid.add_column(heading)
    layer = 12 * options.width**2
    weights = 2 * (options.layers * layer + options.vocabulary * options.width)
    for batch in options.batch:
        cached = 2 * 2 * batch * options.layers * options.cache * options.width
        for stacked in (True, False):
            kernels = kernels_of_loop(decoding_program(options, batch, stacked=stacked))
            total = sum(kernel.num_bytes for kernel in kernels)
            by_kind: Counter[str] = Counter()
            for kernel in kernels:
                by_kind[kernel.kind] += kernel.num_bytes
            largest = ", ".join(f"{kind} {n / 1e6:.0f}" for kind, n in by_kind.most_common(3))
            grid.add_row(
                str(batch),
                "stacked" if stacked else "by layer",
                str(len(kernels)),
                f"{total / 1e6:.0f} MB",
                f"{total / (weights + cached):.2f}",
                largest,
            )
    console.print(grid)
