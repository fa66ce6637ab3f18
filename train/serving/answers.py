"""Answers to requests: generation with stop strings, one request at a time."""

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from train.data.chat_template import ChatTemplate, stop_token
from train.errors import UserError
from train.run import Run
from train.serving.requests import GenerationRequest, RequestError
from train.tasks.instruction import encode_conversation
from train.tasks.text_completion import (
    Completion,
    StopCompletionError,
    complete_tokens,
    encode_prompt,
)
from train.tasks.vocabulary import tokenizer_of
from transformer.models.language_model import LanguageModel


class Answer(NamedTuple):
    """Answers to a request."""

    choices: list[Completion]
    """`n` for each prompt, in the order of the prompts."""
    prompt_tokens: int


class StopScanner:
    """Pass text on until a stop string appears in it.

    The end of the text that may be the beginning of a stop string is held back.

    Attributes:
      text: The text so far, up to a stop string.
      found: True once a stop string has appeared.
    """

    def __init__(self, stops: tuple[str, ...], on_text: Callable[[str], None]):
        self._stops, self._on_text = stops, on_text
        self.text, self.found = "", False
        self._sent = 0

    def push(self, piece: str) -> None:
        """Add text. Raise StopCompletionError if that completes a stop string."""
        searched = max(0, len(self.text) - max(map(len, self._stops), default=1) + 1)
        self.text += piece
        places = [place for each in self._stops if (place := self.text.find(each, searched)) >= 0]
        if places:
            self.text, self.found = self.text[: min(places)], True
            self.flush()
            raise StopCompletionError
        self._send(len(self.text) - self._held())

    def flush(self) -> None:
        """Pass on what was held back: the text has ended."""
        self._send(len(self.text))

    def _held(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _send(self, end: int) -> None:
        if end > self._sent:
            piece, self._sent = self.text[self._sent : end], end
            self._on_text(piece)


class Generator:
    """Answers requests with a run's model. Requests of several threads wait for each other.

    Args:
      run: A run of a language model.
      max_tokens: Most tokens of an answer.

    Raises:
      UserError: The run has no language model.
    """

    def __init__(self, run: Run, max_tokens: int):
        if not isinstance(run.model, LanguageModel) or run.tokenizer is None:
            raise UserError(
                f"serve: task {type(run.experiment.task).__name__} has no language model; use "
                "sample, or the run of a language model"
            )
        self._run, self.max_tokens = run, max_tokens
        self._tokenizer = tokenizer_of(run)
        self._template = ChatTemplate.of_tokenizer(self._tokenizer)
        # One program at a time: two would share the device's memory, and neither would be faster.
        self._lock = threading.Lock()

    def answer(
        self, request: GenerationRequest, on_text: Callable[[str], None] | None = None
    ) -> Answer:
        """Return the answers to a request.

        Args:
          request: The request.
          on_text: Receives the only answer in pieces, as it is generated. What it raises ends the
            generation.

        Raises:
          RequestError: The model cannot read a prompt, or `max_tokens` is above the server's.
        """
        max_tokens = self.max_tokens if request.max_tokens is None else request.max_tokens
        if max_tokens > self.max_tokens:
            raise RequestError(
                f"max_tokens {max_tokens}: is more than this server allows; give at most "
                f"{self.max_tokens}",
                "max_tokens",
            )
        try:
            rows, end = self._encode(request)
            with self._lock:
                choices = list(self._generate(request, rows, max_tokens, end, on_text))
        except RequestError:
            raise
        except UserError as error:  # the prompt's, as the settings were checked
            field = "messages" if request.messages else "prompt"
            raise RequestError(str(error), field) from error
        return Answer(choices, sum(map(len, rows)))

    def _encode(self, request: GenerationRequest) -> tuple[list[np.ndarray], int | None]:
        """Return the tokens of each prompt, and the token that ends an answer."""
        if request.messages:
            row = encode_conversation(self._tokenizer, self._template, request.messages)
            return [row], stop_token(self._tokenizer, self._template)
        rows = [
            encode_prompt(self._tokenizer, each)
            if isinstance(each, str)
            else np.array(each, np.int64)
            for each in request.prompts
        ]
        return rows, self._tokenizer.stop_token_id

    def _generate(
        self,
        request: GenerationRequest,
        rows: list[np.ndarray],
        max_tokens: int,
        end: int | None,
        on_text: Callable[[str], None] | None,
    ) -> Iterator[Completion]:
        scanner = StopScanner(request.stop, on_text or (lambda piece: None))
        repeated = [row for row in rows for _ in range(request.num_choices)]
        # A single answer ends at its stop string; several run as one batch and are cut afterwards.
        alone = len(repeated) == 1
        completions = complete_tokens(
            self._run,
            repeated,
            max_new_tokens=max_tokens,
            sampling=request.sampling,
            seed=request.seed,
            on_text=scanner.push if alone else None,
            stop_token=end,
        )
        if alone:
            scanner.flush()
            yield completions[0]._replace(text=scanner.text)
            return
        for each in completions:
            places = [place for stop in request.stop if (place := each.text.find(stop)) >= 0]
            yield each if not places else each._replace(text=each.text[: min(places)], stopped=True)
