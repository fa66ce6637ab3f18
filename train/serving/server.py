"""HTTP server of an OpenAI-compatible API, by the standard library.

    GET  /health                 200 once the model is loaded
    GET  /v1/models              the model that is served
    POST /v1/completions         continue prompts
    POST /v1/chat/completions    answer a conversation, by the tokenizer's chat template

Each connection has a thread; generation is one request at a time. With `stream` an answer is sent
as server-sent events while it is generated, and ends if the client closes the connection.
"""

import hmac
import http.server
import json
import logging
import time
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
    """What tells completions and chat completions apart."""

    parse: Callable[[dict[str, Any]], GenerationRequest]
    object_name: str
    chunk_name: str
    id_prefix: str
    choice: Callable[[Completion], dict[str, Any]]
    """Return the content of a whole answer."""
    piece: Callable[[str], dict[str, Any]]
    """Return the content of a part of an answer."""


ROUTES = {
    "/v1/completions": Route(
        parse_completion,
        "text_completion",
        "text_completion",
        "cmpl",
        lambda each: {"text": each.text, "logprobs": None},
        lambda text: {"text": text, "logprobs": None},
    ),
    "/v1/chat/completions": Route(
        parse_chat,
        "chat.completion",
        "chat.completion.chunk",
        "chatcmpl",
        lambda each: {"message": {"role": "assistant", "content": each.text}},
        lambda text: {"delta": {"content": text}},
    ),
}
"""Paths that generate."""


class Server(http.server.ThreadingHTTPServer):
    """Server of one model. `serve_forever` answers requests until `shutdown`.

    Args:
      address: Host and port; port 0 takes a free one, which `server_port` has then.
      generator: Answers the requests.
      model_name: Name of the model in requests and answers.
      api_key: If not empty, requests need `Authorization: Bearer <api_key>`.

    Raises:
      UserError: The address cannot be used.
    """

    daemon_threads = True  # a client that keeps its connection must not keep the process

    def __init__(
        self, address: tuple[str, int], generator: Generator, model_name: str, api_key: str = ""
    ):
        self.generator, self.model_name, self.api_key = generator, model_name, api_key
        self.created = int(time.time())
        try:
            super().__init__(address, Handler)
        except (OSError, OverflowError) as error:
            host, port = address
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(f"serve {host}:{port}: {reason}; give another --host or --port") from (
                error
            )

    def model(self) -> dict[str, Any]:
        """Return the description of the model in the API."""
        owner = "linen-transformer"
        fields = {"object": "model", "created": self.created, "owned_by": owner}
        return {"id": self.model_name, **fields}


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
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
        self._answer(lambda: self._send_json(200, pages[path]), path in pages, path in ROUTES)

    def do_POST(self) -> None:
        """Answer a request to generate."""
        path = self._path()
        self._answer(lambda: self._generate(ROUTES[path]), path in ROUTES, path == "/v1/models")

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Log a line for each request."""
        log.info("%s %s", self.address_string(), format % arguments)

    def _path(self) -> str:
        return self.path.partition("?")[0].rstrip("/")

    def _answer(self, answer: Callable[[], None], known: bool, other_method: bool) -> None:
        """Answer a request, or send what is wrong with it."""
        body_unread = self.command == "POST"
        try:
            self._check_key()
            if not known:
                problem = "takes the other method" if other_method else "is not served"
                paths = ", ".join(("/v1/models", *ROUTES))
                status = 405 if other_method else 404
                raise RequestError(f"{self._path()}: {problem}; use one of {paths}", None, status)
            body_unread = False
            answer()
        except RequestError as error:
            # What is left of a body would be read as the next request.
            self.close_connection = self.close_connection or body_unread
            self._send_error(error.status, str(error), error.field)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception:
            # One request must not end the server; the log says what happened.
            log.exception("%s %s failed", self.command, self._path())
            self.close_connection = True
            self._send_error(500, "the server failed; its log says why", None)

    def _check_key(self) -> None:
        key = self.server.api_key
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if (
            key
            and self._path() != "/health"
            and not hmac.compare_digest(given.encode(), key.encode())
        ):
            raise RequestError("api key: is missing or wrong; send it as a bearer token", None, 401)

    def _read_body(self) -> dict[str, Any]:
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            self.close_connection = True
            raise RequestError("body: its length is missing; send Content-Length", None, 411) from (
                None
            )
        if not 0 <= length <= MAX_BODY_BYTES:
            self.close_connection = True
            limit = f"{MAX_BODY_BYTES >> 20} MiB"
            raise RequestError(f"body: is larger than {limit}; send a shorter one", None, 413)
        try:
            body = json.loads(self.rfile.read(length))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"body: is not JSON ({error}); send an object") from error
        if not isinstance(body, dict):
            raise RequestError("body: is no JSON object; send one")
        return body

    def _generate(self, route: Route) -> None:
        body = self._read_body()
        model = body.get("model", self.server.model_name)
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
        answer = self.server.generator.answer(request)
        choices = [
            {"index": index, **route.choice(each), "finish_reason": finish_reason(each)}
            for index, each in enumerate(answer.choices)
        ]
        made = {**common, "object": route.object_name, "choices": choices, "usage": usage(answer)}
        self._send_json(200, made)

    def _stream(self, route: Route, request: GenerationRequest, common: dict[str, Any]) -> None:
        """Send an answer in pieces, as it is generated."""
        started = False

        def send(content: dict[str, Any], finish: str | None = None) -> None:
            nonlocal started
            if not started:  # not earlier: until the first piece an error has its own status
                self._start_events()
                started = True
                if request.messages:
                    send({"delta": {"role": "assistant", "content": ""}})
            choice = {"index": 0, **content, "finish_reason": finish}
            self._send_event(json.dumps({**common, "choices": [choice]}))

        try:
            answer = self.server.generator.answer(request, lambda text: send(route.piece(text)))
            last = {"delta": {}} if request.messages else route.piece("")
            send(last, finish_reason(answer.choices[0]))
        except (ConnectionError, TimeoutError, RequestError):
            raise
        except Exception as error:
            if not started:
                raise
            # The status has been sent: the stream has to say it, and ends without its last event.
            log.exception("%s %s failed", self.command, self._path())
            self.close_connection = True
            message = {"message": str(error), "type": "server_error", "param": None, "code": None}
            self._send_event(json.dumps({"error": message}))
            self._send_chunk(b"")
            return
        if request.include_usage:
            self._send_event(json.dumps({**common, "choices": [], "usage": usage(answer)}))
        self._send_event("[DONE]")
        self._send_chunk(b"")

    def _start_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _send_event(self, data: str) -> None:
        self._send_chunk(f"data: {data}\n\n".encode())

    def _send_chunk(self, data: bytes) -> None:
        """Send a chunk of a body of unknown length; an empty one ends it."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

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
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": message, "type": kind, "param": field, "code": None}
        try:
            self._send_json(status, {"error": error})
        except OSError:
            self.close_connection = True


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
