"""File paths: expansion of `~`, variables, globs and folders, for local and remote paths."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from train.data.http_files import SCHEMES, HttpPath
from train.errors import UsageError, UserError, as_user_error

if TYPE_CHECKING:
    from etils import epath

AnyPath: TypeAlias = "pathlib.Path | epath.Path"


_MAGIC = re.compile(r"[*?[]")
_NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A file to read, and its name relative to the requested path (without the path's location)."""

    name: str
    path: AnyPath

    def fingerprint(self) -> tuple[str, int, int]:
        """Return (path, bytes, modification time), which changes when the text may have changed."""
        with as_user_error(str(self.path)):
            if isinstance(self.path, pathlib.Path):
                local = self.path.stat()
                return str(self.path.absolute()), local.st_size, local.st_mtime_ns
            remote = self.path.stat()
            return str(self.path), remote.length, int(remote.mtime)


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
    from etils import epath

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


def find_files(path: str, setting: str) -> tuple[TextFile, ...]:
    """Return the files that ``path`` (a file, folder or glob) names, sorted by name.

    Args:
      path: As described in `train.data.data_config.TextDataConfig`. `{000..063}` stands for each of
        these numbers.
      setting: Name of the setting that it came from, for error messages.

    Raises:
      UserError: Nothing was found, or the path cannot be listed.
    """
    if not path:
        raise UsageError(f"{setting}: is empty; give a file, a folder, a glob, or python:library")
    if match := _NUMBERS.search(path):
        first, last = match.groups()
        numbers = [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)]
        each = [path[: match.start()] + number + path[match.end() :] for number in numbers]
        if not each:
            raise UsageError(f"{setting} {path}: counts from {first} down to {last}; swap them")
        return tuple(file for one in each for file in find_files(one, setting))
    if path.startswith(SCHEMES):
        return (_http_file(path, setting),)
    with as_user_error(f"{setting} {path}"):
        for place in _candidate_paths(path):
            if files := sorted(_files_at(place), key=lambda file: file.name):
                return tuple(files)
    raise UserError(f"{setting} {path}: {_missing(path)}")


def find_file(path: str, setting: str) -> TextFile:
    """Return the file that ``path`` names, or the file of that name with .gz after it.

    Raises:
      UserError: It does not exist, or it is a folder.
    """
    if not path:
        raise UsageError(f"{setting}: is empty; give the path of a file")
    with as_user_error(f"{setting} {path}"):
        for place in _candidate_paths(path):
            for name in (place.name, f"{place.name}.gz"):
                file = place.with_name(name)
                if file.exists() and not file.is_dir():
                    return TextFile(name, file)
    raise UserError(
        f"{setting} {path}: there is no such file, also not under $TRANSFORMER_DATA "
        f"({os.environ.get('TRANSFORMER_DATA') or 'which is not set'}); give the path of one"
    )


def _http_file(url: str, setting: str) -> TextFile:
    """Return the file of an http:// or https:// address. Nothing is asked of its server."""
    address: Any = HttpPath(url)
    if "*" in url or not address.name:
        raise UsageError(
            f"{setting} {url}: an http server has no list of its files; give the address of one "
            "file, or of several as {000..063}"
        )
    return TextFile(address.name, address)


def _candidate_paths(path: str) -> Iterator[AnyPath]:
    """Yield the locations to search: the path as it is, then under $TRANSFORMER_DATA."""
    location = expand_path(path)
    yield location
    base = os.environ.get("TRANSFORMER_DATA")
    if base and not location.is_absolute() and "://" not in path:
        yield expand_path(base) / location


def _missing(path: str) -> str:
    """Return the problem and the remedy for a path that names no file."""
    location = expand_path(path)
    if location.exists():
        return "holds no files; give a file, or a folder or glob that has some"
    if location.is_absolute():
        return "does not exist; give a file, a folder, a glob, or python:library"
    if base := os.environ.get("TRANSFORMER_DATA"):
        return f"exists neither here nor in {base} ($TRANSFORMER_DATA); give another path"
    return "does not exist; give another path, or set TRANSFORMER_DATA to the folder it is in"


def _files_at(place: AnyPath) -> Iterator[TextFile]:
    """Yield the files of a folder, the file itself, or the matches of a glob."""
    if place.is_dir():
        for file in _walk(place):
            yield TextFile(file.relative_to(place).as_posix(), file)
    elif place.exists():
        yield TextFile(place.name, place)
    elif _MAGIC.search(str(place)):
        yield from _matches(place)


def _walk(folder: AnyPath) -> Iterator[AnyPath]:
    """Yield the files below a folder, without hidden files and folders."""
    for child in folder.iterdir():
        if child.name.startswith("."):  # .git, .DS_Store, ...
            continue
        if child.is_dir():
            yield from _walk(child)
        else:
            yield child


def _matches(pattern: AnyPath) -> Iterator[TextFile]:
    """Yield the files that a glob matches, named from its first part that has a wildcard."""
    # The name must not say where the corpus lies, or another machine would split it differently.
    base = next(folder for folder in pattern.parents if not _MAGIC.search(str(folder)))
    relative = str(pattern.relative_to(base))
    if "**" in relative and not isinstance(base, pathlib.Path):
        raise UserError(f"{pattern}: a remote glob cannot have **; give the folder itself")
    for file in base.glob(relative):
        name = file.relative_to(base)
        if not any(part.startswith(".") for part in name.parts) and not file.is_dir():
            yield TextFile(name.as_posix(), file)
