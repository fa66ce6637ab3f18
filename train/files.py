"""Files, local and remote: paths, limits of what is read, http addresses, folders of a cache."""

import dataclasses
import email.utils
import hashlib
import http.client
import io
import json
import os
import pathlib
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, TypeAlias

from etils import epath
from filelock import FileLock

from train.errors import UsageError, UserError

AnyPath: TypeAlias = pathlib.Path | epath.Path


def expand_path(path: str) -> AnyPath:
    """Return a local or remote path, with ``~`` and ``$NAME`` expanded.

    Raises:
      UsageError: It names an unknown user or file system, or contains a NUL.
    """
    expanded = os.path.expandvars(path)
    if "\0" in expanded:
        raise UsageError(f"{path!r}: contains a NUL character, which no path can; leave it out")
    if "://" not in expanded:
        return expand_user(pathlib.Path(expanded))
    try:
        return epath.Path(expanded)
    except KeyError as error:
        raise UsageError(
            f"{path}: no file system is known by this scheme; use gs://, s3:// or a local path"
        ) from error


def expand_user(path: pathlib.Path) -> pathlib.Path:
    """Return a path with the home folder in place of a leading ``~`` or ``~NAME``.

    Raises UsageError if there is no such user, or the home folder is not known.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"{path}: the home folder of {path.parts[0]} is not known; write the path out"
        ) from error


# ---- Limits: what is downloaded or decompressed cannot fill the memory ----

MAX_SETTINGS_BYTES = 2**24
"""Limit of a file of settings of a downloaded model: 16 MiB."""

MAX_VOCABULARY_BYTES = 2**28
"""Limit of a tokenizer file: 256 MiB."""

_CHUNK_BYTES = 2**22


def read_bytes(path: AnyPath, max_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
      UserError: It has more than `max_bytes` bytes.
      OSError: It cannot be read.
    """
    with path.open("rb") as stream:
        return read_all(stream, path, max_bytes)


def read_all(stream: IO[bytes], path: AnyPath, max_bytes: int) -> bytes:
    """Return the rest of a stream (UserError: it has more than `max_bytes` bytes).

    The stream is read in chunks: the length of what is decompressed is not known before.
    """
    chunks, size = [], 0
    while chunk := stream.read(_CHUNK_BYTES):
        size += len(chunk)
        if size > max_bytes:
            raise too_large_error(path, size, max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def iter_lines(stream: IO[bytes], path: AnyPath, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a stream with their ends (UserError: one has more than `max_bytes`)."""
    number = 0
    # With a limit, `readline` never reads a whole file without line ends into memory.
    while line := stream.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            raise UserError(
                f"{path}:{number}: is a line of more than {_format_limit(max_bytes)}; "
                "split it, or restore the original file"
            )
        yield line


def too_large_error(path: AnyPath, size: int, max_bytes: int) -> UserError:
    """Return the error for a file above its limit."""
    return UserError(
        f"{path}: has {_format_limit(size)} or more, and at most {_format_limit(max_bytes)} are "
        "read of such a file; give the right file, or a smaller one"
    )


def _format_limit(size: int) -> str:
    """Return a limit, exact below a MiB: `12 bytes`, `16 MiB`, `1.5 GiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"


# ---- http:// and https:// ----
#
# fsspec's file system for http was tried: a file of a server without ranges cannot be read beyond
# its first block, every refusal becomes FileNotFoundError, nothing is sent again when a connection
# breaks or a server is busy, and it needs aiohttp with its seven packages.

HTTP_SCHEMES = ("http://", "https://")

ATTEMPTS = 5
"""Tries of a request before its error is raised. The wait doubles from `RETRY_SECONDS`."""

RETRY_SECONDS = 1.0
TIMEOUT_SECONDS = 60.0
BUFFER_BYTES = 2**20
_BUSY_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))


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
        with _request(self.url, method="HEAD") as response:
            length = int(response.headers.get("Content-Length") or 0)
            changed = response.headers.get("Last-Modified")
        return HttpStat(
            length, email.utils.parsedate_to_datetime(changed).timestamp() if changed else 0.0
        )

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
        if whence == io.SEEK_END and self._size is None:
            self._size = HttpPath(self._url).stat().length
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position}.get(whence, self._size or 0)
        # Readers often seek to where they are: that must not cost a request.
        if base + offset != self._position:
            self._disconnect()
            self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        for attempt in range(ATTEMPTS):
            try:
                if self._size is not None and self._position >= self._size:
                    return 0  # a range that begins at the end is an error to many servers
                if self._response is None:
                    self._connect()
                count: int = self._response.readinto(buffer)
                # `readinto` of http.client returns 0 at the end and also where a connection broke:
                # only the announced size tells them apart.
                if count == 0 and self._size is not None:
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

    def _connect(self) -> None:
        """Ask for the bytes from the position on."""
        headers = {"Range": f"bytes={self._position}-"} if self._position else {}
        self._response = response = _request(self._url, headers=headers)
        skipped = self._position if response.status != 206 else 0  # the server has no ranges
        # A compressed response announces the bytes that are sent, not those that are read.
        length = response.headers.get("Content-Length")
        if length is not None and not response.headers.get("Content-Encoding"):
            self._size = int(length) + self._position - skipped
        while skipped and (passed := response.read(min(skipped, BUFFER_BYTES))):
            skipped -= len(passed)

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None


def _request(url: str, **options: Any) -> Any:
    """Send a request, again while the server is busy. Raises UserError with the server's answer."""
    for attempt in range(ATTEMPTS):
        try:
            request = urllib.request.Request(url, **options)
            return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        except (http.client.HTTPException, OSError) as error:
            status = error.code if isinstance(error, urllib.error.HTTPError) else None
            if attempt < ATTEMPTS - 1 and (status is None or status in _BUSY_STATUS):
                time.sleep(RETRY_SECONDS * 2**attempt)
                continue
            reason = getattr(error, "reason", error)
            answer = f"the server answers {status}" if status else "cannot be reached"
            raise UserError(
                f"{url}: {answer} ({reason}); check the address, the network, and whether the "
                "server asks for a login"
            ) from error
    raise AssertionError("unreachable")


# ---- Cache: folders that are computed once, by one process, and never seen incomplete ----


def cache_folder(setting: str) -> pathlib.Path:
    """Return the folder of ``data.cache_dir``, or the user's own if it is empty.

    Raises UserError if it is remote, or the home folder is not known.
    """
    if not (folder := setting or os.environ.get("TRANSFORMER_CACHE", "")):
        return user_cache_folder()
    path = expand_path(folder)
    if not isinstance(path, pathlib.Path):
        raise UsageError(f"data.cache_dir {folder}: is remote; give a folder of this machine")
    return path


def user_cache_folder() -> pathlib.Path:
    """Return the user's cache folder of this project, usually below ~/.cache.

    Raises UsageError if the home folder is not known.
    """
    base = os.environ.get("XDG_CACHE_HOME", "") or expand_user(pathlib.Path("~/.cache"))
    return pathlib.Path(base) / "linen-transformer"


def cache_key(*parts: object) -> str:
    """Return a name derived from JSON values: equal for equal values."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def get_or_create(
    folder: pathlib.Path,
    write: Callable[[pathlib.Path], None],
    is_complete: Callable[[pathlib.Path], bool] = pathlib.Path.is_dir,
) -> pathlib.Path:
    """Return ``folder``, after `write` has filled it unless it exists and is complete.

    If several processes ask for it, one writes and the others wait. The folder is written under
    another name and renamed, so that a kill or a full disk leaves no incomplete folder.

    Raises:
      UserError: The cache cannot be written (a full disk, no permission).
    """
    try:
        if is_complete(folder):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not is_complete(folder):
                _replace(folder, write)
    except OSError as error:
        raise UserError(
            f"the data cache {folder.parent}: {error.strerror or error}; make room there, or set "
            "data.cache_dir or TRANSFORMER_CACHE to another folder"
        ) from error
    return folder


def _replace(folder: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Write the folder under a temporary name, then rename it."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        write(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
