"""HTTP server of an OpenAI-compatible API, by the standard library.

    GET  /health                 200 once the model is loaded
    GET  /v1/models              the model that is served
    POST /v1/completions         continue prompts
    POST /v1/chat/completions    answer a conversation, by the tokenizer's chat template
    POST /v1/embeddings          vectors of texts, of a text encoder

Each connection has a thread and one request; one more thread generates the answers of all, as one
batch. It waits for no client: one that reads or sends slowly keeps its own connection waiting. A
generation ends when its client has left. Vectors and log-probabilities are computed by the thread
of the connection, one batch of all at a time.

A web page in the user's browser can send requests to this machine, but cannot make the server
compute. What it sends has a foreign `Origin`, another host's name (DNS rebinding), or a content
type other than JSON; before a browser sends JSON it asks (`OPTIONS`), and that is refused.
"""

import base64
import contextlib
import fnmatch
import hmac
import http.server
import ipaddress
import json
import logging
import selectors
import socket
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from train.errors import UserError
from train.serving.answers import Answer, Choice, EncodedRequest, Generator
from train.serving.embedder import Embedder
from train.serving.requests import (
    EmbeddingRequest,
    RequestError,
    parse_chat,
    parse_completion,
    parse_embedding,
)

T = TypeVar("T")

log = logging.getLogger(__name__)

MIN_BODY_LIMIT, BODY_BYTES_PER_TOKEN = 4 << 20, 16
"""Bytes of the largest request: so many for each token of the longest prompt, but not less."""

SMALL_BODY_BYTES, MAX_LARGE_BODIES = 1 << 16, 8
"""A larger body is not read while so many are read or parsed."""

CLIENT_SECONDS = 60.0
"""Seconds in which a body must have arrived, and in which a client must send or read something."""

MAX_DISCARDED_BYTES = 1 << 28
"""Most bytes of a refused request that are read, and thrown away."""

MAX_ERROR_LENGTH = 1000
"""Most characters of an error in an answer."""

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
"""Paths that generate."""

EMBEDDINGS = "/v1/embeddings"


class Server(http.server.ThreadingHTTPServer):
    """Server of one model. `serve_forever` answers requests until `shutdown`.

    Args:
      address: Host and port; with port 0 a free one is taken. `server_port` is the port in use.
      answers: Answers the requests.
      model_name: Name of the model in requests and answers.
      api_key: If not empty, requests need `Authorization: Bearer <api_key>`.
      allowed_hosts: Names under which the server is reached beside `LOOPBACK_NAMES`, or patterns of
        them (`*.example.org`). If empty, a server that listens on a network answers to any name.

    Raises:
      UserError: The address cannot be used.
    """

    daemon_threads = True  # a client that keeps its connection must not keep the process
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        answers: Generator | Embedder,
        model_name: str,
        api_key: str = "",
        allowed_hosts: Sequence[str] = (),
    ):
        self.answers, self.model_name, self.api_key = answers, model_name, api_key
        self.created = int(time.time())
        self.max_body_bytes = max(MIN_BODY_LIMIT, answers.max_prompt_tokens * BODY_BYTES_PER_TOKEN)
        self.large_bodies = threading.BoundedSemaphore(MAX_LARGE_BODIES)
        self.parsing = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        try:
            super().__init__(address, Handler)
        except OSError as error:
            host, port = address
            raise UserError(
                f"serve {host}:{port}: {error.strerror}; give another --host or --port"
            ) from error
        self._host_patterns = (
            *LOOPBACK_NAMES,
            address[0].lower(),
            *(host_name(each) for each in allowed_hosts),
        )
        is_local = ipaddress.ip_address(str(self.server_address[0])).is_loopback
        self.has_any_name = not is_local and not allowed_hosts

    def is_allowed(self, host: str) -> bool:
        """Return True for a name of this machine, and for one that was allowed."""
        return any(fnmatch.fnmatchcase(host, pattern) for pattern in self._host_patterns)

    def model(self) -> dict[str, Any]:
        """Return the description of the model in the API."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "linen-transformer",
        }


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers the request of one connection, which ends with the answer (as in HTTP/1.0)."""

    timeout = CLIENT_SECONDS
    disable_nagle_algorithm = True  # else the body of an answer waits for the next packet
    server: Server

    def do_GET(self) -> None:
        """Answer for the server's state and its model."""
        self._respond(self._describe)

    def do_POST(self) -> None:
        """Answer a request to generate, or for vectors."""
        self._respond(self._embed if self._path() == EMBEDDINGS else self._generate)

    def _respond(self, answer: Callable[[], None]) -> None:
        """Answer a request, or send what is wrong with it."""
        try:
            if self._path() != "/health":  # asked by the probes of a cluster, by address
                self._check_hosts()
                self._check_key()
            answer()
        except RequestError as error:
            self._send_json(error.status, error_body(error.status, str(error), error.field))
            self._discard_body()
        except (ConnectionError, TimeoutError) as error:
            self.log_error("%s", error)
        except UserError as error:  # out of memory: other requests may need less
            log.warning("%s %s: %s", self.command, self._path(), error)
            self._send_json(503, error_body(503, str(error)))
        except Exception:
            # One request must not end the server; the log says what happened.
            log.exception("%s %s failed", self.command, self._path())
            self._send_json(500, error_body(500, "the server failed; its log says why"))

    def _path(self) -> str:
        return urllib.parse.unquote(self.path.partition("?")[0]).rstrip("/")

    def _check_hosts(self) -> None:
        """Raise RequestError for a request that a page of another host may have sent."""
        hosts = [host_name(each) for each in self.headers.get_all("Host", [])]
        for host in hosts:
            if not self.server.has_any_name and not self.server.is_allowed(host):
                raise RequestError(
                    f"Host {host!r}: is no name of this server; use localhost, or "
                    "start the server with --allowed-hosts NAME",
                    status=403,
                )
        for origin in self.headers.get_all("Origin", []):
            if host_name(origin) not in hosts and not self.server.is_allowed(host_name(origin)):
                raise RequestError(
                    f"Origin {origin!r}: pages of other hosts are not answered; start "
                    "the server with --allowed-hosts NAME to allow a host",
                    status=403,
                )

    def _check_key(self) -> None:
        key = self.server.api_key
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        # Takes equally long for all wrong keys. Headers are read as latin-1.
        matches = hmac.compare_digest(given.strip().encode("latin-1"), key.strip().encode())
        if key and not (matches and scheme.lower() == "bearer"):
            raise RequestError(
                "api key: is missing or wrong; send it as a bearer token", status=401
            )

    def _describe(self) -> None:
        model = self.server.model()
        pages: dict[str, dict[str, Any]] = {
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [model]},
            f"/v1/models/{self.server.model_name}": model,
        }
        if self._path() not in pages:
            raise self._unknown_path()
        self._send_json(200, pages[self._path()])

    def _unknown_path(self) -> RequestError:
        return RequestError(
            f"{self.command} {self._path()}: is not served; use GET /v1/models, or POST "
            f"{COMPLETIONS}, {CHAT} or {EMBEDDINGS}",
            status=404,
        )

    def _generate(self) -> None:
        is_chat = self._path() == CHAT
        if not is_chat and self._path() != COMPLETIONS:
            raise self._unknown_path()
        generator = self.server.answers
        if not isinstance(generator, Generator):
            raise RequestError(
                f"model {self.server.model_name!r}: is a text encoder, which generates nothing; "
                f"POST {EMBEDDINGS}, or serve the run of a language model",
                "model",
            )
        parse = parse_chat if is_chat else parse_completion
        encoded = self._read_request(lambda body: generator.encode(parse(body)))
        common = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self.server.model_name,
        }
        if encoded.request.stream:
            self._stream(generator, encoded, is_chat, common)
            return
        answer = generator.answer(encoded, check_client=self._check_client)
        choices = [
            {"index": index, **content(is_chat, each), "finish_reason": finish_reason(each)}
            for index, each in enumerate(answer.choices)
        ]
        self._send_json(200, {**common, "choices": choices, "usage": usage(answer)})

    def _embed(self) -> None:
        embedder = self.server.answers
        if not isinstance(embedder, Embedder):
            raise RequestError(
                f"model {self.server.model_name!r}: is a language model, and no text encoder; "
                "serve the run of one, or compute vectors of this one by the command embed",
                "model",
            )

        def encode(body: dict[str, Any]) -> tuple[EmbeddingRequest, list[np.ndarray]]:
            request = parse_embedding(body)
            return request, embedder.encode(request)

        request, rows = self._read_request(encode)
        vectors = embedder.embed(rows, self._check_client)
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
                if request.encoding_format == "base64"
                else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ]
        num_tokens = sum(map(len, rows))
        counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        self._send_json(
            200,
            {"object": "list", "data": data, "model": self.server.model_name, "usage": counts},
        )

    def _read_request(self, parse: Callable[[dict[str, Any]], T]) -> T:
        length = self._body_length()
        is_large = length > SMALL_BODY_BYTES
        if is_large and not self.server.large_bodies.acquire(blocking=False):
            raise RequestError("body: too many large ones arrive; send it again later", status=503)
        try:
            data = self._read_body(length)
            with self.server.parsing:  # one at a time: parsed JSON takes up to 25 times its size
                return parse(self._parse_body(data))
        finally:
            if is_large:
                self.server.large_bodies.release()

    def _body_length(self) -> int:
        if self.headers.get_content_type() != "application/json":
            given = self.headers.get("Content-Type", "")
            raise RequestError(
                f"Content-Type {given!r}: is not supported; send application/json", status=415
            )
        lengths = self.headers.get_all("Content-Length", [])
        if len(lengths) != 1 or not lengths[0].isdecimal() or "Transfer-Encoding" in self.headers:
            raise RequestError("body: its length is missing; send Content-Length", status=411)
        length = int(lengths[0][:19])  # Python converts no number of thousands of digits
        if length > self.server.max_body_bytes:
            limit = f"{self.server.max_body_bytes / 2**20:.3g} MiB"
            raise RequestError(f"body: is larger than {limit}; send a shorter one", status=413)
        return length

    def _read_body(self, length: int) -> bytes:
        data, end = bytearray(), time.monotonic() + CLIENT_SECONDS
        # `read1` returns what is there: `read` would wait for a client that sends a byte at a time.
        while len(data) < length and (part := self.rfile.read1(length - len(data))):
            data += part
            if time.monotonic() > end:
                raise RequestError("body: arrives too slowly; send it again", status=408)
        return bytes(data)

    def _parse_body(self, data: bytes) -> dict[str, Any]:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"body: is not JSON ({error}); send an object") from error
        if not isinstance(body, dict):
            raise RequestError("body: is no JSON object; send one")
        model = body.get("model") or self.server.model_name
        if model != self.server.model_name:
            raise RequestError(
                f"model {model!r}: is not served; give {self.server.model_name!r}", "model", 404
            )
        return body

    def _discard_body(self) -> None:
        """Read what a refused client still sends: it would lose the answer in a reset."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            size, end = 0, time.monotonic() + CLIENT_SECONDS
            while (part := self.rfile.read1(1 << 16)) and size < MAX_DISCARDED_BYTES:
                size += len(part)
                if time.monotonic() > end:
                    break

    def _check_client(self) -> None:
        """Raise ConnectionError if the client has left, or has closed its sending side."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            readable = selector.select(timeout=0)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionError("the client has left")

    def _stream(
        self, generator: Generator, encoded: EncodedRequest, is_chat: bool, common: dict[str, Any]
    ) -> None:
        """Send an answer in pieces, as it is generated."""
        has_begun = False

        def send_text(text: str) -> None:
            nonlocal has_begun
            if not has_begun:  # before the first piece an error has its own status
                has_begun = True
                self._begin_stream(is_chat, common)
            self._send_chunk(common, piece(is_chat, text))

        try:
            answer = generator.answer(encoded, send_text, self._check_client)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            if not has_begun:
                raise
            # The status has been sent: the stream says it, and ends without its last event.
            log.exception("%s %s failed", self.command, self._path())
            self._send_event(json.dumps(error_body(500, str(error))))
            return
        if not has_begun:
            self._begin_stream(is_chat, common)
        reason = finish_reason(answer.choices[0])
        self._send_chunk(common, piece(is_chat, ""), reason)
        if encoded.request.include_usage:
            self._send_event(json.dumps({**common, "choices": [], "usage": usage(answer)}))
        self._send_event("[DONE]")

    def _begin_stream(self, is_chat: bool, common: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()
        if is_chat:
            common["object"] = "chat.completion.chunk"
            self._send_chunk(common, {"delta": {"role": "assistant", "content": ""}})

    def _send_chunk(
        self, common: dict[str, Any], content: dict[str, Any], reason: str | None = None
    ) -> None:
        choice = {"index": 0, **content, "finish_reason": reason}
        self._send_event(json.dumps({**common, "choices": [choice]}))

    def _send_event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())

    def _send_json(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        if status == 503:
            self.send_header("Retry-After", "1")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def host_name(place: str) -> str:
    """Return the host of a `Host`, an `Origin` or a URL, without its port; empty if it has none."""
    try:
        return urllib.parse.urlsplit(place if "//" in place else f"//{place}").hostname or ""
    except ValueError:
        return ""


def content(is_chat: bool, choice: Choice) -> dict[str, Any]:
    """Return the part of a choice that has the text."""
    if is_chat:
        return {"message": {"role": "assistant", "content": choice.text}}
    return {"text": choice.text, "logprobs": choice.logprobs}


def piece(is_chat: bool, text: str) -> dict[str, Any]:
    """Return the part of a choice that has a piece of a streamed text; an empty one ends it."""
    if is_chat:
        return {"delta": {"content": text} if text else {}}
    return {"text": text, "logprobs": None}


def error_body(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """Return an error as the API writes it."""
    if len(message) > MAX_ERROR_LENGTH:  # it quotes the request
        message = message[:MAX_ERROR_LENGTH] + "..."
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


def finish_reason(choice: Choice) -> str:
    """Return why an answer ended, as the API names it."""
    return "stop" if choice.stopped else "length"


def usage(answer: Answer) -> dict[str, int]:
    """Return the number of tokens read and generated."""
    generated = sum(each.num_tokens for each in answer.choices)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": answer.prompt_tokens + generated,
    }
