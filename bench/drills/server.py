"""Send a server large and hostile bodies, and clients that leave.

    python -m bench hostile_requests

A small model is served on this machine. Of each kind of body eight are sent at once: the table has
the status of the answers, the seconds until the last one, and how much the server's largest memory
grew. Then clients leave while they wait or are answered, and a request is timed after them. The
requests of a client are in `bench.drills.lm_eval`.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import train
from bench.drills.faults import tiny
from train.data.data_config import TextDataConfig, TokenizerConfig
from transformer import TransformerConfig

AT_ONCE = 8
LARGE, ALLOWED = 15 << 20, (4 << 20) - 1024
"""Bytes of a body: as large as no prompt needs, and just below the server's limit."""

MAX_MEMORY, MAX_SECONDS = 256.0, 2.0
"""MiB that eight large bodies may add, and seconds until the last one is answered."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

MESSAGE = '{"role": "user", "content": "a"}'


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
    Kind("messages", f'{{"messages": [{MESSAGE}', f", {MESSAGE}", "]}", CHAT),
    Kind("no JSON", "", "a", ""),
)


class Server:
    """Process that serves a run.

    Attributes:
      model: Name of its model.
      url: Address of its API.
      port: Its port.
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
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(each for each in status.splitlines() if each.startswith(name + ":"))
        return int(line.split()[1]) / 1024

    def forget_largest_memory(self) -> None:
        """Let the largest memory begin at the present one."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def leave(self, data: bytes) -> None:
        """Send a request and leave."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as connection:
            connection.sendall(data)

    def ask(self, data: bytes) -> str:
        """Return the status of the answer to a request."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as connection:
            connection.sendall(data)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        return answer.split(b" ", 2)[1].decode()


def request(path: str, body: bytes, *, chunked: bool = False) -> bytes:
    """Return a request whose connection ends with the answer."""
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = f"POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nConnection: close"
    data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    return f"{head}\r\n{length}\r\n\r\n".encode() + data


def completion(**fields: Any) -> bytes:
    """Return the request of a completion."""
    return request(COMPLETIONS, json.dumps({"prompt": "a", **fields}).encode())


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
    shown = " ".join(f"{status}x{count}" for status, count in sorted(statuses.items()))
    return shown, seconds, added


def bodies(server: Server) -> Iterator[str]:
    """Yield the table of bodies."""
    yield f"{AT_ONCE} bodies at once         MiB each   answers    seconds   MiB added"
    for size in (LARGE, ALLOWED):
        for kind in KINDS:
            body = kind.body(size)
            for chunked in (False, True) if kind is KINDS[0] and size == LARGE else (False,):
                data = request(kind.path, body, chunked=chunked)
                statuses, seconds, added = send_at_once(server, data)
                well = added <= MAX_MEMORY and (seconds <= MAX_SECONDS or size == ALLOWED)
                end = "" if well and "Error" not in statuses else "  FAILED"
                name = f"{kind.name}, chunked" if chunked else kind.name
                start = f"{name:24} {len(body) / 2**20:10.1f}"
                yield f"{start}   {statuses:8} {seconds:9.2f} {added:11.0f}{end}"


def departures(server: Server) -> Iterator[str]:
    """Yield how long a request takes after clients that leave, and if others are answered."""

    def seconds_of(data: bytes) -> float:
        start = time.monotonic()
        server.ask(data)
        return time.monotonic() - start

    short = completion(max_tokens=8, seed=1)
    server.ask(short)  # compiles
    yield "\nclients that leave       their request takes   the next one, seconds"
    yield f"{'none':40} {seconds_of(short):14.2f}"
    kinds: tuple[tuple[str, dict[str, Any], int], ...] = (
        ("1", {}, 1),
        ("1, n 4", {"n": 4}, 1),
        ("1, stream", {"stream": True}, 1),
        ("20, n 4: most of them wait", {"n": 4}, 20),
    )
    for name, fields, count in kinds:
        data = completion(**fields, max_tokens=2048, seed=3)
        server.ask(data)  # compiles
        whole = seconds_of(data)
        for _ in range(count):
            server.leave(data)
        time.sleep(0.2)
        seconds = seconds_of(short)
        yield f"{name:24} {whole:15.2f} {seconds:14.2f}" + ("" if seconds < 2 else "  FAILED")


def drill() -> int:
    """Print the tables; return 1 if something failed."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    failed = False
    with tempfile.TemporaryDirectory() as name:
        run, model = str(Path(name, "run")), TransformerConfig(d_model=32, num_layers=2)
        data = TextDataConfig(
            path="python:library",
            max_bytes=1_000_000,
            sequence_length=64,
            tokenizer=TokenizerConfig("bpe", vocab_size=2048),
            cache_dir=str(Path(name, "cache")),
        )
        train.fit(tiny(Path(name), name="served", model=model, data=data), run, quiet=True)
        server = Server(run)
        try:
            server.ask(completion())  # compiles
            for part in (bodies, departures):
                for line in part(server):
                    print(line, flush=True)
                    failed |= "FAILED" in line
        finally:
            server.stop()
    return int(failed)
