"""Speed of the server for 1, 8 and 32 clients, beside `generate` of the whole batch.

    python -m bench.server --torch-python ~/torch/bin/python

A small model is trained for a step, exported, and served on this machine. Each client sends one
request after the other: a prompt of token ids, to be continued greedily. In turns with the server,
our own `generate` and the one of Hugging Face, on the same weights, continue as many prompts as
there are clients, as one batch. Rates are new tokens per second; latencies are those of requests.
All sides share the processor's cores with nothing but the clients.
"""

import http.client
import json
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import train
from bench.contender import Contender, Runner, interpreter, running
from bench.drills.server import Server
from bench.machine import cores, machine
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.errors import UserError
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.interop.huggingface_export import export_run
from train.run import Run
from train.runtime.startup import restart_with_huge_pages
from transformer.attention.full import AttentionConfig
from transformer.generation.generate import generate
from transformer.generation.sampling import SamplingConfig
from transformer.layers.position_embedding import LearnedPositions
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig
from transformer.models.language_model import LanguageModel

GREEDY = SamplingConfig(temperature=0)


@dataclass(frozen=True)
class Options:
    """Compare the server with `generate`."""

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


def experiment(options: Options, folder: Path) -> Experiment:
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


def prompts(options: Options, count: int) -> list[np.ndarray]:
    """Return random prompts."""
    draw = np.random.default_rng(0)
    return list(draw.integers(1, options.vocabulary - 100, (count, options.prompt)))


class Client(threading.Thread):
    """Sends the same prompt again and again.

    Attributes:
      seconds: Of each request.
      num_tokens: Of all answers.
    """

    def __init__(self, server: Server, prompt: np.ndarray, options: Options):
        super().__init__()
        self.seconds: list[float] = []
        self.num_tokens = 0
        self._server, self._count = server, options.requests
        body = {"prompt": prompt.tolist(), "max_tokens": options.new_tokens, "temperature": 0}
        self._body = json.dumps(body)

    def run(self) -> None:
        """Send the requests, each with a connection of its own."""
        for _ in range(self._count):
            start = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", self._server.port)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", self._body, headers)
            answer = json.loads(connection.getresponse().read())
            connection.close()
            self.seconds.append(time.perf_counter() - start)
            self.num_tokens += answer["usage"]["completion_tokens"]


@dataclass
class Turns:
    """Measurements of one number of clients: rates of each turn, latencies of all requests."""

    server: list[float]
    ours: list[float]
    peer: list[float]
    latencies: list[float]


def generate_batch(run: Run, rows: list[np.ndarray], options: Options) -> int:
    """Continue prompts as one batch; return the number of new tokens."""
    assert isinstance(run.model, LanguageModel)
    count = options.new_tokens
    made = generate(run.model, run.params, rows, max_new_tokens=count, sampling=GREEDY)
    return sum(map(len, made.tokens))


def measure(options: Options, count: int, run: Run, server: Server, peer: Runner) -> Turns:
    """Let the server, our `generate` and the peer's take turns."""
    turns = Turns([], [], [], [])
    rows = prompts(options, count)
    for turn in range(options.rounds + 1):  # the first is a warm-up
        start = time.perf_counter()
        ours = generate_batch(run, rows, options) / (time.perf_counter() - start)
        clients = [Client(server, row, options) for row in rows]
        start = time.perf_counter()
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        peer.turn(1)
        peer_seconds = time.perf_counter() - start
        if turn:
            turns.ours.append(ours)
            turns.server.append(sum(client.num_tokens for client in clients) / seconds)
            turns.peer.append(count * options.new_tokens / peer_seconds)
            turns.latencies += [each for client in clients for each in client.seconds]
    return turns


def main(options: Options) -> None:
    """Print a row for each number of clients, with medians of the turns."""
    console = Console(width=110)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    table = Table("clients", "ours", "Hugging Face", "server", "/ ours", "/ HF", "p50 s", "p95 s")
    torch_python = interpreter(options.torch_python)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = train.fit(experiment(options, folder), str(folder / "run"), quiet=True)
        export_run(str(folder / "run"), str(folder / "exported"))
        server = Server(str(folder / "run"))
        try:
            time.sleep(options.warmup_seconds)
            for count in options.clients:
                settings = {
                    "folder": str(folder / "exported"),
                    "prompts": [row.tolist() for row in prompts(options, count)],
                    "new_tokens": options.new_tokens,
                    "threads": cores(),
                }
                command = (torch_python, "-m", "bench.peers.huggingface_serving")
                with running(Contender("Hugging Face", command, settings), warmup=1) as peer:
                    peer.wait_until_ready()
                    turns = measure(options, count, run, server, peer)
                rates = [float(np.median(each)) for each in (turns.ours, turns.peer, turns.server)]
                ours, theirs, served = rates
                p50, p95 = np.percentile(turns.latencies, (50, 95))
                figures = [f"{rate:,.0f}" for rate in rates]
                ratios = f"{served / ours:.2f}", f"{served / theirs:.2f}"
                table.add_row(str(count), *figures, *ratios, f"{p50:.3f}", f"{p95:.3f}")
        finally:
            server.stop()
    console.print(table)


if __name__ == "__main__":
    restart_with_huge_pages()  # as `python -m train` does
    try:
        main(tyro.cli(Options))
    except UserError as error:
        sys.exit(f"error: {error}")
