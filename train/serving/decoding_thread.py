"""The thread that decodes the answers of all requests as one batch.

Answers wait in a queue, first come, first served. Between two calls of the decoding loop those for
which there is room join the batch, and those whose client has left leave it. The thread waits for
no client: tokens go into a queue of their answer, which never has more than were asked for.
"""

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from train.runtime.oom import LARGER_DEVICES_REMEDY, explain_oom
from train.serving.requests import RequestError
from transformer.generation.generate import TOKENS_PER_CALL, seed_words, stop_token_array
from transformer.generation.running_batch import PROMPT_GROUPS, BatchRow, RunningBatch
from transformer.models.language_model import LanguageModel
from transformer.models.model import max_cache_length
from transformer.models.unstacked import Params

MAX_WAITING = 256
"""Most answers that wait for room in the batch. More are refused."""

MAX_JOINING_TOKENS = 8192
"""Most tokens of prompts that are read between two calls, while the running answers wait."""

SECONDS_PER_CALL = 0.05
"""About the length of a call: requests wait no longer to join, and pieces of a stream come as
often."""

SECONDS_BETWEEN_CHECKS = 1.0
"""Seconds between two checks that the client of a request that waits is there."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Generation(BatchRow):
    """Answer that is generated, a row of the batch at a time."""

    max_tokens: int
    """Most tokens of this row and those after it: see `next_row`."""
    in_pieces: bool
    """Pass tokens on as they are generated, not at the end of a row."""
    pieces: "queue.SimpleQueue[list[int] | Exception | None]" = dataclasses.field(
        default_factory=queue.SimpleQueue
    )
    """New tokens, or what prevents them; None after the last."""
    num_passed_on: int = 0
    cancelled: bool = False
    """Nobody waits for the answer any more."""

    def new_tokens(self, check_client: Callable[[], None]) -> Iterator[list[int]]:
        """Yield the tokens of the answer, some at a time, without the one that ends it.

        `check_client` is called every now and then; what it raises ends this.
        """
        piece: list[int] | Exception | None = []
        while piece is not None:
            if isinstance(piece, Exception):
                raise piece
            if piece:
                yield piece
            check_client()
            try:
                piece = self.pieces.get(timeout=SECONDS_BETWEEN_CHECKS)
            except queue.Empty:
                piece = []

    def pass_on(self) -> None:
        """Pass on the tokens that the client does not have yet."""
        if self.in_pieces or self.finished:
            self.pieces.put(self.tokens[self.num_passed_on :])
            self.num_passed_on = len(self.tokens)

    def next_row(self, num_positions: int) -> bool:
        """Go on from the newer half of the tokens if the model's positions have run out.

        Return False if this row was the last.
        """
        self.max_tokens -= len(self.tokens)
        if self.stopped or not self.max_tokens:
            return False
        newest = np.append(self.prompt, self.tokens)[-(num_positions // 2) :]
        self.prompt, self.tokens = newest.astype(np.int32), []
        # As `sample` draws it: by the checksum of the new prompt.
        seed, _, number = self.seed.tolist()
        self.seed = seed_words(seed, [self.prompt])[0]
        self.seed[2] = number
        self.max_new_tokens = min(self.max_tokens, num_positions - len(newest))
        self.finished, self.num_passed_on = False, 0
        return True


def _batch_sizes(largest: int) -> tuple[int, ...]:
    """Return the powers of two up to a number, and the number."""
    return (*(1 << index for index in range((largest - 1).bit_length())), largest)


class DecodingThread:
    """Running batch of a server, with its thread and its queue.

    Args:
      model: The model.
      params: Its parameters, as for `RunningBatch`.
      max_batch_size: Most answers that are generated at a time.
      stop_tokens: Tokens that end an answer.
    """

    def __init__(
        self, model: LanguageModel, params: Params, max_batch_size: int, stop_tokens: Sequence[int]
    ):
        stops = stop_token_array(stop_tokens, model.config.vocab_size)
        self._batch = RunningBatch(model, params, _batch_sizes(max_batch_size), stops)
        self._num_positions = max_cache_length(model.config)
        self._running: list[Generation] = []
        self._waiting: deque[Generation] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._start_thread(self._run)

    def compile_ahead(self) -> None:
        """Compile the programs of short texts, before there are requests.

        Return when one answer can be generated; the batch grows as more is compiled.
        """
        sizes, self._batch.sizes = self._batch.sizes, ()
        self._batch.compile(1, prompt_length=1)

        def compile_rest() -> None:
            # First the sizes of groups of prompts.
            in_order = sorted(sizes, key=lambda size: (size not in PROMPT_GROUPS, -size))
            lengths = (min(length, self._num_positions or length) for length in (64, 128, 256))
            for size, length in (*((size, 1) for size in in_order), *((1, n - 1) for n in lengths)):
                if not self._closed:
                    self._batch.compile(size, length)

        self._start_thread(compile_rest)

    def submit(self, generations: Sequence[Generation]) -> None:
        """Let answers join the batch as soon as it has room.

        Raises:
          RequestError: Too many wait already.
        """
        with self._changed:
            if len(self._waiting) + len(generations) > MAX_WAITING:
                raise RequestError(
                    f"the server has {len(self._waiting)} answers waiting; ask again later",
                    status=503,
                )
            self._waiting.extend(generations)
            self._changed.notify()

    def close(self) -> bool:
        """Let no call begin any more; return False if one is going on."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        for thread in self._threads:
            thread.join(timeout=0.1)
        return not any(thread.is_alive() for thread in self._threads)

    def _start_thread(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        num_steps = 1
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting or self._running)
                if self._closed:
                    return
            start = time.monotonic()
            self._remove_cancelled()
            joining = self._take_waiting()
            self._running += joining
            try:
                with explain_oom(
                    lambda: ["send fewer prompts or a smaller max_tokens", LARGER_DEVICES_REMEDY]
                ):
                    self._decode(joining, num_steps)
            except Exception as error:  # noqa: BLE001
                # The requests of the batch fail, with their own tracebacks; the others go on.
                self._batch.clear()
                for generation in self._running:
                    generation.pieces.put(error)
                self._running = []
            seconds = time.monotonic() - start
            # Clients often come together: the first call after one has come is short.
            if joining:
                num_steps = 1
            elif seconds < SECONDS_PER_CALL / 2:
                num_steps = min(2 * num_steps, TOKENS_PER_CALL)
            elif seconds > SECONDS_PER_CALL:
                num_steps = max(num_steps // 2, 1)

    def _remove_cancelled(self) -> None:
        for generation in [each for each in self._running if each.cancelled]:
            self._running.remove(generation)
            self._batch.remove(generation)

    def _take_waiting(self) -> list[Generation]:
        """Return the answers that join the batch now."""
        taken: list[Generation] = []
        num_tokens = 0
        with self._changed:
            while self._waiting and len(taken) < self._batch.num_free:
                num_tokens += len(self._waiting[0].prompt)
                if taken and num_tokens > MAX_JOINING_TOKENS:
                    break
                generation = self._waiting.popleft()
                if not generation.cancelled:
                    taken.append(generation)
        return taken

    def _decode(self, joining: Sequence[Generation], num_steps: int) -> None:
        """Read new prompts, and add up to `num_steps` tokens to each answer."""
        if joining:
            self._batch.add(joining)
            self._pass_on()
        self._batch.advance(num_steps)
        self._pass_on()

    def _pass_on(self) -> None:
        """Pass new tokens on to the clients; forget answers that have ended."""
        for generation in self._running:
            generation.pass_on()
        ended = [each for each in self._running if each.finished]
        self._running = [each for each in self._running if not each.finished]
        for generation in ended:
            if self._num_positions is not None and generation.next_row(self._num_positions):
                with self._changed:
                    self._waiting.appendleft(generation)
            else:
                generation.pieces.put(None)
