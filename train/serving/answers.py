"""Answers to requests: their tokens, and texts up to a stop string."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from train.data.chat_template import ChatTemplate
from train.errors import UserError
from train.run import Run
from train.serving.decoding_thread import DecodingThread, Generation
from train.serving.requests import GenerationRequest, RequestError, as_request_errors
from train.tasks.instruction import render_question
from train.tasks.task import tokenizer_of
from train.tasks.text_completion import (
    Completion,
    GeneratedText,
    StopCompletionError,
    encode_prompt,
    stop_tokens_of,
)
from transformer.generation.generate import check_prompts, seed_words
from transformer.models.language_model import LanguageModel
from transformer.models.model import max_cache_length
from transformer.models.unstacked import unstack_for_decoding

MAX_CHARACTERS_PER_TOKEN = 64
"""Most characters of a prompt for each token that the server reads. A prompt with more is refused
before it is tokenized, which takes time and 100 times its memory."""


class EncodedRequest(NamedTuple):
    """A request and the tokens of its prompts."""

    request: GenerationRequest
    rows: list[np.ndarray]  # each [t]
    max_tokens: int


class Answer(NamedTuple):
    """Answers to a request."""

    choices: list[Completion]
    """`n` for each prompt, in the order of the prompts."""
    prompt_tokens: int


def find_stop(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Return where the first stop string to be complete begins, or None.

    The one with the smallest end is the first to be complete as a text is generated, so that the
    text ends at the same place however many of its characters are seen at a time.
    """
    found = [(place + len(each), place) for each in stops if (place := text.find(each, start)) >= 0]
    return min(found)[1] if found else None


class StopScanner:
    """Pass text on until a stop string appears in it.

    The end of the text that may be the beginning of a stop string is held back.

    Attributes:
      text: The text so far, up to a stop string.
    """

    def __init__(self, stops: Sequence[str], on_text: Callable[[str], None]):
        self._stops, self._on_text = stops, on_text
        self._longest = max(map(len, stops), default=0)
        self._sent = 0
        self.text = ""

    def push(self, piece: str) -> None:
        """Add text. Raise StopCompletionError if that completes a stop string."""
        searched = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        place = find_stop(self.text, self._stops, searched)
        if place is not None:
            self.text = self.text[:place]
            self.flush()
            raise StopCompletionError
        self._send(len(self.text) - self._held())

    def flush(self) -> None:
        """Pass on what was held back: the text has ended."""
        self._send(len(self.text))

    def _held(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0

    def _send(self, end: int) -> None:
        if end > self._sent:
            piece, self._sent = self.text[self._sent : end], end
            self._on_text(piece)


class Generator:
    """Answers requests with a run's model. Requests of several threads share one batch.

    Args:
      run: A run of a language model.
      max_tokens: Most tokens of an answer.
      max_prompt_tokens: Most tokens of a prompt.
      max_batch_size: Most answers that are generated at a time.

    Raises:
      UserError: The run has no language model.
    """

    def __init__(self, run: Run, max_tokens: int, max_prompt_tokens: int, max_batch_size: int = 32):
        if not isinstance(run.model, LanguageModel) or run.tokenizer is None:
            raise UserError(
                f"serve: task {type(run.experiment.task).__name__} has no language model; use "
                "sample, or the run of a language model"
            )
        params = run.params
        if run.model.hardware.platform != "cpu":  # where stacked weights are copied at every token
            params = unstack_for_decoding(params)
        self._positions = max_cache_length(run.model.config)
        if self._positions is not None:  # one is left for an answer
            max_prompt_tokens = min(max_prompt_tokens, self._positions - 1)
        self.max_tokens, self.max_prompt_tokens = max_tokens, max_prompt_tokens
        self._model = run.model
        self._run = dataclasses.replace(run, params=None)  # the decoding thread has them
        self._tokenizer = tokenizer_of(run)
        self._template = ChatTemplate.of_tokenizer(self._tokenizer)
        self.decoding = DecodingThread(run.model, params, max_batch_size, stop_tokens_of(run))

    def encode(self, request: GenerationRequest) -> EncodedRequest:
        """Return the tokens of a request.

        Raises:
          RequestError: A prompt cannot be tokenized or read by the model, or a number of tokens is
            above the server's.
        """
        default = min(request.default_max_tokens or self.max_tokens, self.max_tokens)
        max_tokens = request.max_tokens or default
        if max_tokens > self.max_tokens:
            raise RequestError(
                f"max_tokens {max_tokens}: is more than this server allows; give at most "
                f"{self.max_tokens}",
                "max_tokens",
            )
        if request.messages:
            with as_request_errors("messages"):
                text = render_question(self._template, request.messages, request.variables)
                self._check_length("messages", len(text) // MAX_CHARACTERS_PER_TOKEN)
                # The template has written the special tokens as text.
                rows = [self._tokenizer.encode_with_special_tokens(text)[0]]
            self._check_length("messages", len(rows[0]))
        else:
            rows = list(map(self._encode_prompt, request.prompts))
        with as_request_errors("messages" if request.messages else "prompt"):
            try:
                check_prompts(self._model, rows, max_new_tokens=1)
            except ValueError as error:
                raise UserError(str(error)) from error
        return EncodedRequest(request, rows, max_tokens)

    def _encode_prompt(self, prompt: str | tuple[int, ...]) -> np.ndarray:
        if isinstance(prompt, str):
            self._check_length("prompt", len(prompt) // MAX_CHARACTERS_PER_TOKEN)
            with as_request_errors("prompt"):
                row = encode_prompt(self._run, prompt)
        else:
            row = np.array(prompt, np.int64)
        self._check_length("prompt", len(row))
        return row

    def _check_length(self, field: str, num_tokens: int) -> None:
        if num_tokens > self.max_prompt_tokens:
            raise RequestError(
                f"{field}: is longer than the {self.max_prompt_tokens} tokens that this server "
                "reads; shorten it",
                field,
            )

    def answer(
        self,
        encoded: EncodedRequest,
        on_text: Callable[[str], None] = lambda piece: None,
        check_client: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Return the answers to a request.

        Args:
          encoded: The request and its tokens.
          on_text: Receives the only answer in pieces, as it is generated.
          check_client: Called every now and then. What it raises ends the generation: nobody waits
            for the answer any more.

        Raises:
          RequestError: The server has too many requests.
          UserError: The memory does not suffice.
        """
        request, rows, max_tokens = encoded
        repeated = [row for row in rows for _ in range(request.n)]
        seeds = seed_words(request.seed, repeated)
        generations = [
            Generation(
                prompt=row,
                max_new_tokens=max_tokens
                if self._positions is None
                else min(max_tokens, self._positions - len(row)),
                sampling=request.sampling,
                seed=seed,
                max_tokens=max_tokens,
                in_pieces=request.stream or bool(request.stop),
            )
            for row, seed in zip(repeated, seeds, strict=True)
        ]
        self.decoding.submit(generations)
        try:
            choices = [
                self._read(generation, row, request.stop, on_text, check_client)
                for generation, row in zip(generations, repeated, strict=True)
            ]
        finally:
            for generation in generations:
                generation.cancelled = True  # no effect on one that has ended
        return Answer(choices, sum(map(len, rows)))

    def _read(
        self,
        generation: Generation,
        prompt: np.ndarray,
        stops: Sequence[str],
        on_text: Callable[[str], None],
        check_client: Callable[[], None],
    ) -> Completion:
        """Return the text of an answer, up to a stop string."""
        scanner = StopScanner(stops, on_text)
        text = GeneratedText(self._tokenizer, prompt, scanner.push)
        try:
            for tokens in generation.new_tokens(check_client):
                # One at a time where a string may end the text: those behind it do not count.
                for part in [[token] for token in tokens] if stops else [tokens]:
                    text.push(part)
            text.stopped = generation.stopped
        except StopCompletionError:
            generation.cancelled = True
        completion = text.finish()
        scanner.flush()
        return completion._replace(text=scanner.text)
