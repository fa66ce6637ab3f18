"""Files behind http:// and https:// addresses, read in ranges of bytes."""

from __future__ import annotations

import dataclasses
import email.utils
import http.client
import io
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import IO, Any, NamedTuple

from train.errors import UserError

SCHEMES = ("http://", "https://")

ATTEMPTS = 5
"""Tries of a request before its error is raised. The wait doubles from `RETRY_SECONDS`."""

RETRY_SECONDS = 1.0
TIMEOUT_SECONDS = 60.0
BUFFER_BYTES = 2**20
_PASSING_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))


class HttpStat(NamedTuple):
    """Size in bytes and time of change, in seconds since the epoch; 0 where they are not told."""

    length: int
    mtime: float


@dataclasses.dataclass(frozen=True)
class HttpPath:
    """Address of one file. It has the methods of a path that reading files needs."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Last part of the address, without its query."""
        path = urllib.parse.urlsplit(self.url).path
        return urllib.parse.unquote(path).rstrip("/").rpartition("/")[2]

    def stat(self) -> HttpStat:
        """Return the size and the time of change. Raises UserError if there is no such file."""
        with _open(urllib.request.Request(self.url, method="HEAD")) as response:
            length = int(response.headers.get("Content-Length") or 0)
            changed = email.utils.parsedate_to_datetime(
                response.headers.get("Last-Modified") or "Thu, 01 Jan 1970 00:00:00 GMT"
            )
        return HttpStat(length, changed.timestamp())

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Return the bytes as a file that can seek."""
        assert mode == "rb"
        return io.BufferedReader(_HttpFile(self.url), BUFFER_BYTES)


class _HttpFile(io.RawIOBase):
    """Bytes of an address. Reading on continues one response; seeking asks for another range.

    A connection that breaks is opened again where it broke.
    """

    def __init__(self, url: str):
        self._url, self._position = url, 0
        self._response: Any = None
        self._size: int | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position}.get(whence)
        if base is None:
            base = self._length()
        # Readers often seek to where they are: that must not cost a request.
        if base + offset != self._position:
            self._disconnect()
            self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        for attempt in range(ATTEMPTS):
            try:
                if self._response is None:
                    self._connect()
                count: int = self._response.readinto(buffer) if self._response else 0
                # `readinto` of http.client returns 0 at the end and also where a connection broke:
                # only the announced size tells them apart.
                if count == 0 and self._size is not None and self._position < self._size:
                    raise http.client.IncompleteRead(b"")
            except (OSError, http.client.HTTPException) as error:
                self._disconnect()
                if attempt == ATTEMPTS - 1:
                    raise UserError(
                        f"{self._url}: the connection broke at byte {self._position} ({error}); "
                        "run the same command again to resume"
                    ) from error
                time.sleep(RETRY_SECONDS * 2**attempt)
            else:
                self._position += count
                return count
        raise AssertionError("unreachable")

    def close(self) -> None:
        self._disconnect()
        super().close()

    def _length(self) -> int:
        if self._size is None:
            self._size = HttpPath(self._url).stat().length
        return self._size

    def _connect(self) -> None:
        """Ask for the bytes from the position on."""
        if self._size is not None and self._position >= self._size:
            return  # a range that begins at the end is an error to many servers
        headers = {"Range": f"bytes={self._position}-"} if self._position else {}
        response = _open(urllib.request.Request(self._url, headers=headers))
        skipped = 0
        if self._position and response.status != 206:  # the server has no ranges
            skipped = self._position
        self._response = response
        length = response.headers.get("Content-Length")
        # A compressed response announces the bytes that are sent, not those that are read.
        if length is not None and not response.headers.get("Content-Encoding"):
            self._size = int(length) + self._position - skipped
        while skipped and (passed := response.read(min(skipped, BUFFER_BYTES))):
            skipped -= len(passed)

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None


def _open(request: urllib.request.Request) -> Any:
    """Send a request, again while the server is busy. Raises UserError with the server's answer."""
    for attempt in range(ATTEMPTS):
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            if error.code not in _PASSING_STATUS or attempt == ATTEMPTS - 1:
                raise UserError(
                    f"{request.full_url}: the server answers {error.code} ({error.reason}); "
                    "check the address, and whether it asks for a login"
                ) from error
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            if attempt == ATTEMPTS - 1:
                reason = getattr(error, "reason", error)
                raise UserError(
                    f"{request.full_url}: cannot be reached ({reason}); check the address and "
                    "the network"
                ) from error
        time.sleep(RETRY_SECONDS * 2**attempt)
    raise AssertionError("unreachable")
