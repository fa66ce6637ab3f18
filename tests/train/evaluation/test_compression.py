import gzip
import lzma

import pytest

from train.evaluation.compression import compressed_bits_per_byte


def test_bits_are_those_of_the_files_that_the_tools_write() -> None:
    texts = [f"{n} é {n * n}\n" for n in range(997)]
    whole = "".join(texts).encode()
    assert compressed_bits_per_byte(texts) == pytest.approx(
        {
            "gzip -9": 8 * len(gzip.compress(whole, 9)) / len(whole),
            "xz -9": 8 * len(lzma.compress(whole, preset=9)) / len(whole),
        },
        abs=0,
    )
