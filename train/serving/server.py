"""HTTP server of an OpenAI-compatible API, by the standard library.

    GET  /health                 200 once the model is loaded
    GET  /v1/models              the model that is served
    POST /v1/completions         continue prompts
    POST /v1/chat/completions    answer a conversation, by the tokenizer's chat template

Each connection has a thread; generation is one request at a time. With `stream` an answer is sent
as server-sent events while it is generated, by a thread of its own: a client that reads slowly
must not keep the others waiting. A generation ends when its client has left.

A web page in the user's browser can send requests to this machine, but cannot make the server
compute. What it sends has a foreign `Origin`, another host's name (DNS rebinding), or a content
type other than JSON; before a browser sends JSON it asks (`OPTIONS`), and nothing is allowed.
"""

import contextlib
import fnmatch
import hmac
import http.server
import io
import ipaddress
import json
import logging
import queue
import re
import selectors
import socket
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from train.errors import UsageError, UserError
from train.serving.answers import Answer, EncodedRequest, Generator
from train.serving.requests import (
    GenerationRequest,
    RequestError,
    parse_chat,
    parse_completion,
)
from train.tasks.text_completion import Completion

log = logging.getLogger(__name__)

MIN_BODY_LIMIT, BODY_BYTES_PER_TOKEN = 4 << 20, 16
"""Bytes of the largest request: so many for each token of the longest prompt, but not less. Parsed
JSON takes up to 25 times its size, and one body is parsed at a time."""

SMALL_BODY_BYTES, MAX_LARGE_BODIES = 1 << 16, 8
"""A larger body is not read while so many others are being read or wait for their answers."""

MAX_DISCARDED_BYTES = 1 << 28
"""Most bytes of a refused request that are read, and thrown away."""

MAX_ERROR_LENGTH = 1000
"""Most characters of an error in an answer."""

IDLE_SECONDS = 120.0
"""Seconds after which a connection without a request, or without the whole body, is closed."""

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")

STATUS_LINE_START = b"HTTP/1.1 "
"""With which every answer begins."""


class Route(NamedTuple):
    """Format of one path that generates: its parser, its names and its answers."""

    parse: Callable[[dict[str, Any]], GenerationRequest]
    object_name: str
    chunk_name: str
    id_prefix: str
    choice: Callable[[Completion], dict[str, Any]]
    """Return the content of a whole answer."""
    piece: Callable[[str], dict[str, Any]]
    """Return the content of a part of an answer."""
    first: tuple[dict[str, Any], ...]
    """Parts of a stream before its first text."""
    last: dict[str, Any]
    """Content beside the reason why a stream ended."""


ROUTES = {
    "/v1/completions": Route(
        parse_completion,
        "text_completion",
        "text_completion",
        "cmpl",
        lambda each: {"text": each.text, "logprobs": None},
        lambda text: {"text": text, "logprobs": None},
        first=(),
        last={"text": "", "logprobs": None},
    ),
    "/v1/chat/completions": Route(
        parse_chat,
        "chat.completion",
        "chat.completion.chunk",
        "chatcmpl",
        lambda each: {"message": {"role": "assistant", "content": each.text}},
        lambda text: {"delta": {"content": text}},
        first=({"delta": {"role": "assistant", "content": ""}},),
        last={"delta": {}},
    ),
}
"""Paths that generate."""


class Server(http.server.ThreadingHTTPServer):
    """Server of one model. `serve_forever` answers requests until `shutdown`.

    Args:
      address: Host and port; with port 0 a free one is taken. `server_port` is the port in use.
      generator: Answers the requests.
      model_name: Name of the model in requests and answers.
      api_key: If not empty, requests need `Authorization: Bearer <api_key>`.
      allowed_hosts: Names under which the server is reached beside `LOOPBACK_NAMES`, or patterns of
        them (`*.example.org`). If empty, a server that listens on a network answers to any name.

    Raises:
      UserError: The address cannot be used, or a name of a host is not one.
    """

    daemon_threads = True  # a client that keeps its connection must not keep the process
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        generator: Generator,
        model_name: str,
        api_key: str = "",
        allowed_hosts: Sequence[str] = (),
    ):
        self.generator, self.model_name, self.api_key = generator, model_name, api_key
        self.created = int(time.time())
        names = {each: allowed_name(each) for each in allowed_hosts}
        if wrong := [each for each, name in names.items() if not re.fullmatch(r"[\w.*:-]+", name)]:
            raise UsageError(
                f"allowed_hosts {wrong[0]}: is no name of a host; give names, such as example.org"
            )
        self._host_patterns = (*LOOPBACK_NAMES, address[0].lower(), *names.values())
        self.large_bodies = threading.BoundedSemaphore(MAX_LARGE_BODIES)
        self.parsing = threading.Lock()
        self.max_body_bytes = max(
            MIN_BODY_LIMIT, generator.max_prompt_tokens * BODY_BYTES_PER_TOKEN
        )
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        try:
            super().__init__(address, Handler)
        except (OSError, OverflowError) as error:
            host, port = address
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(f"serve {host}:{port}: {reason}; give another --host or --port") from (
                error
            )
        is_local = ipaddress.ip_address(str(self.server_address[0])).is_loopback
        self.has_any_name = not is_local and not allowed_hosts

    def is_allowed(self, host: str) -> bool:
        """Return True for a name of this machine, and for one that was allowed."""
        return bool(host) and any(fnmatch.fnmatchcase(host, each) for each in self._host_patterns)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a connection, unless the client has ended it."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def model(self) -> dict[str, Any]:
        """Return the description of the model in the API."""
        owner = "linen-transformer"
        fields = {"object": "model", "created": self.created, "owned_by": owner}
        return {"id": self.model_name, **fields}


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True  # else the body of an answer waits for the next packet
    server: Server

    def setup(self) -> None:
        """Begin a connection."""
        super().setup()
        self._num_sent_early = 0
        self._body_is_unread = False

    def do_GET(self) -> None:
        """Answer for the server's state and its model."""
        model = self.server.model()
        pages: dict[str, dict[str, Any]] = {
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [model]},
            f"/v1/models/{self.server.model_name}": model,
        }
        path = self._path()
        self._close_after_body()
        self._answer(lambda: self._send_json(200, pages[path]), path in pages, path in ROUTES)

    def do_OPTIONS(self) -> None:
        """Answer the question of a browser if a page may send a request: nothing is allowed."""
        self._close_after_body()
        self._answer(self._send_methods, True, False)

    def do_POST(self) -> None:
        """Answer a request to generate."""
        path = self._path()
        self._body_is_unread = True
        self._answer(lambda: self._generate(ROUTES[path]), path in ROUTES, path == "/v1/models")

    def _path(self) -> str:
        return urllib.parse.unquote(self.path.partition("?")[0]).rstrip("/")

    def _close_after_body(self) -> None:
        """End the connection if a request has a body that is not read, but would be as the next."""
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True

    def _answer(self, answer: Callable[[], None], known: bool, other_method: bool) -> None:
        """Answer a request, or send what is wrong with it."""
        try:
            self._check_hosts()
            self._check_key()
            if not known:
                path = self._path()
                if other_method:
                    right = "GET" if self.command == "POST" else "POST"
                    raise RequestError(f"{path}: takes no {self.command}; use {right}", None, 405)
                paths = ", ".join(("/v1/models", *ROUTES))
                raise RequestError(f"{path}: is not served; use one of {paths}", None, 404)
            answer()
        except RequestError as error:
            if self._body_is_unread:
                self.close_connection = True
            self._send_error(error.status, str(error), error.field)
            if self._body_is_unread:
                self._discard()
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except UserError as error:  # out of memory: other requests may need less
            log.warning("%s %s: %s", self.command, self._path(), error)
            self._send_error(503, str(error), None)
        except Exception:
            # One request must not end the server; the log says what happened.
            log.exception("%s %s failed", self.command, self._path())
            self.close_connection = True
            self._send_error(500, "the server failed; its log says why", None)

    def _check_hosts(self) -> None:
        """Raise RequestError for a request that a page of another host may have sent."""
        if self._path() == "/health":  # asked by the probes of a cluster, which give an address
            return
        hosts = self.headers.get_all("Host", [])  # none: not a browser
        names = [host_name(each) for each in hosts]
        for host, name in zip(hosts, names, strict=True):
            if not self.server.has_any_name and not self.server.is_allowed(name):
                raise RequestError(
                    f"Host {host!r}: is no name of this server; use localhost, or "
                    "start the server with --allowed-hosts NAME",
                    None,
                    403,
                )
        for origin in self.headers.get_all("Origin", []):
            name = host_name(origin)
            if name not in names and not self.server.is_allowed(name):
                raise RequestError(
                    f"Origin {origin!r}: pages of other hosts are not answered; start "
                    "the server with --allowed-hosts NAME to allow a host",
                    None,
                    403,
                )

    def _check_key(self) -> None:
        key = self.server.api_key
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        # Takes equally long for all wrong keys. Headers are read as latin-1.
        matches = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
        if key and self._path() != "/health" and not (matches and scheme.lower() == "bearer"):
            raise RequestError("api key: is missing or wrong; send it as a bearer token", None, 401)

    def _check_head(self) -> int:
        """Return the length of the body, if it can be read."""
        if self.headers.get_content_type() != "application/json":
            given = self.headers.get("Content-Type", "")
            raise RequestError(
                f"Content-Type {given!r}: is not supported; send application/json", None, 415
            )
        length = self._body_length()
        if length is None:
            raise RequestError("body: its length is missing; send Content-Length", None, 411)
        if length > self.server.max_body_bytes:
            limit = f"{self.server.max_body_bytes / 2**20:.3g} MiB"
            raise RequestError(f"body: is larger than {limit}; send a shorter one", None, 413)
        return length

    def _read_request(self, route: Route, length: int) -> EncodedRequest:
        """Return the checked request of a body. Nothing else of the body is kept."""
        data = b"".join(self._pieces(length))
        self._body_is_unread = False
        with self.server.parsing:
            return self.server.generator.encode(route.parse(self._parse_body(data)))

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
                f"model {model!r}: is not served; give {self.server.model_name!r}",
                "model",
                404,
            )
        return body

    def _body_length(self) -> int | None:
        """Return the length of the body; None unless it is given once, and alone."""
        lengths = self.headers.get_all("Content-Length", [])
        given = lengths[0] if len(lengths) == 1 and "Transfer-Encoding" not in self.headers else ""
        return int(given) if given.isdecimal() and len(given) < 19 else None

    def _pieces(self, length: int) -> Iterator[bytes]:
        """Yield what the client sends, up to a length."""
        end = time.monotonic() + IDLE_SECONDS
        # `read1` returns what is there: `read` would wait for the whole piece.
        while length and (piece := self.rfile.read1(min(length, 1 << 16))):
            length -= len(piece)
            yield piece
            if time.monotonic() > end:
                raise TimeoutError("the body takes too long")

    def _discard(self) -> None:
        """Read what a refused client still sends: it would lose the answer in a reset."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            for _ in self._pieces(MAX_DISCARDED_BYTES):
                pass

    def _check_client(self, answer_has_begun: bool = False) -> None:
        """Raise ConnectionError if the client has left.

        A client that has left looks like one that has closed its sending side and waits for the
        answer, until something is sent to it: only the one that has left replies with a reset. So
        the answer's first characters are sent early, one at each call.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            readable = selector.select(timeout=0)
        if not readable or self.connection.recv(1, socket.MSG_PEEK):
            return
        early = STATUS_LINE_START[self._num_sent_early :][:1]
        if early and not answer_has_begun:
            self.connection.sendall(early)
            self._num_sent_early += 1
        if self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise ConnectionError("the client has left")

    def flush_headers(self) -> None:
        """Send the head of an answer, without what `_check_client` has sent of it."""
        head, connection = io.BytesIO(), self.wfile
        self.wfile = head
        super().flush_headers()
        self.wfile = connection
        self.wfile.write(head.getvalue()[self._num_sent_early :])
        self._num_sent_early = 0

    def _generate(self, route: Route) -> None:
        length = self._check_head()
        is_large = length > SMALL_BODY_BYTES
        with self.server.large_bodies if is_large else contextlib.nullcontext():
            encoded = self._read_request(route, length)
            common = {
                "id": f"{route.id_prefix}-{uuid.uuid4().hex}",
                "created": int(time.time()),
                "model": self.server.model_name,
            }
            if encoded.request.stream:
                self._stream(route, encoded, {**common, "object": route.chunk_name})
                return
            answer = self.server.generator.answer(encoded, check_client=self._check_client)
        choices = [
            {"index": index, **route.choice(each), "finish_reason": finish_reason(each)}
            for index, each in enumerate(answer.choices)
        ]
        made = {**common, "object": route.object_name, "choices": choices, "usage": usage(answer)}
        self._send_json(200, made)

    def _stream(self, route: Route, encoded: EncodedRequest, common: dict[str, Any]) -> None:
        """Send an answer in pieces, as it is generated."""
        events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        sender: threading.Thread | None = None

        def put(content: dict[str, Any], finish: str | None = None) -> None:
            choice = {"index": 0, **content, "finish_reason": finish}
            events.put(json.dumps({**common, "choices": [choice]}))

        def start() -> None:
            nonlocal sender
            sender = threading.Thread(target=self._send_events, args=(events,), daemon=True)
            sender.start()
            for content in route.first:
                put(content)

        def on_text(text: str) -> None:
            if sender is None:  # not earlier: until the first piece an error has its own status
                start()
            put(route.piece(text))

        def check_client() -> None:
            self._check_client(answer_has_begun=sender is not None)
            if sender is not None and not sender.is_alive():
                raise ConnectionError("the client cannot be sent to")

        try:
            answer = self.server.generator.answer(encoded, on_text, check_client)
            if sender is None:
                start()
            put(route.last, finish_reason(answer.choices[0]))
            if encoded.request.include_usage:
                events.put(json.dumps({**common, "choices": [], "usage": usage(answer)}))
            events.put("[DONE]")
        except Exception as error:
            if sender is None:
                raise
            # The status has been sent: the stream says it, and ends without its last event.
            self.close_connection = True
            if not isinstance(error, ConnectionError):
                log.exception("%s %s failed", self.command, self._path())
            events.put(json.dumps(error_body(500, str(error))))
        events.put(None)
        assert sender is not None
        sender.join()

    def _send_events(self, events: "queue.SimpleQueue[str | None]") -> None:
        """Send events until a None. Ends early if the client does not read."""
        # HTTP/1.0 has no chunks: there the end of the connection is the end of the answer.
        chunked = self.request_version != "HTTP/1.0"
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Cache-Control", "no-cache")
            if chunked:
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.close_connection = True
            self.end_headers()
            while (event := events.get()) is not None:
                data = f"data: {event}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
            if chunked:
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _send_methods(self) -> None:
        self.send_response(204)
        self.send_header("Allow", "GET, POST")
        self.end_headers()

    def _send_json(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _send_error(self, status: int, message: str, field: str | None) -> None:
        try:
            self._send_json(status, error_body(status, message, field))
        except OSError:
            self.close_connection = True


def allowed_name(text: str) -> str:
    """Return the host that a user allows: a name, a URL, or an address without brackets."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text))
    return host_name(text)


def host_name(place: str) -> str:
    """Return the host of a `Host`, an `Origin` or a URL, without its port; empty if it has none."""
    try:
        return urllib.parse.urlsplit(place if "//" in place else f"//{place}").hostname or ""
    except ValueError:
        return ""


def error_body(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """Return an error as the API writes it."""
    if len(message) > MAX_ERROR_LENGTH:  # it quotes the request
        message = message[:MAX_ERROR_LENGTH] + "..."
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


def finish_reason(completion: Completion) -> str:
    """Return why an answer ended, as the API names it."""
    return "stop" if completion.stopped else "length"


def usage(answer: Answer) -> dict[str, int]:
    """Return the number of tokens read and generated."""
    generated = sum(each.num_tokens for each in answer.choices)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": answer.prompt_tokens + generated,
    }
