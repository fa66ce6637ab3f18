"""HTTP server of an OpenAI-compatible API, by the standard library.

    GET  /health                 200 once the model is loaded
    GET  /v1/models              the model that is served
    POST /v1/completions         continue prompts
    POST /v1/chat/completions    answer a conversation, by the tokenizer's chat template

Each connection has a thread; generation is one request at a time. With `stream` an answer is sent
as server-sent events while it is generated, by a thread of its own: a client that reads slowly
must not keep the others waiting. A generation ends when its client has closed the connection.
"""

import hmac
import http.server
import json
import logging
import queue
import selectors
import socket
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from train.errors import UserError
from train.serving.answers import Answer, Generator
from train.serving.requests import GenerationRequest, RequestError, parse_chat, parse_completion
from train.tasks.text_completion import Completion

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
"""Largest request that is read."""

IDLE_SECONDS = 120.0
"""Seconds after which a connection without a request is closed."""


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

    Raises:
      UserError: The address cannot be used.
    """

    daemon_threads = True  # a client that keeps its connection must not keep the process
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], generator: Generator, model_name: str, api_key: str = ""
    ):
        self.generator, self.model_name, self.api_key = generator, model_name, api_key
        self.created = int(time.time())
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

    def do_GET(self) -> None:
        """Answer for the server's state and its model."""
        model = self.server.model()
        pages: dict[str, dict[str, Any]] = {
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [model]},
            f"/v1/models/{self.server.model_name}": model,
        }
        path = self._path()
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # else a body would be read as the next request
        self._answer(lambda: self._send_json(200, pages[path]), path in pages, path in ROUTES)

    def do_POST(self) -> None:
        """Answer a request to generate."""
        path = self._path()
        self._answer(lambda: self._generate(ROUTES[path]), path in ROUTES, path == "/v1/models")

    def _path(self) -> str:
        return urllib.parse.unquote(self.path.partition("?")[0]).rstrip("/")

    def _answer(self, answer: Callable[[], None], known: bool, other_method: bool) -> None:
        """Answer a request, or send what is wrong with it."""
        body_unread = self.command == "POST"
        try:
            self._check_key()
            if not known:
                path = self._path()
                if other_method:
                    right = "GET" if self.command == "POST" else "POST"
                    raise RequestError(f"{path}: takes no {self.command}; use {right}", None, 405)
                paths = ", ".join(("/v1/models", *ROUTES))
                raise RequestError(f"{path}: is not served; use one of {paths}", None, 404)
            body_unread = False
            answer()
        except RequestError as error:
            # What is left of a body would be read as the next request.
            if body_unread:
                self.close_connection = True
                self._discard()
            self._send_error(error.status, str(error), error.field)
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

    def _check_key(self) -> None:
        key = self.server.api_key
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        # Takes equally long for all wrong keys. Headers are read as latin-1.
        matches = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
        if key and self._path() != "/health" and not (matches and scheme.lower() == "bearer"):
            raise RequestError("api key: is missing or wrong; send it as a bearer token", None, 401)

    def _read_body(self) -> dict[str, Any]:
        length = self._body_length()
        if length is None:
            self.close_connection = True
            raise RequestError("body: its length is missing; send Content-Length", None, 411)
        if length > MAX_BODY_BYTES:
            self.close_connection = True
            self._discard()
            limit = f"{MAX_BODY_BYTES >> 20} MiB"
            raise RequestError(f"body: is larger than {limit}; send a shorter one", None, 413)
        try:
            body = json.loads(self.rfile.read(length))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"body: is not JSON ({error}); send an object") from error
        if not isinstance(body, dict):
            raise RequestError("body: is no JSON object; send one")
        return body

    def _body_length(self) -> int | None:
        """Return the length of the body; None unless it is given once, and alone."""
        lengths = self.headers.get_all("Content-Length", [])
        given = lengths[0] if len(lengths) == 1 and "Transfer-Encoding" not in self.headers else ""
        return int(given) if given.isdecimal() and len(given) < 19 else None

    def _discard(self) -> None:
        """Read some of the body: a client that is still sending would not see the answer."""
        left = min(self._body_length() or 0, 4 * MAX_BODY_BYTES)
        while left and (data := self.rfile.read(min(left, 1 << 16))):
            left -= len(data)

    def _check_client(self) -> None:
        """Raise ConnectionError if the client has closed the connection."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            readable = selector.select(timeout=0)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionError("the client has left")

    def _generate(self, route: Route) -> None:
        body = self._read_body()
        model = body.get("model") or self.server.model_name
        if model != self.server.model_name:
            raise RequestError(
                f"model {model!r}: is not served; give {self.server.model_name!r}", "model", 404
            )
        request = route.parse(body)
        answer_id = f"{route.id_prefix}-{uuid.uuid4().hex}"
        common = {"id": answer_id, "created": int(time.time()), "model": self.server.model_name}
        if request.stream:
            self._stream(route, request, {**common, "object": route.chunk_name})
            return
        answer = self.server.generator.answer(request, check_client=self._check_client)
        choices = [
            {"index": index, **route.choice(each), "finish_reason": finish_reason(each)}
            for index, each in enumerate(answer.choices)
        ]
        made = {**common, "object": route.object_name, "choices": choices, "usage": usage(answer)}
        self._send_json(200, made)

    def _stream(self, route: Route, request: GenerationRequest, common: dict[str, Any]) -> None:
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
            self._check_client()
            if sender is not None and not sender.is_alive():
                raise ConnectionError("the client cannot be sent to")

        try:
            answer = self.server.generator.answer(request, on_text, check_client)
            if sender is None:
                start()
            put(route.last, finish_reason(answer.choices[0]))
            if request.include_usage:
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


def error_body(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """Return an error as the API writes it."""
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
