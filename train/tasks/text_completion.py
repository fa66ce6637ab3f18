"""Text completion: tokenize prompts, generate, and decode the text as it is generated."""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from train.data.chat_template import end_tokens
from train.data.tokenizer import StreamDecoder, Tokenizer
from train.errors import UserError
from train.tasks.task import SampleOptions, TextCallback, TrainedModel, tokenizer_of
from transformer.generation.generate import check_prompts, generate
from transformer.generation.sampling import SamplingConfig
from transformer.models.language_model import LanguageModel
from transformer.models.model import max_cache_length


class StopCompletionError(Exception):
    """Raised by the callback of a streamed text to end the text there."""


class Completion(NamedTuple):
    """Text generated after a prompt."""

    text: str
    num_tokens: int
    """Generated tokens, without one that ended the text."""
    stopped: bool
    """True if the text ended by itself, False if it has as many tokens as were allowed."""


def complete_texts(
    trained: TrainedModel,
    rows: list[np.ndarray],  # each [t] int32
    options: SampleOptions,
) -> list[str]:
    """Return the text that continues each prompt, as `complete_tokens` generates it."""
    completions = complete_tokens(
        trained,
        rows,
        max_new_tokens=options.max_new_tokens,
        sampling=options.sampling,
        seed=options.seed,
        on_text=options.on_text,
    )
    return [each.text for each in completions]


def encode_prompt(trained: TrainedModel, prompt: str) -> np.ndarray:  # [t] int32
    """Return the tokens of a text to continue, after those with which a text begins."""
    tokenizer = tokenizer_of(trained)
    before, _ = tokenizer.text_frame
    return np.append(before, tokenizer.encode(prompt)).astype(np.int32)


def complete_tokens(
    trained: TrainedModel,
    rows: list[np.ndarray],  # each [t] int32
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    seed: int,
    on_text: TextCallback | None,
) -> list[Completion]:
    """Generate a continuation of each prompt, to a token that ends the text or `max_new_tokens`.

    When a text has filled the model's positions, generation continues from the newer half of its
    tokens.

    Args:
      trained: A `LanguageModel` and its tokenizer.
      rows: Tokens of each prompt, at least one.
      max_new_tokens: Maximum number of tokens to generate for each prompt.
      sampling: How tokens are drawn.
      seed: Seed of the draws.
      on_text: Receives the continuation of a single prompt in pieces, as it is generated. They join
        to the returned text. A StopCompletionError that it raises ends the text.

    Raises:
      UserError: A prompt fills the model's positions, or max_new_tokens is less than 1.
    """
    if on_text is not None and len(rows) != 1:
        raise ValueError(
            f"on_text: receives one text as it is generated; give 1 prompt, not {len(rows)}"
        )
    tokenizer, model = tokenizer_of(trained), _language_model(trained)
    try:
        check_prompts(model, rows, min(max_new_tokens, 1))
    except ValueError as error:
        raise UserError(str(error)) from error
    texts = [GeneratedText(tokenizer, row, on_text) for row in rows]
    for group in _group_prompts(rows, max_new_tokens, max_cache_length(model.config)):
        group_rows, group_texts = [rows[i] for i in group], [texts[i] for i in group]
        try:
            _generate_texts(
                trained,
                group_rows,
                group_texts,
                max_new_tokens,
                sampling=sampling,
                seed=seed,
            )
        except StopCompletionError:
            return [group_texts[0].finish()]
    return [text.finish() for text in texts]


def stop_tokens_of(trained: TrainedModel) -> list[int]:
    """Return the tokens that end a text, without those beyond the table of embeddings."""
    vocab_size = trained.model.config.vocab_size
    return [each for each in end_tokens(tokenizer_of(trained)) if each < vocab_size]


def _language_model(trained: TrainedModel) -> LanguageModel:
    assert isinstance(trained.model, LanguageModel)
    return trained.model


class GeneratedText:
    """Text generated after a prompt, decoded and passed on piece by piece.

    Attributes:
      stopped: The text has ended by itself.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray, on_text: TextCallback | None):
        # The prompt decides if a space precedes the first new token.
        self._decoder = StreamDecoder(tokenizer, prompt)
        self._on_text = on_text
        self._pieces: list[str] = []
        self._num_tokens = 0
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> None:
        """Add tokens. A StopCompletionError of `on_text` means that the text ends with them."""
        self._num_tokens += len(tokens)
        self._add(self._decoder.push(tokens))

    def finish(self) -> Completion:
        """Return the whole text."""
        with contextlib.suppress(StopCompletionError):
            self._add(self._decoder.flush())
        return Completion("".join(self._pieces), self._num_tokens, self.stopped)

    def _add(self, piece: str) -> None:
        self._pieces.append(piece)
        if piece and self._on_text is not None:
            try:
                self._on_text(piece)
            except StopCompletionError:
                self.stopped, self._on_text = True, None
                raise


def _group_prompts(
    rows: list[np.ndarray], max_new_tokens: int, max_length: int | None
) -> list[list[int]]:
    """Group prompts to generate together: all, or those of one length if positions run out.

    The context is halved when a group's positions run out. A prompt's sample must not depend on
    the prompts beside it, so prompts of different lengths are then not batched.
    """
    lengths = [len(row) for row in rows]
    if max_length is None or max(lengths, default=0) + max_new_tokens <= max_length:
        return [list(range(len(rows)))]
    return [
        [i for i, each in enumerate(lengths) if each == length] for length in sorted(set(lengths))
    ]


def _generate_texts(
    trained: TrainedModel,
    rows: list[np.ndarray],  # each [t]; all of one length if positions can run out
    texts: list[GeneratedText],
    num_tokens: int,
    *,
    sampling: SamplingConfig,
    seed: int,
) -> None:
    """Generate up to `num_tokens` tokens after each prompt."""

    def push(new: list[list[int]]) -> None:
        for text, tokens in zip(texts, new, strict=True):
            text.push(tokens)

    model = _language_model(trained)
    max_length = max_cache_length(model.config)
    stop_tokens = stop_tokens_of(trained)
    while rows and num_tokens:
        if max_length is not None and len(rows[0]) == max_length:
            rows = [row[-(max_length // 2) :] for row in rows]
        room = num_tokens
        if max_length is not None:
            room = min(num_tokens, max_length - max(map(len, rows)))
        generated = generate(
            model,
            trained.params,
            rows,
            max_new_tokens=room,
            sampling=sampling,
            seed=seed,
            stop_token=stop_tokens,
            on_tokens=push,
        )
        num_tokens -= room
        for text, stopped in zip(texts, generated.stopped, strict=True):
            text.stopped = stopped
        active = [i for i, stopped in enumerate(generated.stopped) if not stopped]
        rows = [np.append(rows[i], np.array(generated.tokens[i], np.int32)) for i in active]
        texts = [texts[i] for i in active]
