"""Answers to requests: generation with stop strings, one request at a time."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from train.data.chat_template import ChatTemplate
from train.errors import UserError
from train.run import Run
from train.runtime.oom import LARGER_DEVICES_REMEDY, explain_oom
from train.serving.requests import GenerationRequest, RequestError, as_request_errors
from train.tasks.instruction import render_question
from train.tasks.task import tokenizer_of
from train.tasks.text_completion import (
    Completion,
    StopCompletionError,
    complete_tokens,
    encode_prompt,
)
from transformer.models.language_model import LanguageModel
from transformer.models.unstacked import unstack_for_decoding

MAX_CHARACTERS_PER_TOKEN = 64
"""Most characters of a prompt for each token that the server reads. A prompt with more is refused
before it is tokenized, which takes time and 100 times its memory."""

SECONDS_BETWEEN_CHECKS = 1.0
"""Seconds between two checks that the client of a request that waits is there."""


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
    """Answers requests with a run's model. Requests of several threads wait for each other.

    Args:
      run: A run of a language model.
      max_tokens: Most tokens of an answer.
      max_prompt_tokens: Most tokens of a prompt.

    Raises:
      UserError: The run has no language model.
    """

    def __init__(self, run: Run, max_tokens: int, max_prompt_tokens: int):
        if not isinstance(run.model, LanguageModel) or run.tokenizer is None:
            raise UserError(
                f"serve: task {type(run.experiment.task).__name__} has no language model; use "
                "sample, or the run of a language model"
            )
        if run.model.hardware.platform != "cpu":  # where stacked weights are copied at every token
            run = dataclasses.replace(run, params=unstack_for_decoding(run.params))
        positions = run.model.config.max_length
        if positions is not None:  # one is left for an answer
            max_prompt_tokens = min(max_prompt_tokens, positions - 1)
        self._run, self.max_tokens, self.max_prompt_tokens = run, max_tokens, max_prompt_tokens
        self._tokenizer = tokenizer_of(run)
        self._template = ChatTemplate.of_tokenizer(self._tokenizer)
        # One program at a time: two would share the device's memory, and neither would be faster.
        self._lock = threading.Lock()

    def close(self) -> bool:
        """Let no generation begin any more; return False if one is going on."""
        return self._lock.acquire(blocking=False)

    def encode(self, request: GenerationRequest) -> EncodedRequest:
        """Return the tokens of a request.

        Raises:
          RequestError: A prompt cannot be tokenized, or a number of tokens is above the server's.
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
          on_text: Receives the only answer in pieces, as it is generated. It must not wait: other
            requests wait for it.
          check_client: Called while the request waits, and after every few tokens. What it raises
            ends the generation: nobody waits for the answer any more.

        Raises:
          RequestError: The model cannot read a prompt.
        """
        remedies = ["send fewer prompts or a smaller max_tokens", LARGER_DEVICES_REMEDY]
        while not self._lock.acquire(timeout=SECONDS_BETWEEN_CHECKS):
            check_client()
        field = "messages" if encoded.request.messages else "prompt"
        try:
            with explain_oom(lambda: remedies), as_request_errors(field):
                check_client()
                choices = self._generate(encoded, on_text, check_client)
        finally:
            self._lock.release()
        return Answer(choices, sum(map(len, encoded.rows)))

    def _generate(
        self,
        encoded: EncodedRequest,
        on_text: Callable[[str], None],
        check_client: Callable[[], None],
    ) -> list[Completion]:
        request, rows, max_tokens = encoded
        scanner = StopScanner(request.stop, on_text)
        repeated = [row for row in rows for _ in range(request.n)]
        # A single answer ends at its stop string; several run as one batch and are cut afterwards.
        alone = len(repeated) == 1
        completions = complete_tokens(
            self._run,
            repeated,
            max_new_tokens=max_tokens,
            sampling=request.sampling,
            seed=request.seed,
            on_text=scanner.push if alone else None,
            on_step=check_client,
        )
        if alone:
            scanner.flush()
            return [completions[0]._replace(text=scanner.text)]
        places = [find_stop(each.text, request.stop) for each in completions]
        return [
            each if place is None else each._replace(text=each.text[:place], stopped=True)
            for each, place in zip(completions, places, strict=True)
        ]
