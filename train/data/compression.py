"""Bits per byte of general-purpose compressors: what a language model is compared with."""

import lzma
import zlib
from collections.abc import Iterable
from typing import Protocol


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


_GZIP_CONTAINER = 16 + zlib.MAX_WBITS  # zlib's code for a gzip header and trailer


def compressed_bits_per_byte(texts: Iterable[str]) -> dict[str, float]:
    """Return the bits per byte that `gzip -9` and `xz -9` need for the texts as one file."""
    compressors: dict[str, _Compressor] = {
        "gzip -9": zlib.compressobj(9, zlib.DEFLATED, _GZIP_CONTAINER),
        "xz -9": lzma.LZMACompressor(preset=9),
    }
    sizes = dict.fromkeys(compressors, 0)
    total = 0
    for text in texts:
        encoded = text.encode()
        total += len(encoded)
        for name, compressor in compressors.items():
            sizes[name] += len(compressor.compress(encoded))
    for name, compressor in compressors.items():
        sizes[name] += len(compressor.flush())
    return {name: 8 * size / total for name, size in sizes.items()}
