"""Text that goes on from a prompt: a tokenizer before decoding, and one after it.

What a run's model answers to prompts, whatever it has learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from train.data.tokenizer import StreamDecoder
from train.errors import UserError
from train.tasks.base import TextCallback
from transformer.generation.generate import check_prompts, generate
from transformer.generation.sampling import ANCESTRAL_SAMPLING, SamplingConfig
from transformer.models.language_model import LanguageModel

if TYPE_CHECKING:
    from train.data.tokenizer import Tokenizer
    from train.run import Run
if TYPE_CHECKING:
    from train.run import Run


def complete_texts(
    run: Run,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig = ANCESTRAL_SAMPLING,
    seed: int = 0,
    on_text: TextCallback | None = None,
) -> list[str]:
    """What the model writes after each prompt, up to the end of the text or `max_new_tokens`.

    A prompt may be empty. `on_text` is given the text after a single prompt in pieces, as it is
    made; they join to the text returned. Where the model has learned fewer positions than are
    asked for, it goes on from the newer half of them each time they are used up.

    Raises:
      UserError: a prompt has characters that the tokenizer lacks, or fills the model's positions;
        or max_new_tokens is less than 1.
    """
    if on_text is not None and len(prompts) != 1:
        raise ValueError(f"stream: shows one text as it is made; give 1 prompt, not {len(prompts)}")
    tokenizer, model = run.tokenizer, _model(run)
    rows = [np.append(np.int32(tokenizer.eos_token_id), tokenizer.encode(each)) for each in prompts]
    try:
        check_prompts(model, rows, min(max_new_tokens, 1))
    except ValueError as error:
        raise UserError(str(error)) from error
    texts = [_Text(tokenizer, row, on_text) for row in rows]
    for group in _groups(rows, max_new_tokens, model.config.max_length):
        those = [rows[i] for i in group], [texts[i] for i in group]
        _write(run, *those, max_new_tokens, sampling=sampling, seed=seed)
    return [text.finish() for text in texts]


def _model(run: Run) -> LanguageModel:
    assert isinstance(run.model, LanguageModel)  # the only one whose texts go on
    return run.model


class _Text:
    """What is written after a prompt, shown piece by piece."""

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray, show: TextCallback | None):
        self._decoder = StreamDecoder(tokenizer)
        for token in prompt:  # the decoder has to know if a space comes first
            self._decoder.push(token)
        self._decoder.flush()
        self._show = show
        self._pieces: list[str] = []

    def push(self, tokens: list[int]) -> None:
        self._put("".join(map(self._decoder.push, tokens)))

    def finish(self) -> str:
        self._put(self._decoder.flush())
        return "".join(self._pieces)

    def _put(self, piece: str) -> None:
        self._pieces.append(piece)
        if piece and self._show is not None:
            self._show(piece)


def _groups(rows: list[np.ndarray], max_new_tokens: int, limit: int | None) -> list[list[int]]:
    """Prompts to continue at once: all, or those of one length if their positions will run out.

    Where they run out must follow from a prompt alone, as its sample does.
    """
    lengths = [len(row) for row in rows]
    if limit is None or max(lengths, default=0) + max_new_tokens <= limit:
        return [list(range(len(rows)))]
    return [
        [i for i, each in enumerate(lengths) if each == length] for length in sorted(set(lengths))
    ]


def _write(
    run: Run,
    rows: list[np.ndarray],
    texts: list[_Text],
    left: int,
    *,
    sampling: SamplingConfig,
    seed: int,
) -> None:
    """Continues prompts by `remaining` tokens; if positions can run out, all are of one length."""

    def push(new: list[list[int]]) -> None:
        for text, tokens in zip(texts, new, strict=True):
            text.push(tokens)

    model, limit = _model(run), run.model.config.max_length
    while rows and left:
        if limit is not None and len(rows[0]) == limit:
            rows = [row[-(limit // 2) :] for row in rows]
        room = left if limit is None else min(left, limit - max(map(len, rows)))
        made = generate(
            model,
            run.params,
            rows,
            max_new_tokens=room,
            sampling=sampling,
            seed=seed,
            stop_token=run.tokenizer.stop_token_id,
            on_tokens=push,
        )
        left -= room
        going = [i for i, stopped in enumerate(made.stopped) if not stopped]
        rows = [np.append(rows[i], np.array(made.tokens[i], np.int32)) for i in going]
        texts = [texts[i] for i in going]
