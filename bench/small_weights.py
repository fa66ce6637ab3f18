"""Memory, decoding speed and perplexity of a run's weights in float32, bfloat16, int8 and int4.

    python -m train fit shakespeare_char_cpu --workdir W --data.path input.txt \
        --model.d-model 256 --model.num-layers 6 --steps 350
    python bench/small_weights.py W --layers 8 --width 1024

Perplexity is that of the run's held-out text. Speed and memory are those of its model, with random
weights of another depth and width if they are given: a small model fits into the caches, and says
little about reading weights. The formats take turns in shuffled order.
"""

import dataclasses
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.machine import machine
from train.errors import UserError
from train.estimate.tables import format_bytes, new_table
from train.run import Run, load
from transformer.generation.generate import continue_rows, generate, seed_words, start_rows
from transformer.generation.sampling import SamplingConfig
from transformer.models.language_model import LanguageModel
from transformer.models.unstacked import unstack_where_memory_allows
from transformer.precision import Precision
from transformer.quantization import quantize_weights

FORMATS = ("float32", "bfloat16", "int8", "int4")
"""The last two compute in float32."""

GREEDY = SamplingConfig(temperature=0)


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare formats of a run's weights."""

    workdir: tyro.conf.Positional[str]
    """Folder of a run of a language model."""
    layers: int = 0
    """Layers of the model whose speed is measured; 0: those of the run."""
    width: int = 0
    """Its width; 0: that of the run."""
    batch: tuple[int, ...] = (1, 8)
    """Batch sizes."""
    prompt: int = 16
    """Tokens of each prompt."""
    new_tokens: int = 32
    """Tokens generated in a turn."""
    rounds: int = 5
    """Turns of each format."""
    json: bool = False
    """Print one JSON object in place of a table."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Figures of one format."""

    format: str
    weight_bytes: int
    layer_bytes: int
    """Bytes of the weights without embeddings and output matrix."""
    temporary_bytes: int
    """What the compiled loop over tokens allocates beside weights and cache, batch of the first
    size."""
    tokens_per_second: dict[int, float]
    """Median by batch size."""
    perplexity: float


def with_format(model: LanguageModel, params: Any, name: str) -> tuple[LanguageModel, Any]:
    """Return the model and its float32 parameters in a format."""
    if name == "bfloat16":
        config = dataclasses.replace(model.config, precision=Precision.parse("pure_bfloat16"))
        return dataclasses.replace(model, config=config), jax.tree.map(
            lambda leaf: leaf.astype(jnp.bfloat16), params
        )
    kind: Any = "none" if name == "float32" else name
    return model, quantize_weights(params, model.logical_axes(), kind)


def perplexity(run: Run, name: str) -> float:
    """Return the perplexity of the run's held-out text in a format."""
    model, params = with_format(run.model, run.params, name)
    experiment = dataclasses.replace(run.experiment, model=model.config)
    changed = dataclasses.replace(run, model=model, params=params, experiment=experiment)
    return changed.evaluate("validation")["perplexity"]


def num_bytes(tree: Any) -> int:
    """Return the bytes of all arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def temporary_bytes(model: LanguageModel, params: Any, options: Options) -> int:
    """Return the temporaries of the loop over tokens, from the compiled program."""
    size, no_token = options.batch[0], np.array([-1], np.int32)
    rows = [np.zeros(options.prompt, np.int64)] * size
    lengths, limits = (np.full(size, n, np.int32) for n in (options.prompt, options.new_tokens))
    length = options.prompt + options.new_tokens
    params = unstack_where_memory_allows(params)
    state, _ = start_rows(
        params,
        np.array(rows),
        lengths,
        limits,
        seed_words(0, rows),
        no_token,
        GREEDY.values(size),
        model=model,
        cache_length=length,
    )
    counts = np.int32(options.new_tokens), np.int32(1)
    program = continue_rows.lower(params, state, no_token, *counts, model=model).compile()
    analysis: Any = program.memory_analysis()
    return int(analysis.temp_size_in_bytes)


def measure(options: Options) -> list[Measurement]:
    """Return the figures of all formats."""
    run = load(options.workdir)
    if not isinstance(run.model, LanguageModel):
        raise UserError(f"{options.workdir}: is no language model; give a run of one")
    config = dataclasses.replace(
        run.model.config,
        num_layers=options.layers or run.model.config.num_layers,
        d_model=options.width or run.model.config.d_model,
    )
    model = dataclasses.replace(run.model, config=config)
    params = run.params
    if model.config != run.model.config:
        params = model.init_params(jax.random.key(0))
    sides = {name: with_format(model, params, name) for name in FORMATS}
    rates: dict[tuple[str, int], list[float]] = {}
    generator = np.random.default_rng(0)
    for batch in options.batch:
        for turn in range(options.rounds + 1):
            for name in random.Random(turn).sample(FORMATS, len(FORMATS)):
                size = (batch, options.prompt)
                prompts = list(generator.integers(config.vocab_size, size=size))
                count, start = options.new_tokens, time.perf_counter()
                generate(*sides[name], prompts, max_new_tokens=count, sampling=GREEDY)
                if turn:  # the first one compiles
                    rate = batch * count / (time.perf_counter() - start)
                    rates.setdefault((name, batch), []).append(rate)
    return [
        Measurement(
            name,
            num_bytes(sides[name][1]),
            num_bytes(sides[name][1]["layers"]),
            temporary_bytes(*sides[name], options),
            {batch: statistics.median(rates[name, batch]) for batch in options.batch},
            perplexity(run, name),
        )
        for name in FORMATS
    ]


def main(options: Options) -> None:
    """Measure and print."""
    measurements = measure(options)
    if options.json:
        records = [dataclasses.asdict(each) for each in measurements]
        print(json.dumps({"machine": machine(), "measurements": records}, indent=2))
        return
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    columns = [f"tokens a second,\nbatch {batch}" for batch in options.batch]
    title = "Weights in four formats"
    table = new_table(
        title, "format", "weights", "of layers", "temporaries", *columns, "perplexity"
    )
    for each in measurements:
        table.add_row(
            each.format,
            format_bytes(each.weight_bytes),
            format_bytes(each.layer_bytes),
            format_bytes(each.temporary_bytes),
            *(f"{rate:,.1f}" for rate in each.tokens_per_second.values()),
            f"{each.perplexity:.4f}",
        )
    console.print(table)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except UserError as error:
        sys.exit(f"error: {error}")
