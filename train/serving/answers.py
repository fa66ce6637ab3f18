"""Answers to requests: their tokens, and texts up to a stop string."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from train.data.chat_template import ChatTemplate
from train.errors import UserError
from train.run import Run
from train.runtime.oom import LARGER_DEVICES_REMEDY, explain_oom
from train.serving.decoding_thread import DecodingThread, Generation
from train.serving.logprobs import TokenNames, completion_logprobs
from train.serving.requests import (
    MAX_CHARACTERS_PER_TOKEN,
    MAX_LOGPROBS,
    GenerationRequest,
    RequestError,
    as_request_errors,
    check_length,
)
from train.tasks.instruction import render_question
from train.tasks.task import tokenizer_of
from train.tasks.text_completion import (
    Completion,
    GeneratedText,
    StopCompletionError,
    encode_prompt,
    stop_tokens_of,
)
from transformer.generation.batches import batches_of_tokens
from transformer.generation.generate import check_prompts, seed_words
from transformer.generation.log_likelihood import TokenLogLikelihoods, token_log_likelihoods
from transformer.models.language_model import LanguageModel
from transformer.models.model import max_cache_length
from transformer.models.unstacked import unstack_for_decoding

MAX_SCORED_TOKENS = 1 << 17
"""Most tokens whose log-probabilities are given for one request."""


class EncodedRequest(NamedTuple):
    """A request and the tokens of its prompts."""

    request: GenerationRequest
    rows: list[np.ndarray]  # each [t]
    max_tokens: int


class Choice(NamedTuple):
    """One answer."""

    text: str
    """With `echo`, the prompt and the answer."""
    num_tokens: int
    """Generated tokens, without one that ended the text."""
    stopped: bool
    logprobs: dict[str, Any] | None
    """As the API writes them."""


class Answer(NamedTuple):
    """Answers to a request."""

    choices: list[Choice]
    """`n` for each prompt, in the order of the prompts."""
    prompt_tokens: int


class GeneratedRow(NamedTuple):
    """An answer with its tokens, among them the one that ended it."""

    completion: Completion
    tokens: list[int]


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
        self._run = dataclasses.replace(run, params=None)  # they may be copied
        self._tokenizer = tokenizer_of(run)
        self._template = ChatTemplate.of_tokenizer(self._tokenizer)
        self._params, self._names = params, TokenNames(self._tokenizer)
        self._scoring = threading.Lock()
        self.decoding = DecodingThread(run.model, params, max_batch_size, stop_tokens_of(run))

    def close(self) -> bool:
        """Let no computation begin any more; return False if one is going on."""
        return self.decoding.close() and self._scoring.acquire(timeout=0.1)

    def encode(self, request: GenerationRequest) -> EncodedRequest:
        """Return the tokens of a request.

        Raises:
          RequestError: A prompt cannot be tokenized or read by the model, or a number of tokens is
            above the server's.
        """
        default = min(request.default_max_tokens or self.max_tokens, self.max_tokens)
        max_tokens = default if request.max_tokens is None else request.max_tokens
        if max_tokens > self.max_tokens:
            raise RequestError(
                f"max_tokens {max_tokens}: is more than this server allows; give at most "
                f"{self.max_tokens}",
                "max_tokens",
            )
        if request.messages:
            with as_request_errors("messages"):
                text = render_question(self._template, request.messages, request.variables)
                check_length(
                    "messages", len(text) // MAX_CHARACTERS_PER_TOKEN, self.max_prompt_tokens
                )
                # The template has written the special tokens as text.
                rows = [self._tokenizer.encode_with_special_tokens(text)[0]]
            check_length("messages", len(rows[0]), self.max_prompt_tokens)
        else:
            rows = list(map(self._encode_prompt, request.prompts))
        with as_request_errors("messages" if request.messages else "prompt"):
            try:
                check_prompts(self._model, rows, max_new_tokens=1)
            except ValueError as error:
                raise UserError(str(error)) from error
        if request.logprobs is not None:
            max_tokens = self._check_scored(request, rows, max_tokens)
        return EncodedRequest(request, rows, max_tokens)

    def _check_scored(
        self, request: GenerationRequest, rows: list[np.ndarray], max_tokens: int
    ) -> int:
        """Return how many tokens an answer with log-probabilities may have.

        Raises:
          RequestError: A prompt and its answer have more tokens than the model has positions, or
            all together more than are scored for one request.
        """
        if self._positions is not None:
            room = self._positions - max(map(len, rows))
            if request.max_tokens is not None and max_tokens > room:
                raise RequestError(
                    f"max_tokens {max_tokens}: with logprobs, a prompt and its answer have at most "
                    f"the model's {self._positions} positions; give at most {room}",
                    "max_tokens",
                )
            max_tokens = min(max_tokens, room)
        total = request.n * sum(len(row) + max_tokens for row in rows)
        if total > MAX_SCORED_TOKENS:
            raise RequestError(
                f"logprobs: of {total:,} tokens are more than {MAX_SCORED_TOKENS:,}; send several "
                "requests",
                "logprobs",
            )
        return max_tokens

    def _encode_prompt(self, prompt: str | tuple[int, ...]) -> np.ndarray:
        if isinstance(prompt, str):
            check_length("prompt", len(prompt) // MAX_CHARACTERS_PER_TOKEN, self.max_prompt_tokens)
            with as_request_errors("prompt"):
                row = encode_prompt(self._run, prompt)
        else:
            row = np.array(prompt, np.int64)
        check_length("prompt", len(row), self.max_prompt_tokens)
        return row

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
        if max_tokens:
            self.decoding.submit(generations)
            try:
                generated = [
                    self._read(generation, row, request.stop, on_text, check_client)
                    for generation, row in zip(generations, repeated, strict=True)
                ]
            finally:
                for generation in generations:
                    generation.cancelled = True  # no effect on one that has ended
        else:
            nothing = GeneratedRow(Completion("", 0, stopped=False), [])
            generated = [nothing for _ in repeated]
        logprobs: list[dict[str, Any] | None] = [None] * len(generated)
        if request.logprobs is not None:
            logprobs = self._logprobs(request, repeated, generated, check_client)
        texts = [""] * len(repeated)
        if request.echo:
            given = [prompt for prompt in request.prompts for _ in range(request.n)]
            texts = [
                prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
                for prompt in given
            ]
        choices = [
            Choice(
                text=text + each.completion.text,
                num_tokens=each.completion.num_tokens,
                stopped=each.completion.stopped,
                logprobs=of_tokens,
            )
            for text, each, of_tokens in zip(texts, generated, logprobs, strict=True)
        ]
        return Answer(choices, sum(map(len, rows)))

    def _logprobs(
        self,
        request: GenerationRequest,
        prompts: Sequence[np.ndarray],
        generated: Sequence[GeneratedRow],
        check_client: Callable[[], None],
    ) -> list[dict[str, Any] | None]:
        """Return the log-probabilities of each choice, by a pass over its prompt and answer."""
        assert request.logprobs is not None
        pairs = list(zip(prompts, generated, strict=True))
        rows = [np.append(prompt, each.tokens).astype(np.int32) for prompt, each in pairs]
        num_top = min(MAX_LOGPROBS, self._model.config.vocab_size) if request.logprobs > 1 else 1
        scores: dict[int, TokenLogLikelihoods] = {}
        for batch, _ in batches_of_tokens([len(row) for row in rows], None):
            check_client()
            with self._scoring, explain_oom(lambda: ["send fewer prompts", LARGER_DEVICES_REMEDY]):
                found = token_log_likelihoods(
                    self._model, self._params, [rows[index] for index in batch], num_top=num_top
                )
            scores |= dict(zip(batch, found, strict=True))
        return [
            completion_logprobs(
                self._names,
                self._tokenizer,
                row,
                scores[index],
                request.logprobs,
                start=0 if request.echo else len(prompts[index]),
            )
            for index, row in enumerate(rows)
        ]

    def _read(
        self,
        generation: Generation,
        prompt: np.ndarray,
        stops: Sequence[str],
        on_text: Callable[[str], None],
        check_client: Callable[[], None],
    ) -> GeneratedRow:
        """Return an answer, up to a stop string."""
        scanner = StopScanner(stops, on_text)
        text = GeneratedText(self._tokenizer, prompt, scanner.push)
        tokens: list[int] = []
        begins: list[int] = []  # in the text
        try:
            for new in generation.new_tokens(check_client):
                # One at a time where a string may end the text: those behind it do not count.
                for part in [[token] for token in new] if stops else [new]:
                    tokens += part
                    begins.append(len(scanner.text))
                    text.push(part)
            text.stopped = generation.stopped
            if generation.stop_token is not None:
                tokens.append(generation.stop_token)
        except StopCompletionError:
            generation.cancelled = True
            end = len(scanner.text)
            tokens = [token for token, begin in zip(tokens, begins, strict=True) if begin < end]
        completion = text.finish()
        scanner.flush()
        return GeneratedRow(completion._replace(text=scanner.text), tokens)
