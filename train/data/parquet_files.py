"""Texts of Parquet files, read with pyarrow (extra `parquet`), a batch of rows at a time."""

from collections.abc import Iterator
from typing import IO, Any

from train.errors import UserError

BATCH_ROWS = 1024


def import_pyarrow(name: object) -> Any:
    """Return the module pyarrow. Raises UserError, about a file, if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(
            f"{name}: is read with pyarrow, which is not installed; "
            "pip install 'linen-transformer[parquet]'"
        ) from error
    return pyarrow


def iter_parquet_texts(
    stream: IO[bytes], name: object, column: str, setting: str, start: int = 0
) -> Iterator[str]:
    """Yield the texts of a column, from row `start` on. A missing value is an empty text.

    Args:
      stream: Opened file that can seek.
      name: Path of the file, for error messages.
      column: Name of the column of texts.
      setting: Name of the setting of column, for error messages.
      start: Number of rows to skip. Row groups before it are not read.

    Raises:
      UserError: pyarrow is not installed, the file is damaged, or it has no such column of texts.
    """
    pyarrow = import_pyarrow(name)
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(stream)
        columns = file.schema_arrow.names
        if column not in columns:
            raise UserError(
                f"{name}: has no column {column!r} (it has {', '.join(columns)}); set {setting}"
            )
        kind = file.schema_arrow.field(column).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise UserError(
                f"{name}: column {column!r} holds {kind} and no text; set {setting} to another"
            )
        before = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            skipped = min(max(start - before, 0), rows)
            before += rows
            if skipped == rows:
                continue
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[column]):
                texts = batch.column(0).slice(skipped)
                skipped = max(0, skipped - len(batch))
                for text in texts:
                    yield text.as_py() or ""
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{name}: damaged Parquet ({reason}); fetch it again") from error
