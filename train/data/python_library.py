"""A corpus that every Python contains: its help topics and the source of its standard library.

It is real text and real code, and needs no network.
"""

import importlib
import pathlib
import sys
import sysconfig
from collections.abc import Iterator

from train.data.files import TextFile
from train.data.text_files import Document
from train.errors import UserError, as_user_error

LIBRARY_PATH = "python:library"


# Not the library itself: other people's packages, tests, whole applications, tables that a
# program wrote, and the topics, which are read as texts and not as the source that quotes them.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
    | {"encodings", "pydoc_data"}
)


def library_files() -> tuple[TextFile, ...]:
    """Return the source files of the standard library, sorted by name."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = (
        TextFile(file.relative_to(root).as_posix(), file)
        for file in root.rglob("*.py")
        if file.is_file()
    )
    return tuple(sorted(filter(_belongs, files), key=lambda file: file.name))


def _belongs(file: TextFile) -> bool:
    *folders, name = file.name.split("/")
    generated = name.startswith("_sysconfigdata") or any(f.startswith("config-") for f in folders)
    return not generated and not _LEFT_OUT.intersection(folders)


def library_documents(files: tuple[TextFile, ...]) -> Iterator[Document]:
    """Yield the help topics, then the files, except those that are not UTF-8.

    Raises:
      UserError: This Python was installed without them.
    """
    topics = _help_topics()
    if not topics and not files:
        raise UserError(
            f"{LIBRARY_PATH}: {sys.executable} was installed without the source of its library; "
            "give data.path a file or folder of text"
        )
    for name in sorted(topics):
        yield Document(f"topics/{name}", topics[name])
    for file in files:
        with as_user_error(str(file.path)):
            encoded = file.path.read_bytes()
        try:
            yield Document(file.name, encoded.decode())
        except UnicodeDecodeError:
            continue  # a few files keep the encoding of their time


def _help_topics() -> dict[str, str]:
    try:
        return importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return {}
