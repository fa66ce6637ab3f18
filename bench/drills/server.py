"""Send a server large and hostile bodies, clients that leave, and the requests of two clients.

    python -m bench.drills.server [--output FILE]

A small model is served on this machine. Of each kind of body eight are sent at once: the table has
the status of the answers, the seconds until the last one, and how much the server's largest memory
grew. Then clients leave while they wait or are answered, and a request is timed after them. Last,
the client `openai` and the models of `lm_eval` (EleutherAI's evaluation harness) send requests of
their own, if they are installed.
"""

import argparse
import asyncio
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import train
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from transformer import TransformerConfig

AT_ONCE = 8
LARGE, ALLOWED = 15 << 20, (4 << 20) - 1024
"""Bytes of a body: as large as no prompt needs, and just below the server's limit."""

MAX_MEMORY, MAX_SECONDS = 256.0, 2.0
"""MiB that eight large bodies may add, and seconds until the last one is answered."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Kind(NamedTuple):
    """A body, filled with repetitions of a part."""

    name: str
    start: str
    part: str
    end: str
    path: str = COMPLETIONS

    def body(self, size: int) -> bytes:
        """Return the body with about `size` bytes."""
        part = self.part.encode()
        return self.start.encode() + part * (size // len(part)) + self.end.encode()


KINDS = (
    Kind("text", '{"prompt": "', "the quick brown fox ", '"}'),
    Kind("one word", '{"prompt": "', "a", '"}'),
    Kind("other script", '{"prompt": "', "語", '"}'),
    Kind("token ids", '{"prompt": [1', ", 1000", "]}"),
    Kind("many prompts", '{"prompt": ["a"', ', "a"', "]}"),
    Kind("large prompts", '{"prompt": ["a"', ', "' + "the fox " * 4000 + '"', "]}"),
    Kind("empty objects", '{"prompt": [{}', ",{}", "]}"),
    Kind("nested lists", '{"prompt": ', "[", ""),
    Kind("digits", '{"n": ', "9", "}"),
    Kind("fields", '{"prompt": "a"', ', "prompt": "a"', "}"),
    Kind("long name", '{"', "n", '": 1}'),
    Kind("long value", '{"temperature": "', "9", '"}'),
    Kind("stop strings", '{"stop": ["a"', ', "a"', "]}"),
    Kind("one message", '{"messages": [{"role": "user", "content": "', "the ", '"}]}', CHAT),
    Kind(
        "messages",
        '{"messages": [{"role": "user", "content": "a"}',
        ', {"role": "user", "content": "a"}',
        "]}",
        CHAT,
    ),
    Kind("no JSON", "", "a", ""),
)


class Server:
    """Process that serves a run.

    Attributes:
      port: Its port.
      model: Name of its model.
    """

    def __init__(self, run: str):
        words = [sys.executable, "-m", "train", "serve", run, "--port", "0", "--json"]
        self._process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        first = json.loads(self._process.stdout.readline())
        self.model, self.url = first["model"], first["url"]
        self.port = int(self.url.rpartition(":")[2].removesuffix("/v1"))

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def memory(self, name: str) -> float:
        """Return `VmRSS` (now) or `VmHWM` (the largest so far) in MiB."""
        status = pathlib.Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(each for each in status.splitlines() if each.startswith(name + ":"))
        return int(line.split()[1]) / 1024

    def forget_largest_memory(self) -> None:
        """Let the largest memory begin at the present one."""
        pathlib.Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def connect(self) -> socket.socket:
        """Return a connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def request(self, path: str, body: bytes, *, chunked: bool = False) -> bytes:
        """Return a request whose connection ends with the answer."""
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
        head = f"POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nConnection: close"
        data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
        return f"{head}\r\n{length}\r\n\r\n".encode() + data

    def ask(self, data: bytes) -> str:
        """Return the status of the answer to a request."""
        with self.connect() as connection:
            connection.sendall(data)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        return answer.split(b" ", 2)[1].decode()

    def leave(self, data: bytes) -> None:
        """Send a request and leave."""
        with self.connect() as connection:
            connection.sendall(data)


def send_at_once(server: Server, data: bytes) -> tuple[str, float, float]:
    """Send a request eight times; return the statuses, the seconds and the MiB added."""
    statuses: Counter[str] = Counter()

    def send() -> None:
        try:
            status = server.ask(data)
        except OSError as error:
            status = type(error).__name__
        statuses.update([status])

    server.forget_largest_memory()
    before, start = server.memory("VmRSS"), time.monotonic()
    threads = [threading.Thread(target=send) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    added = max(0.0, server.memory("VmHWM") - before)
    return (
        " ".join(f"{status}x{count}" for status, count in sorted(statuses.items())),
        seconds,
        added,
    )


def bodies(server: Server) -> Iterator[str]:
    """Yield the table of bodies."""
    yield f"{AT_ONCE} bodies at once         MiB each   answers    seconds   MiB added"
    for size in (LARGE, ALLOWED):
        for kind in KINDS:
            body = kind.body(size)
            for chunked in (False, True) if kind is KINDS[0] and size == LARGE else (False,):
                data = server.request(kind.path, body, chunked=chunked)
                statuses, seconds, added = send_at_once(server, data)
                ok = added <= MAX_MEMORY and (seconds <= MAX_SECONDS or size == ALLOWED)
                name = f"{kind.name}, chunked" if chunked else kind.name
                size_text = f"{len(body) / 2**20:.1f}"
                yield f"{name:24} {size_text:>10}   {statuses:8} {seconds:9.2f} {added:11.0f}" + (
                    "" if ok and "Error" not in statuses else "  FAILED"
                )


def departures(server: Server) -> Iterator[str]:
    """Yield how long a request takes after clients that leave, and if others are answered."""

    def request(**fields: Any) -> bytes:
        return server.request(COMPLETIONS, json.dumps({"prompt": "a", **fields}).encode())

    def seconds_of(data: bytes) -> float:
        start = time.monotonic()
        server.ask(data)
        return time.monotonic() - start

    short = request(max_tokens=8, seed=1)
    server.ask(short)  # compiles
    yield ""
    yield "clients that leave       their request takes   the next one, seconds"
    yield f"{'none':40} {seconds_of(short):14.2f}"
    for name, fields, count in (
        ("1", {}, 1),
        ("1, n 4", {"n": 4}, 1),
        ("1, stream", {"stream": True}, 1),
        ("20, n 4: most of them wait", {"n": 4}, 20),
    ):
        data = request(**fields, max_tokens=2048, seed=3)
        server.ask(data)  # compiles
        whole = seconds_of(data)
        for _ in range(count):
            server.leave(data)
        time.sleep(0.2)
        seconds = seconds_of(short)
        yield f"{name:24} {whole:15.2f} {seconds:14.2f}" + ("" if seconds < 2 else "  FAILED")


def clients(server: Server) -> Iterator[str]:
    """Yield what the clients were answered."""
    yield ""
    yield "clients"
    for name, check in (("openai", check_openai), ("lm_eval", check_harness)):
        try:
            check_lines = check(server)
        except ImportError as error:
            yield f"{name}: not tried ({error})"
            continue
        yield from check_lines


def outcome(name: str, call: Callable[[], Any]) -> str:
    """Return a line with what a call returned or raised."""
    try:
        text = repr(call())
    except Exception as error:  # noqa: BLE001
        text = f"{type(error).__name__}: {error}"
    return f"{name:44} {text if len(text) <= 120 else text[:117] + '...'}"


def check_openai(server: Server) -> list[str]:
    """Return the lines of the client of OpenAI's API."""
    import openai

    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    model: Any = server.model
    question: Any = {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": None}
    common: Any = dict(model=model, max_tokens=8, seed=1)
    nulls: Any = dict(
        common,
        stop=None,
        logprobs=None,
        temperature=None,
        top_p=None,
        n=None,
        logit_bias=None,
        presence_penalty=None,
        stream_options=None,
    )

    def conversation() -> str:
        first = client.chat.completions.create(messages=[question], **common).choices[0].message
        messages: Any = [question, first.to_dict(), question]
        second = client.chat.completions.create(messages=messages, **nulls, tools=None)
        return str(second.choices[0].finish_reason)

    def streamed() -> int:
        messages: Any = [question]
        with client.chat.completions.create(messages=messages, stream=True, **common) as stream:
            return sum(len(each.choices[0].delta.content or "") > 0 for each in stream)

    def complete(**fields: Any) -> list[str]:
        answer = client.completions.create(**{**common, **fields})
        return [each.finish_reason for each in answer.choices]

    return [
        f"openai {openai.__version__}",
        outcome("  models", lambda: [each.id for each in client.models.list()]),
        outcome("  completion of two texts, n 2", lambda: complete(prompt=["a", "b"], n=2)),
        outcome("  completion of token ids", lambda: complete(prompt=[[5, 6], [7]])),
        outcome("  completion with nulls", lambda: complete(**nulls, prompt="a", suffix=None)),
        outcome("  chat of three turns, with nulls", conversation),
        outcome("  pieces of a stream", streamed),
        outcome("  logprobs and echo", lambda: complete(prompt="a", logprobs=1, echo=True)),
    ]


def check_harness(server: Server) -> list[str]:
    """Return the lines of the harness's own models."""
    from importlib.metadata import version

    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    options: Any = dict(model=server.model, tokenizer_backend=None, max_retries=1, num_concurrent=1)
    texts = LocalCompletionsAPI(
        base_url=server.url + "/completions", tokenized_requests=False, **options
    )
    chats = LocalChatCompletion(base_url=server.url + "/chat/completions", **options)
    generation = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0}

    def generate(model: Any, prompt: Any) -> Any:
        instance = Instance("generate_until", {}, (prompt, dict(generation)), 0)
        return model.generate_until([instance], disable_tqdm=True)

    def payload(prompt: Any, **fields: Any) -> str:
        body = texts._create_payload(prompt, **fields)
        return server.ask(server.request(COMPLETIONS, json.dumps(body).encode()))

    several: Any = dict(generate=True, gen_kwargs=dict(generation), eos="</s>")
    messages = [{"role": "user", "content": "Hello"}]
    return [
        f"lm_eval {version('lm_eval')}",
        outcome("  local-completions, generate_until", lambda: generate(texts, "the fox")),
        outcome("  its request with token ids: status", lambda: payload([[5, 6], [7]], **several)),
        outcome("  local-chat-completions", lambda: asyncio.run(chat_of(chats, messages))),
        outcome("  loglikelihood (logprobs, echo): status", lambda: payload([[5, 6]])),
    ]


async def chat_of(model: Any, messages: list[dict[str, str]]) -> Any:
    """Return the harness's reading of an answer in a chat."""
    import requests

    body = model._create_payload(messages, generate=True, gen_kwargs={"max_gen_toks": 8})
    answer = await asyncio.to_thread(requests.post, model.base_url, json=body, timeout=60)
    return model.parse_generations(answer.json())


def experiment(folder: pathlib.Path) -> Experiment:
    """Return a small experiment that takes seconds."""
    return Experiment(
        name="served",
        model=TransformerConfig(d_model=32, num_layers=2),
        data=TextDataConfig(
            path="python:library",
            max_bytes=1_000_000,
            sequence_length=64,
            tokenizer=TokenizerConfig("bpe", vocab_size=2048),
            cache_dir=str(folder / "cache"),
        ),
        steps=2,
        batch_size=8,
        evaluation=EvaluationConfig(every=0, num_batches=1),
        checkpoint=CheckpointConfig(every=2),
    )


def main() -> int:
    """Print the tables; return 1 if something failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        train.fit(experiment(folder), str(folder / "run"), quiet=True)
        server = Server(str(folder / "run"))
        try:
            server.ask(server.request(COMPLETIONS, b'{"prompt": "a"}'))  # compiles
            for part in (bodies, departures, clients):
                for line in part(server):
                    print(line, flush=True)
                    lines.append(line)
        finally:
            server.stop()
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")
    return int(any("FAILED" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
