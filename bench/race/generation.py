"""Generation: decoding and the server against Hugging Face, and weights in four formats."""

import dataclasses
import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
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
from bench.machine import cores, gpu_name
from bench.race.harness import (
    OURS,
    Contender,
    Row,
    peer,
    print_machine,
    print_race,
    running,
    take_turns,
)
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.errors import UserError
from train.estimate.chips import CHIPS
from train.estimate.tables import format_bytes, new_table
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

STACKED = "ours, from stacks"
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
    vocabulary: int = 50_257
    prompt: int = 16
    """Tokens of each prompt."""
    new_tokens: int = 128
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and products on both sides."""
    compile: bool = False
    """Compile the peer's step, with a cache of fixed size."""
    variants: bool = False
    """Race ours against itself in place of the peer: from stacked weights, and with XLA's command
    buffers for the loop over tokens (GPUs)."""
    rounds: int = 7
    """Number of turns per side; a turn continues one batch."""


def decode(argv: list[str]) -> None:
    """Race decoding with each batch size."""
    options, console = tyro.cli(DecodeOptions, args=argv), Console()
    print_machine(console)
    shared = ("layers", "width", "heads", "vocabulary", "prompt", "new_tokens")
    for batch in options.batch:
        settings = {name: getattr(options, name) for name in (*shared, "precision", "compile")}
        settings |= {"batch": batch, "context": 1024, "threads": cores()}
        ours = (*OURS, "decode")
        sides = [Contender("ours", ours, settings)]
        if options.variants:
            flags = ("env", f"XLA_FLAGS={COMMAND_BUFFERS}")
            sides.append(Contender("command buffers", (*flags, *ours), settings))
            sides.append(Contender(STACKED, ours, {**settings, "stacked": True}))
        else:
            sides.append(Contender(PEER, peer(options.torch_python, "decode"), settings))
        rows = print_race(
            f"decoding {options.new_tokens} tokens, {options.layers} x {options.width}, "
            f"V {options.vocabulary:,}, B {batch}, {options.precision}",
            sides,
            reference=sides[-1].name,
            work=batch * options.new_tokens,
            unit="tokens",
            rounds=options.rounds,
            steps=1,
            warmup=1,
        )
        if gpu_name():
            console.print(_bandwidth(options, batch, rows))


def _bandwidth(options: DecodeOptions, batch: int, rows: list[Row]) -> str:
    """Return the share of the memory's bandwidth that reading each weight once a token takes."""
    kinds = [chip for chip in CHIPS.values() if chip.device_kind == gpu_name()]
    if not kinds:
        return f"the bandwidth of {gpu_name()} is not known"
    width = 4 if options.precision == "float32" else 2
    shares = []
    for row in rows:
        num_bytes = width * int(row.record.facts["parameters"])
        share = row.rate / batch * num_bytes / kinds[0].memory_bandwidth
        shares.append(f"{row.record.name} {share:.0%}")
    return "of the bandwidth, every weight once a token: " + ", ".join(shares)


# The server ---------------------------------------------------------------------------------------


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
    layers: int = 6
    width: int = 256
    heads: int = 4
    vocabulary: int = 2048
    prompt: int = 30
    """Tokens of each prompt."""
    new_tokens: int = 128
    requests: int = 4
    """Requests of each client in a turn."""
    rounds: int = 3
    """Number of turns per side."""
    warmup_seconds: float = 60.0
    """Seconds for the server to compile its programs after it listens."""


def server(argv: list[str]) -> None:
    """Print a row for each number of clients, with medians of the turns."""
    restart_with_huge_pages()  # as `python -m train` does
    options, console = tyro.cli(ServerOptions, args=argv), Console(width=110)
    print_machine(console)
    table = Table("clients", "ours", PEER, "server", "/ ours", "/ HF", "p50 s", "p95 s")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = train.fit(_served(options, folder), str(folder / "run"), quiet=True)
        export_run(str(folder / "run"), str(folder / "exported"))
        served = Server(str(folder / "run"))
        try:
            time.sleep(options.warmup_seconds)
            for count in options.clients:
                latencies, rates = _serve(options, count, run, served, folder / "exported")
                ours, theirs, rate = (median(rates[each]) for each in ("ours", PEER, "server"))
                p50, p95 = np.percentile(latencies, (50, 95))
                figures = [f"{each:,.0f}" for each in (ours, theirs, rate)]
                ratios = f"{rate / ours:.2f}", f"{rate / theirs:.2f}"
                table.add_row(str(count), *figures, *ratios, f"{p50:.3f}", f"{p95:.3f}")
        finally:
            served.stop()
    console.print(table)


def _served(options: ServerOptions, folder: Path) -> Experiment:
    """Return an experiment of one step with a GPT-2 of the requested size."""
    return Experiment(
        name="served",
        model=TransformerConfig(
            d_model=options.width,
            num_layers=options.layers,
            layer_pattern=(BlockConfig(mixer=AttentionConfig(num_heads=options.heads)),),
            position_embedding=LearnedPositions(1024),
        ),
        data=TextDataConfig(
            path="python:library",
            max_bytes=1_000_000,
            sequence_length=64,
            tokenizer=TokenizerConfig("bpe", vocab_size=options.vocabulary),
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
    new_tokens, latencies = options.new_tokens, list[float]()
    drawn = np.random.default_rng(0)
    prompts = list(drawn.integers(1, options.vocabulary - 100, (count, options.prompt)))
    settings = {
        "folder": str(exported),
        "prompts": [row.tolist() for row in prompts],
        "new_tokens": new_tokens,
        "threads": cores(),
    }
    contender = Contender(PEER, peer(options.torch_python, "serving"), settings)

    def ours() -> int:
        model: Any = run.model
        made = generate(model, run.params, prompts, max_new_tokens=new_tokens, sampling=GREEDY)
        return sum(map(len, made.tokens))

    def serve_all() -> int:
        counts: list[int] = []
        clients = [
            threading.Thread(target=_request, args=(served, row, options, latencies, counts))
            for row in prompts
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        return sum(counts)

    with running(contender, warmup=1) as theirs:
        theirs.wait_until_ready()

        def peers() -> int:
            theirs.turn(1)
            return count * new_tokens

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


def _request(
    served: Server,
    prompt: np.ndarray,
    options: ServerOptions,
    seconds: list[float],
    tokens: list[int],
) -> None:
    """Send a prompt again and again, each with a connection of its own."""
    fields = {"prompt": prompt.tolist(), "max_tokens": options.new_tokens, "temperature": 0}
    body, headers = json.dumps(fields), {"Content-Type": "application/json"}
    for _ in range(options.requests):
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", served.port)
        connection.request("POST", "/v1/completions", body, headers)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        seconds.append(time.perf_counter() - start)
        tokens.append(answer["usage"]["completion_tokens"])


# Weights in four formats --------------------------------------------------------------------------

FORMATS = ("float32", "bfloat16", "int8", "int4")
"""The last two compute in float32."""


@dataclass(frozen=True)
class WeightsOptions:
    """Compare memory, decoding speed and perplexity of a run's weights in four formats.

    The published table is that of

        python -m train fit shakespeare_char_cpu --workdir W --data.path input.txt
            --model.d-model 256 --model.num-layers 6 --steps 350
        python -m bench small_weights W --layers 8 --width 1024

    Perplexity is that of the run's held-out text. Speed and memory are those of its model, with
    random weights of another depth and width if they are given: a small model fits into the caches,
    and says little about reading weights. The formats take turns in shuffled order.
    """

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


def small_weights(argv: list[str]) -> None:
    """Print a row for each format."""
    options, console = tyro.cli(WeightsOptions, args=argv), Console()
    print_machine(console)
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
    sides = {name: _with_format(model, params, name) for name in FORMATS}
    generator = np.random.default_rng(0)
    rates: dict[int, dict[str, list[float]]] = {}
    for batch in options.batch:

        def rate_of(name: str, batch: int = batch) -> Callable[[], float]:
            def tokens() -> int:
                prompts = list(generator.integers(config.vocab_size, size=(batch, options.prompt)))
                count = options.new_tokens
                generate(*sides[name], prompts, max_new_tokens=count, sampling=GREEDY)
                return batch * count

            return _rate_of(tokens)

        rates[batch] = take_turns({name: rate_of(name) for name in FORMATS}, options.rounds + 1)
    columns = [f"tokens a second,\nbatch {batch}" for batch in options.batch]
    title = "Weights in four formats"
    table = new_table(title, "format", "weights", "of layers", *columns, "perplexity")
    for name, (_, weights) in sides.items():
        table.add_row(
            name,
            format_bytes(_num_bytes(weights)),
            format_bytes(_num_bytes(weights["layers"])),  # without embeddings and output matrix
            # The first turn compiles.
            *(f"{median(rates[batch][name][1:]):,.1f}" for batch in options.batch),
            f"{_perplexity(run, name):.4f}",
        )
    console.print(table)


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


def _num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
