"""Generation: decoding and the server against Hugging Face, and weights in four formats."""

import dataclasses
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import train
from bench.drills.server import Server
from bench.machine import cores
from bench.race.harness import (
    OURS,
    Contender,
    peer,
    print_machine,
    print_race,
    running,
    take_turns,
)
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.estimate.tables import format_bytes
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.interop.huggingface_export import export_run
from train.run import Run, load
from train.runtime.startup import restart_with_huge_pages
from transformer.attention.full import AttentionConfig
from transformer.generation.generate import generate
from transformer.generation.sampling import SamplingConfig
from transformer.layers.position_embedding import LearnedPositions
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig
from transformer.models.language_model import LanguageModel
from transformer.precision import Precision
from transformer.quantization import quantize_weights

PEER = "Hugging Face"
GREEDY = SamplingConfig(temperature=0)

# Decoding -----------------------------------------------------------------------------------------

COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
"""XLA records the kernels of a loop's body as one graph, and starts it once for each token."""


@dataclass(frozen=True)
class DecodeOptions:
    """Compare decoding with Hugging Face's generate.

    Both sides continue random prompts, greedily, with a key-value cache, on the GPU if there is
    one, else on all cores; the time includes the prefill. The model is a GPT-2 with random weights.
    """

    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch and transformers."""
    batch: tuple[int, ...] = (1, 8)
    """Batch sizes, each measured separately."""
    layers: int = 12
    width: int = 768
    heads: int = 12
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and products on both sides."""
    variants: bool = False
    """Race ours against itself in place of the peer: from stacked weights, and with XLA's command
    buffers for the loop over tokens (GPUs)."""
    rounds: int = 7
    """Number of turns per side; a turn continues one batch."""


def decode(options: DecodeOptions) -> None:
    """Race decoding with each batch size: prompts of 16 tokens, and 128 more."""
    print_machine()
    for batch in options.batch:
        settings: dict[str, Any] = {
            "layers": options.layers,
            "width": options.width,
            "heads": options.heads,
            "vocabulary": 50_257,
            "context": 1024,
            "prompt": 16,
            "new_tokens": 128,
            "batch": batch,
            "precision": options.precision,
            "threads": cores(),
        }
        ours = (*OURS, "decode")
        sides = [Contender("ours", ours, settings)]
        if options.variants:
            flags = ("env", f"XLA_FLAGS={COMMAND_BUFFERS}")
            sides.append(Contender("command buffers", (*flags, *ours), settings))
            sides.append(Contender("from stacks", ours, {**settings, "stacked": True}))
        else:
            sides.append(Contender(PEER, peer(options.torch_python, "decode"), settings))
        print_race(
            f"decoding 128 tokens, {options.layers} x {options.width}, B {batch}, "
            f"{options.precision}",
            sides,
            work=batch * 128,
            rounds=options.rounds,
        )


# The server ---------------------------------------------------------------------------------------

VOCABULARY, PROMPT, NEW_TOKENS = 2048, 30, 128
REQUESTS = 4
"""Requests of each client in a turn."""
WARMUP_SECONDS = 60.0
"""For the server to compile its programs after it listens."""


@dataclass(frozen=True)
class ServerOptions:
    """Compare the server with `generate` of the whole batch, ours and Hugging Face's.

    A small model is trained for a step, exported, and served on this machine. Each client sends one
    request after the other: a prompt of token ids, to be continued greedily. In turns with the
    server both `generate` continue as many prompts as there are clients, as one batch, with the
    same weights. Rates are new tokens per second; latencies are those of requests. All sides share
    the processor's cores with nothing but the clients.
    """

    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch and transformers."""
    clients: tuple[int, ...] = (1, 8, 32)
    """Numbers of clients, each measured separately."""
    rounds: int = 3
    """Number of turns per side."""


def server(options: ServerOptions) -> None:
    """Print a row for each number of clients, with medians of the turns."""
    restart_with_huge_pages()  # as `python -m train` does
    print_machine()
    table = Table("clients", "ours", PEER, "server", "/ ours", "/ HF", "p50 s", "p95 s")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = train.fit(_served(folder), str(folder / "run"), quiet=True)
        export_run(str(folder / "run"), str(folder / "exported"))
        served = Server(str(folder / "run"))
        try:
            time.sleep(WARMUP_SECONDS)
            for count in options.clients:
                latencies, rates = _serve(options, count, run, served, folder / "exported")
                ours, theirs, rate = (median(rates[each]) for each in ("ours", PEER, "server"))
                p50, p95 = np.percentile(latencies, (50, 95))
                figures = [f"{each:,.0f}" for each in (ours, theirs, rate)]
                ratios = f"{rate / ours:.2f}", f"{rate / theirs:.2f}"
                table.add_row(str(count), *figures, *ratios, f"{p50:.3f}", f"{p95:.3f}")
        finally:
            served.stop()
    Console().print(table)


def _served(folder: Path) -> Experiment:
    """Return an experiment of one step with a small GPT-2."""
    return Experiment(
        name="served",
        model=TransformerConfig(
            d_model=256,
            num_layers=6,
            layer_pattern=(BlockConfig(mixer=AttentionConfig(num_heads=4)),),
            position_embedding=LearnedPositions(1024),
        ),
        data=TextDataConfig(
            path="python:library",
            max_bytes=1_000_000,
            sequence_length=64,
            tokenizer=TokenizerConfig("bpe", vocab_size=VOCABULARY),
            cache_dir=str(folder / "cache"),
        ),
        steps=1,
        batch_size=8,
        evaluation=EvaluationConfig(every=0, num_batches=1),
        checkpoint=CheckpointConfig(every=1),
    )


def _serve(
    options: ServerOptions, count: int, run: Run, served: Server, exported: Path
) -> tuple[list[float], dict[str, list[float]]]:
    """Return the seconds of all requests of `count` clients, and each side's rates."""
    latencies = list[float]()
    prompts = list(np.random.default_rng(0).integers(1, VOCABULARY - 100, (count, PROMPT)))
    settings = {
        "folder": str(exported),
        "prompts": [row.tolist() for row in prompts],
        "new_tokens": NEW_TOKENS,
        "threads": cores(),
    }
    contender = Contender(PEER, peer(options.torch_python, "serving"), settings)

    def ours() -> int:
        model: Any = run.model
        made = generate(model, run.params, prompts, max_new_tokens=NEW_TOKENS, sampling=GREEDY)
        return sum(map(len, made.tokens))

    def client(prompt: np.ndarray) -> int:
        """Send a prompt again and again, each with a connection of its own; return new tokens."""
        fields = {"prompt": prompt.tolist(), "max_tokens": NEW_TOKENS, "temperature": 0}
        body, headers = json.dumps(fields), {"Content-Type": "application/json"}
        made = 0
        for _ in range(REQUESTS):
            start = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", served.port)
            connection.request("POST", "/v1/completions", body, headers)
            made += json.load(connection.getresponse())["usage"]["completion_tokens"]
            connection.close()
            latencies.append(time.perf_counter() - start)
        return made

    def serve_all() -> int:
        with ThreadPoolExecutor(count) as clients:
            return sum(clients.map(client, prompts))

    with running(contender, warmup=1) as theirs:

        def peers() -> int:
            theirs.turn(1)
            return count * NEW_TOKENS

        sides = {"ours": ours, "server": serve_all, PEER: peers}
        take_turns(sides, 1)  # warms up
        latencies.clear()
        rates = take_turns({name: _rate_of(side) for name, side in sides.items()}, options.rounds)
    return latencies, rates


def _rate_of(side: Callable[[], int]) -> Callable[[], float]:
    """Return a function that makes tokens and returns how many a second."""

    def rate() -> float:
        start = time.perf_counter()
        return side() / (time.perf_counter() - start)

    return rate


# Weights in four formats --------------------------------------------------------------------------

FORMATS = ("float32", "bfloat16", "int8", "int4")
"""The last two compute in float32."""
LAYERS, WIDTH = 8, 512
"""Of the model whose speed and bytes are measured: the run's would fit into the caches."""


@dataclass(frozen=True)
class WeightsOptions:
    """Compare memory, decoding speed and perplexity of a run's weights in four formats.

    The published perplexities are those of

        python -m train fit shakespeare_char_cpu --workdir W --data.path input.txt
            --model.d-model 256 --model.num-layers 6 --steps 350

    Perplexity is that of the run's held-out text. Speed and memory are those of its model with 8
    layers of width 512 and random weights. The formats take turns in shuffled order.
    """

    workdir: tyro.conf.Positional[str]
    """Folder of a run of a language model."""
    rounds: int = 5
    """Turns of each format: 32 tokens after 16."""


def small_weights(options: WeightsOptions) -> None:
    """Print a row for each format."""
    print_machine()
    run = load(options.workdir)
    assert isinstance(run.model, LanguageModel)
    config = dataclasses.replace(run.model.config, num_layers=LAYERS, d_model=WIDTH)
    model = dataclasses.replace(run.model, config=config)
    params = model.init_params(jax.random.key(0))
    sides = {name: _with_format(model, params, name) for name in FORMATS}
    generator = np.random.default_rng(0)

    def continuing(name: str, batch: int) -> Callable[[], float]:
        def tokens() -> int:
            prompts = list(generator.integers(config.vocab_size, size=(batch, 16)))
            generate(*sides[name], prompts, max_new_tokens=32, sampling=GREEDY)
            return batch * 32

        return _rate_of(tokens)

    table = Table("format", "of layers", "tokens/s, batch 1", "batch 8", "perplexity")
    rates = [
        take_turns({name: continuing(name, batch) for name in FORMATS}, options.rounds + 1)
        for batch in (1, 8)
    ]
    for name, (_, weights) in sides.items():
        table.add_row(
            name,
            format_bytes(sum(leaf.nbytes for leaf in jax.tree.leaves(weights["layers"]))),
            *(f"{median(each[name][1:]):,.1f}" for each in rates),  # the first turn compiles
            f"{_perplexity(run, name):.4f}",
        )
    Console().print(table)


def _with_format(model: LanguageModel, params: Any, name: str) -> tuple[LanguageModel, Any]:
    """Return the model and its float32 parameters in a format."""
    if name == "bfloat16":
        config = dataclasses.replace(model.config, precision=Precision.parse("pure_bfloat16"))
        return dataclasses.replace(model, config=config), jax.tree.map(
            lambda leaf: leaf.astype(jnp.bfloat16), params
        )
    kind: Any = "none" if name == "float32" else name
    return model, quantize_weights(params, model.logical_axes(), kind)


def _perplexity(run: Run, name: str) -> float:
    """Return the perplexity of the run's held-out text in a format."""
    assert isinstance(run.model, LanguageModel)
    model, params = _with_format(run.model, run.params, name)
    experiment = dataclasses.replace(run.experiment, model=model.config)
    changed = dataclasses.replace(run, model=model, params=params, experiment=experiment)
    return changed.evaluate("validation")["perplexity"]
