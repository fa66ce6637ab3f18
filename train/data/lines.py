"""Files of which each line is something, so that a message can say which line is wrong."""

from __future__ import annotations

from train.data.files import TextFile
from train.data.text import open_decompressed, read_text
from train.errors import UserError


def read_lines(file: TextFile, encoding: str = "utf-8") -> list[str]:
    """The lines of a file, without their ends. Line n of the file is element n - 1.

    Raises:
      UserError: The file is unreadable, damaged, otherwise encoded, or has nothing but white space.
    """
    with open_decompressed(file) as stream:
        encoded = read_text(stream, file, allow_zero_bytes="\0".encode(encoding) != b"\0")
    text = _decode_line(encoded, encoding, file).removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")
    # Not str.splitlines: it also cuts at characters that stand within sentences (U+2028).
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if not any(map(str.strip, lines)):
        raise UserError(f"{file.path}: is empty; give a file that has something in it")
    return lines if lines[-1] else lines[:-1]


def line_location(file: TextFile, index: int) -> str:
    """What messages call element ``index`` of the lines of a file."""
    return f"{file.path}:{index + 1}"


def _decode_line(encoded: bytes, encoding: str, file: TextFile) -> str:
    try:
        return encoded.decode(encoding)
    except UnicodeDecodeError as error:
        line = encoded.count(b"\n", 0, error.start)
        raise UserError(
            f"{line_location(file, line)}: not {encoding} at byte {error.start} of the file "
            f"(0x{encoded[error.start]:02x}); convert it (iconv -f latin1 -t utf-8, say), or set "
            "data.encoding where there is one"
        ) from error
