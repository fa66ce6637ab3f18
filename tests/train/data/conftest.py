"""Shared fixtures of the data tests: token streams made by hand."""

from collections.abc import Callable

import numpy as np
import pytest

from train.data.token_file import TokenStream

MakeStream = Callable[..., TokenStream]


@pytest.fixture
def make_stream() -> MakeStream:
    """Return a function that makes a stream of documents (lists of tokens), separated by 0."""

    def make(*documents: list[int], name: str = "train") -> TokenStream:
        tokens: list[int] = []
        starts = []
        for document in documents:
            starts.append(len(tokens))
            tokens += [0, *document]
        return TokenStream(
            name=name,
            tokens=np.array([*tokens, 0], np.uint16),
            document_starts=np.array(starts, np.int64),
            num_bytes=len(tokens),
        )

    return make
