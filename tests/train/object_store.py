"""An in-memory object store behind ``s3://`` paths during a test."""

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem


class _Bucket(MemoryFileSystem):
    protocol = ("s3",)
    store: dict[str, Any] = {}  # noqa: RUF012, its base has it as a class attribute too
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(str(path).removeprefix("s3://"))


@pytest.fixture
def bucket() -> Iterator[str]:
    """Return the address of an empty bucket."""
    fsspec.register_implementation("s3", _Bucket, clobber=True)
    yield "s3://bucket"
    _Bucket.store.clear()
