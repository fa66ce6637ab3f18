"""Files of data: those that a path names, be it a file, a glob or a folder of splits."""

import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from train.errors import EmptyPathError, UsageError, UserError, as_user_error
from train.files import HTTP_SCHEMES, AnyPath, HttpPath, expand_path

SPLITS = ("train", "validation", "test")

Split = TypeVar("Split")


def split_of(splits: Mapping[str, Split], name: str) -> Split:
    """Return a split of a corpus. Raises UserError if there is none of that name."""
    if name not in splits:
        remedy = "set data.test_path" if name == "test" else "choose one of these"
        raise UserError(f"split {name!r}: the data have only {', '.join(splits)}; {remedy}")
    return splits[name]


KAGGLE_INPUT = pathlib.Path("/kaggle/input")
"""Folder below which Kaggle mounts the data that a notebook adds."""

MAX_NUMBERED_PATHS = 10**6
"""Paths that one path with `{000..063}` may stand for."""

_MAGIC = re.compile(r"[*?[]")
_NUMBERS = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")

_COMPRESSED = r"(\.(gz|zst|bz2|xz))?$"
_TABLE = re.compile(
    r"\.(jsonl?|ndjson|jl|jsonlines|csv|tsv|tab|parquet|pq|arrow)" + _COMPRESSED, re.I
)
_PACKED = re.compile(r"\.(parquet|pq|arrow|gz|zst|bz2|xz)$", re.I)
_TEXT_OF_A_SPLIT = re.compile(r"\.(txt|conllu?)" + _COMPRESSED, re.I)
_ABOUT = re.compile(r"(readme|licen[cs]e|citation|changelog|notice|dataset_infos?|state)\b", re.I)

# The names that the Hugging Face hub gives a split, as a whole word of a part of a path.
_SPLIT_WORD = re.compile(
    r"(?:^|[._ -])(?:(?P<train>train|training)|(?P<validation>validation|valid|val|dev)"
    r"|(?P<test>test|testing|eval|evaluation))(?=[/._ 0-9-])",
    re.I,
)


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


class Notes:
    """What the user should know of how the data were read: one line for each kind of thing."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}

    def add(self, place: object, note: str, count: int = 0) -> None:
        """Note something of a file. Reading the file again changes nothing.

        Args:
          place: The file or setting.
          note: What it is.
          count: Number of rows of it, whose sum over all files follows the note.
        """
        self._counts.setdefault(note, {})[str(place)] = count

    def lines(self) -> tuple[str, ...]:
        """Return one line for each note."""
        lines = []
        for note, counts in self._counts.items():
            more = f" (and {len(counts) - 1:,} more)" if len(counts) > 1 else ""
            total = sum(counts.values())
            lines.append(f"{next(iter(counts))}{more}: {note}{f': {total:,}' if total else ''}")
        return tuple(lines)


def find_files(path: str, setting: str, split: str = "train") -> tuple[TextFile, ...]:
    """Return the files of a split that ``path`` (a file, folder or glob) names, sorted by name.

    Args:
      path: As described in `TextDataConfig`. `{000..063}` stands for each of
        these numbers.
      setting: Name of the setting that it came from, for error messages.
      split: Split to choose from a data folder. A path without splits is one split as a whole.

    Raises:
      UserError: Nothing was found, or the path cannot be listed.
    """
    splits = find_splits(path, setting, Notes())
    return splits.get(split, splits["train"])


def find_splits(path: str, setting: str, notes: Notes) -> Mapping[str, tuple[TextFile, ...]]:
    """Return the files that ``path`` names by split: all as "train", unless it is a data folder.

    Raises:
      UserError: As `find_files` does.
    """
    if not path:
        raise EmptyPathError(
            f"{setting}: is empty; give a file, a folder or a glob (docs/tasks.md has the formats)"
        )
    if _NUMBERS.search(path):
        paths = list(itertools.islice(_numbered_paths(path, setting), MAX_NUMBERED_PATHS + 1))
        if len(paths) > MAX_NUMBERED_PATHS:
            raise UsageError(
                f"{setting} {path[:80]}: stands for more than {MAX_NUMBERED_PATHS:,} paths; give "
                "fewer numbers"
            )
        return {"train": tuple(file for each in paths for file in find_files(each, setting))}
    if path.startswith(HTTP_SCHEMES):
        return {"train": (_http_file(path, setting),)}
    with as_user_error(f"{setting} {path}"):
        for place in _candidate_paths(path):
            if files := sorted(_files_at(place), key=lambda file: file.name):
                if place.is_dir():
                    return _split_folder(f"{setting} {path}", files, notes)
                return {"train": tuple(files)}
    raise _missing(path, setting)


FindFiles = Callable[[str, str, Notes], Mapping[str, Sequence[TextFile]]]
"""Function that finds the files of a path by split, as `find_splits` does."""


class SplitFiles(NamedTuple):
    """Files of one split, and the setting and the path that named them."""

    setting: str
    path: str
    files: Sequence[TextFile]


def find_all_splits(
    path: str,
    validation_path: str,
    test_path: str,
    notes: Notes,
    *,
    section: str = "data",
    find: FindFiles = find_splits,
) -> dict[str, SplitFiles]:
    """Return the files of each split: of its own path, or of the data folder that `path` is."""
    own = find(path, f"{section}.path", notes)
    splits = {"train": SplitFiles(f"{section}.path", path, own["train"])}
    for split, split_path in (("validation", validation_path), ("test", test_path)):
        setting = f"{section}.{split}_path"
        if split_path:
            found = find(split_path, setting, notes)
            splits[split] = SplitFiles(setting, split_path, found.get(split, found["train"]))
        elif split in own:
            splits[split] = SplitFiles(f"{section}.path", f"{path}, {split}", own[split])
    return splits


def is_table(name: str) -> bool:
    """Return True if a file of this name holds rows, and not text as it is."""
    return bool(_TABLE.search(name))


def is_compressed(name: str) -> bool:
    """Return True if the text of a file of this name is longer than its bytes."""
    return bool(_PACKED.search(name))


def _split_folder(
    place: str, files: Sequence[TextFile], notes: Notes
) -> Mapping[str, tuple[TextFile, ...]]:
    """Return the files of a folder by split, if their names say so, as on the Hugging Face hub.

    What describes the data (README.md) is not part of them. A folder of texts or of source code is
    one split, with every file in it.
    """
    described = [file for file in files if not _ABOUT.match(pathlib.PurePath(file.name).name)]
    tables = [file for file in described if is_table(file.name)]
    splits: dict[str, list[TextFile]] = {}
    for file in described:
        # The name of a file before those of its folders: training/validation.jsonl.
        parts = reversed(pathlib.PurePath(file.name).parts)
        word = next(filter(None, (_SPLIT_WORD.search(f"{part}/") for part in parts)), None)
        if word and word.lastgroup and (is_table(file.name) or _TEXT_OF_A_SPLIT.search(file.name)):
            splits.setdefault(word.lastgroup, []).append(file)
    num_in_splits = sum(map(len, splits.values()))
    # A program may have a folder `tests` and a file train.txt: most files must be data.
    if "train" not in splits or 2 * num_in_splits <= len(described):
        if splits and len(tables) == len(described):
            others = " and ".join(sorted(splits))
            notes.add(place, f"has files named {others}, but none named train: all are trained on")
        splits = {"train": tables if len(tables) == len(described) else list(files)}
        num_in_splits = len(splits["train"])
    if num_in_splits == len(files) and len(splits) == 1:
        return {"train": tuple(files)}
    counts = ", ".join(f"{split} {len(splits[split])}" for split in SPLITS if split in splits)
    chosen = {file.name for each in splits.values() for file in each}
    left_out = [file.name for file in files if file.name not in chosen]
    more = f" ({', '.join(left_out[:3])}{', ...' if len(left_out) > 3 else ''} left out)"
    notes.add(place, f"is a data folder with files of {counts}{more if left_out else ''}")
    return {split: tuple(each) for split, each in splits.items()}


def _numbered_paths(path: str, setting: str) -> Iterator[str]:
    """Yield the paths that one with `{000..063}` stands for."""
    if (match := _NUMBERS.search(path)) is None:
        yield path
        return
    first, last = match.groups()
    if int(first) > int(last):
        raise UsageError(f"{setting} {path}: counts from {first} down to {last}; swap them")
    for number in range(int(first), int(last) + 1):
        numbered = f"{path[: match.start()]}{number:0{len(first)}}{path[match.end() :]}"
        yield from _numbered_paths(numbered, setting)


def find_file(path: str, setting: str) -> TextFile:
    """Return the file that ``path`` names, or the file of that name with .gz after it.

    Raises:
      UserError: It does not exist, or it is a folder.
    """
    if not path:
        raise EmptyPathError(f"{setting}: is empty; give the path of a file")
    with as_user_error(f"{setting} {path}"):
        if (file := find_optional_file(path)) is not None:
            return file
    raise _missing(path, setting)


def find_optional_file(path: str) -> TextFile | None:
    """Return what `find_file` does, and None if there is no such file."""
    for place in _candidate_paths(path):
        for name in (place.name, f"{place.name}.gz"):
            file = place.with_name(name)
            if file.exists() and not file.is_dir():
                return TextFile(name, file)
    return None


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
    """Yield the locations to search: the path as it is, then under the folders of data."""
    location = expand_path(path)
    yield location
    if location.is_absolute() or "://" in path:
        return
    if base := os.environ.get("TRANSFORMER_DATA"):
        yield expand_path(base) / location
    # Data sets lie one folder down, or three: /kaggle/input/datasets/OWNER/NAME.
    for depth in range(4):
        for folder in sorted(KAGGLE_INPUT.glob("*/" * depth) if depth else [KAGGLE_INPUT]):
            yield folder / location


def _missing(path: str, setting: str) -> UserError:
    """Return the error of a path that names no file."""
    problem = "does not exist"
    if expand_path(path).exists():
        problem = "holds no files"
    elif not expand_path(path).is_absolute():
        base = os.environ.get("TRANSFORMER_DATA")
        other = f"in {base} ($TRANSFORMER_DATA)" if base else "in $TRANSFORMER_DATA (not set)"
        problem = f"exists neither here nor {other}"
    return UserError(f"{setting} {path}: {problem}; give a file, a folder or a glob")


def _files_at(place: AnyPath) -> Iterator[TextFile]:
    """Yield the files of a folder, the file itself, or the matches of a glob."""
    if place.is_dir():
        for file in _walk(place):
            yield TextFile(file.relative_to(place).as_posix(), file)
    elif place.exists():
        yield TextFile(place.name, place)
    elif _MAGIC.search(str(place)):
        yield from _matches(place)


def _walk(root: AnyPath) -> Iterator[AnyPath]:
    """Yield the files below a folder, without hidden files and folders.

    Each folder is visited once, under its own name if it has one below the root, however many links
    lead to it: one may lead to itself. Links to the folders above the root are not followed.
    """
    above = pathlib.Path(os.path.realpath(root)).parents if isinstance(root, pathlib.Path) else ()
    visited = set(map(str, above))
    folders, links = [root], list[AnyPath]()
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(folder) if isinstance(folder, pathlib.Path) else str(folder)
        if real in visited:
            continue
        visited.add(real)
        for child in sorted(folder.iterdir(), key=str):
            if child.name.startswith("."):  # .git, .DS_Store, ...
                continue
            if not child.is_dir():
                yield child
            elif isinstance(child, pathlib.Path) and child.is_symlink():
                links.append(child)
            else:
                folders.append(child)


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
