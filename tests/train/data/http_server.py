"""A local HTTP server for tests: with or without ranges, with broken connections."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest


class _Handler(http.server.BaseHTTPRequestHandler):
    folder: ClassVar[Path]
    ranges: ClassVar[bool]
    break_after: ClassVar[int]
    """Bytes of a response after which its connection breaks; 0: never."""
    requests: ClassVar[list[tuple[str, str]]]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        asked = self.headers.get("Range", "")
        self.requests.append((self.command, asked))
        file = self.folder / self.path.lstrip("/").partition("?")[0]
        if not file.is_file():
            self.send_error(404)
            return
        content = file.read_bytes()
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.ranges else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if with_body:
            rest = content[start:]
            self.wfile.write(rest[: self.break_after] if self.break_after else rest)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class Server:
    """A running server, its address, and the (method, range) of every request."""

    def __init__(self, folder: Path):
        settings = {"folder": folder, "ranges": True, "break_after": 0, "requests": []}
        self._handler = type("Handler", (_Handler,), settings)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # It asks whether to stop every hundredth of a second, and not every half.
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def requests(self) -> list[tuple[str, str]]:
        actual: list[tuple[str, str]] = self._handler.requests  # type: ignore[attr-defined]
        return actual

    def set(self, **settings: object) -> None:
        for name, value in settings.items():
            setattr(self._handler, name, value)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Serve the files of tmp_path."""
    running = Server(tmp_path)
    yield running
    running.stop()
