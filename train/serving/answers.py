"""Answers to requests: generation with stop strings, one request at a time."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from train.data.chat_template import ChatTemplate
from train.errors import UserError
from train.run import Run
from train.runtime.oom import LARGER_DEVICES_REMEDY, explain_oom
from train.serving.requests import GenerationRequest, RequestError
from train.tasks.instruction import encode_conversation
from train.tasks.text_completion import (
    Completion,
    StopCompletionError,
    complete_tokens,
    encode_prompt,
)
from train.tasks.vocabulary import tokenizer_of
from transformer.layers.stack_weights import unstack_for_decoding
from transformer.models.language_model import LanguageModel


class Answer(NamedTuple):
    """Answers to a request."""

    choices: list[Completion]
    """`n` for each prompt, in the order of the prompts."""
    prompt_tokens: int


def find_stop(text: str, stops: tuple[str, ...], start: int = 0) -> int | None:
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

    def __init__(self, stops: tuple[str, ...], on_text: Callable[[str], None]):
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


@contextlib.contextmanager
def _as_request_errors(field: str) -> Iterator[None]:
    """Raise a RequestError of this field in place of another UserError."""
    try:
        yield
    except RequestError:
        raise
    except UserError as error:
        raise RequestError(str(error), field) from error


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
        self._run, self.max_tokens, self.max_prompt_tokens = run, max_tokens, max_prompt_tokens
        self._tokenizer = tokenizer_of(run)
        self._template = ChatTemplate.of_tokenizer(self._tokenizer)
        # One program at a time: two would share the device's memory, and neither would be faster.
        self._lock = threading.Lock()

    def close(self) -> bool:
        """Let no generation begin any more; return False if one is going on."""
        return self._lock.acquire(blocking=False)

    def answer(
        self,
        request: GenerationRequest,
        on_text: Callable[[str], None] = lambda piece: None,
        check_client: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Return the answers to a request.

        Args:
          request: The request.
          on_text: Receives the only answer in pieces, as it is generated. It must not wait: other
            requests wait for it.
          check_client: Called before the generation and, with a single answer, during it. What it
            raises ends the generation: nobody waits for the answer any more.

        Raises:
          RequestError: The model cannot read a prompt, or a number of tokens is above the server's.
        """
        default = min(request.default_max_tokens or self.max_tokens, self.max_tokens)
        max_tokens = default if request.max_tokens is None else request.max_tokens
        if max_tokens > self.max_tokens:
            raise RequestError(
                f"max_tokens {max_tokens}: is more than this server allows; give at most "
                f"{self.max_tokens}",
                "max_tokens",
            )
        field = "messages" if request.messages else "prompt"
        with _as_request_errors(field):
            rows = self._encode(request)
        longest = max(map(len, rows))
        if longest > self.max_prompt_tokens:
            raise RequestError(
                f"{field}: has {longest} tokens, and this server reads at most "
                f"{self.max_prompt_tokens}; shorten it",
                field,
            )
        remedies = ["send fewer prompts or a smaller max_tokens", LARGER_DEVICES_REMEDY]
        with self._lock, explain_oom(lambda: remedies), _as_request_errors(field):
            check_client()
            choices = self._generate(request, rows, max_tokens, on_text, check_client)
        return Answer(choices, sum(map(len, rows)))

    def _encode(self, request: GenerationRequest) -> list[np.ndarray]:
        """Return the tokens of each prompt."""
        if request.messages:
            return [encode_conversation(self._tokenizer, self._template, request.messages)]
        return [
            encode_prompt(self._run, each) if isinstance(each, str) else np.array(each, np.int64)
            for each in request.prompts
        ]

    def _generate(
        self,
        request: GenerationRequest,
        rows: list[np.ndarray],
        max_tokens: int,
        on_text: Callable[[str], None],
        check_client: Callable[[], None],
    ) -> list[Completion]:
        scanner = StopScanner(request.stop, on_text)

        def push(piece: str) -> None:
            check_client()
            scanner.push(piece)

        repeated = [row for row in rows for _ in range(request.num_choices)]
        # A single answer ends at its stop string; several run as one batch and are cut afterwards.
        alone = len(repeated) == 1
        completions = complete_tokens(
            self._run,
            repeated,
            max_new_tokens=max_tokens,
            sampling=request.sampling,
            seed=request.seed,
            on_text=push if alone else None,
        )
        if alone:
            scanner.flush()
            return [completions[0]._replace(text=scanner.text)]
        places = [find_stop(each.text, request.stop) for each in completions]
        return [
            each if place is None else each._replace(text=each.text[:place], stopped=True)
            for each, place in zip(completions, places, strict=True)
        ]
