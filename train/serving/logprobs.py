"""Log-probabilities of tokens, as the API for completions writes them (`logprobs`)."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from train.data.tokenizer import StreamDecoder, Tokenizer
from train.data.tokenizer_training import byte_symbols
from transformer.generation.log_likelihood import TokenLogLikelihoods

LOWEST = -9999.0
"""Stands for a lower number, such as minus infinity, which JSON does not have."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_BYTES = {symbol: byte for byte, symbol in enumerate(byte_symbols())}


class TokenNames:
    r"""Texts of single tokens, each under one name wherever it stands.

    A special token has its own name, and a token that is a part of a character its bytes
    (`bytes:\xe2\x82`), as in OpenAI's API.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._symbols = {token: symbol for symbol, token in tokenizer.vocabulary.items()}
        self._names: dict[int, str] = {}
        # After another token, a text keeps the space that many decoders drop at the beginning.
        words = (token for token in sorted(self._symbols) if tokenizer.decode([token]).isalnum())
        self._before = list(itertools.islice(words, 1))

    def __getitem__(self, token: int) -> str:
        if token not in self._names:
            self._names[token] = self._name(token)
        return self._names[token]

    def _name(self, token: int) -> str:
        symbol = self._symbols.get(token, f"<{token}>")  # the table may have more rows
        if token in self._tokenizer.special_token_ids or token not in self._symbols:
            return symbol
        decode = self._tokenizer.decode
        text = decode([*self._before, token])[len(decode(self._before)) :]
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text
        if match := _BYTE_TOKEN.fullmatch(symbol):
            parts = [int(match[1], 16)]
        elif all(each in _BYTES for each in symbol):
            parts = [_BYTES[each] for each in symbol]
        else:
            return symbol
        return "bytes:" + "".join(f"\\x{part:02x}" for part in parts)


def completion_logprobs(
    names: TokenNames,
    tokenizer: Tokenizer,
    row: Sequence[int] | np.ndarray,  # the prompt and the answer, with the token that ended it
    scores: TokenLogLikelihoods,  # of the row
    num_top: int,
    start: int,  # first token that is shown
) -> dict[str, Any]:
    """Return the log-probabilities of a choice.

    `text_offset` counts characters from the beginning of the prompt. Nothing precedes the first
    token, which has null.
    """
    decoder, offset = StreamDecoder(tokenizer), 0
    offsets: list[int] = []
    for token in row:
        offsets.append(offset)
        offset += len(decoder.push([int(token)]))
    values: list[float | None] = [None]
    tops: list[dict[str, float] | None] = [None]
    for token, value, top, top_tokens in zip(
        row[1:], scores.values, scores.top_values, scores.top_tokens, strict=True
    ):
        own = max(float(value), LOWEST)
        values.append(own)
        likeliest = {names[int(token)]: own}
        for other, other_value in zip(top_tokens[:num_top], top[:num_top], strict=True):
            likeliest.setdefault(names[int(other)], max(float(other_value), LOWEST))
        tops.append(dict(sorted(likeliest.items(), key=lambda item: -item[1])))
    return {
        "tokens": [names[int(token)] for token in row[start:]],
        "token_logprobs": values[start:],
        "top_logprobs": tops[start:] if num_top else None,
        "text_offset": offsets[start:],
    }
