"""Runs as models of EleutherAI's lm-evaluation-harness (the package `lm_eval`).

    lm_eval.simple_evaluate(model=HarnessModel("runs/quickstart"), tasks=["lambada_openai"])

Tokens are those of its own model `hf`: context and continuation are encoded together, special
tokens that are spelled out are single tokens, the tokenizer's first tokens precede a text that does
not begin with them, and an empty context is the token that begins a text. Tokens that a tokenizer
adds after a text are left out: nothing would follow them.
"""

import json
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from train.data.chat_template import ChatTemplate
from train.errors import UserError, as_usage_errors
from train.run import Run, load
from train.run_folder.folder import read_json
from train.tasks.instruction import InstructionTuning
from train.tasks.task import tokenizer_of
from train.tasks.text_completion import stop_tokens_of
from transformer.generation.generate import (
    TOKENS_PER_STREAMED_CALL,
    seed_words,
    stop_token_array,
)
from transformer.generation.log_likelihood import log_likelihoods
from transformer.generation.running_batch import BatchRow, RunningBatch
from transformer.generation.sampling import SamplingConfig
from transformer.models.language_model import LanguageModel
from transformer.quantization import Quantization

log = logging.getLogger(__name__)

MODEL_NAME = "linen-transformer"
"""Name in the harness's registry."""

DEFAULT_BATCH_SIZE = 32
"""Texts that are generated at a time with batch_size auto."""

REQUESTS_PER_CALL = 1024
"""Requests that are scored between two steps of the progress bar."""

SAMPLING_OPTIONS = ("do_sample", "temperature", "top_k", "top_p")

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""Strings for the harness's cache, tokens of the context, and tokens of the continuation."""


@register_model(MODEL_NAME)
class HarnessModel(TemplateLM):
    """A run's language model, for tasks of all three kinds of requests.

    Args:
      run: A run, or its folder.
      step: Step of the checkpoint, if `run` is a folder. None: the run's evaluation weights.
      quantize: Hold the matrices of the layers in few bits, if `run` is a folder.
      max_length: Most tokens that the model reads. None: those of its learned positions, of the
        files of an import, or else of a training example. A longer context is cut from the left.
      max_gen_toks: Most tokens of a generated text, for tasks that do not say.
      add_bos_token: Begin texts with the tokens that the tokenizer puts before them.
      batch_size: Texts that are generated at a time; `auto`: 32. Log-likelihoods are computed in
        batches of a number of tokens.
      seed: Seed of sampling.
      max_batch_size: Not used, as is `device`; the harness's command gives them.
      device: Where the model runs is up to JAX.

    Raises:
      UserError: The run has no language model, or fewer positions than `max_length`.
    """

    def __init__(
        self,
        run: Run | str | os.PathLike[str],
        *,
        step: int | None = None,
        quantize: Quantization = "none",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool = True,
        batch_size: int | str = "auto",
        seed: int = 0,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        super().__init__()
        self.run = run if isinstance(run, Run) else load(run, step=step, quantize=quantize)
        if not isinstance(self.run.model, LanguageModel) or self.run.tokenizer is None:
            kind = type(self.run.experiment.task).__name__
            raise UserError(
                f"lm-eval: task {kind} does not predict the next token; give the run of a language "
                "model"
            )
        self._model, self._tokenizer = self.run.model, tokenizer_of(self.run)
        positions = self._model.config.max_length
        self.max_length = max_length or _longest_text(self.run)
        if positions is not None and self.max_length > positions:
            raise UserError(
                f"max_length {self.max_length}: the model has {positions} positions; give no more"
            )
        self.max_gen_toks, self._add_bos_token, self._seed = max_gen_toks, add_bos_token, seed
        is_auto = str(batch_size).startswith("auto")
        self.batch_size = DEFAULT_BATCH_SIZE if is_auto else int(batch_size)
        self._symbols = {token: text for text, token in self._tokenizer.vocabulary.items()}
        self._generating: RunningBatch | None = None

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without a context."""
        name = self._tokenizer.special_token_names.get("bos_token", "")
        before, _ = self._tokenizer.text_frame
        return self._tokenizer.vocabulary.get(name, int(before[0]))

    @property
    def tokenizer_name(self) -> str:
        """Equal for equal tokenizers: a part of the names of cached requests."""
        return self._tokenizer.digest

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template."""
        return self._chat_template().source if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text, to the start of an answer or within the last message."""
        template = self._chat_template()
        if add_generation_prompt:
            return template.render(chat_history, add_generation_prompt=True)
        text, begun = template.render(chat_history), chat_history[-1]["content"].strip()
        return text[: text.rindex(begun) + len(begun)]

    def _chat_template(self) -> ChatTemplate:
        uses_default = isinstance(self.run.experiment.task, InstructionTuning)
        if not self._tokenizer.chat_template and not uses_default:
            raise UserError(
                "apply_chat_template: the run's tokenizer has no chat template; leave it out, or "
                "give the run of a model that was tuned on conversations"
            )
        return ChatTemplate.of_tokenizer(self._tokenizer)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the tokens of a text, by default after those that begin one."""
        tokens, _ = self._tokenizer.encode_with_special_tokens(string)
        before, _ = self._tokenizer.added_token_ids
        if add_special_tokens is None:
            begins = string.startswith(self._symbols[self.prefix_token_id])
            add_special_tokens = self._add_bos_token and not begins
        return [*(before.tolist() if add_special_tokens else []), *tokens.tolist()]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows that predict each token once."""
        windows: list[Request] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            of_text: list[Request] = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += of_text
            owners += [number] * len(of_text)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for number, (total, _) in zip(owners, scores, strict=True):
            totals[number] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows: list[list[int]] = []
        contexts: list[int] = []
        num_cut = 0
        for strings, context, continuation in requests:
            name = "a window" if strings is None else f"continuation {strings[1][:50]!r}"
            if not continuation:
                raise UserError(f"{name}: has no tokens after its context; change the task")
            if len(continuation) > self.max_length:
                raise UserError(
                    f"{name}: has {len(continuation):,} tokens, and the model reads "
                    f"{self.max_length:,}; shorten it, or raise max_length if the model can"
                )
            # The last token is predicted and not read.
            row = (context + continuation)[-(self.max_length + 1) :]
            num_cut += len(row) < len(context + continuation)
            rows.append(row)
            contexts.append(len(row) - len(continuation))
        if num_cut:
            log.warning("%d contexts: cut from the left to %d tokens", num_cut, self.max_length)
        answers: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        with tqdm(total=len(rows), desc="log-likelihoods", disable=disable_tqdm) as progress:
            for first in range(0, len(order), REQUESTS_PER_CALL):
                group = order[first : first + REQUESTS_PER_CALL]
                scores = log_likelihoods(
                    self._model,
                    self.run.params,
                    [rows[index] for index in group],
                    context_lengths=[contexts[index] for index in group],
                )
                for index, score in zip(group, scores, strict=True):
                    answers[index] = score.total, score.is_greedy
                    if (strings := requests[index][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", strings, answers[index])
                progress.update(len(group))
        return [answers[index] for index in range(len(rows))]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text after each context, to a stop string or the end."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            settings = json.dumps(request.args[1], sort_keys=True)
            groups.setdefault(settings, []).append(index)
        answers = [""] * len(requests)
        with tqdm(total=len(requests), desc="texts", disable=disable_tqdm) as progress:
            for group in groups.values():
                contexts = [requests[index].args[0] for index in group]
                settings = requests[group[0]].args[1]
                for place, text in self._generate(contexts, settings):
                    answers[group[place]] = text
                    self.cache_hook.add_partial("generate_until", requests[group[place]].args, text)
                    progress.update()
        return answers

    def _generate(
        self, contexts: Sequence[str], settings: dict[str, Any]
    ) -> Iterator[tuple[int, str]]:
        """Yield the text after each context with the context's index, as it ends."""
        options = normalize_gen_kwargs(settings, self.max_gen_toks)
        until = handle_stop_sequences(options.pop("until"), self._symbols[self.eot_token_id])
        max_new_tokens = options.pop("max_gen_toks")
        sampling = _sampling(options)
        room = self.max_length - max_new_tokens
        if room < 1:
            raise UserError(
                f"max_gen_toks {max_new_tokens:,}: leaves no room for a context among the "
                f"{self.max_length:,} tokens of max_length; lower it"
            )
        encoded = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
        prompts = [np.array(tokens[-room:], np.int32) for tokens in encoded]
        seeds = seed_words(self._seed, prompts)
        waiting = deque(sorted(range(len(prompts)), key=lambda index: -len(prompts[index])))
        running: dict[BatchRow, int] = {}
        batch = self._batch()
        try:
            while waiting or running:
                count = min(batch.num_free, len(waiting))
                joining = {
                    BatchRow(
                        prompt=prompts[index],
                        max_new_tokens=max_new_tokens,
                        sampling=sampling,
                        seed=seeds[index],
                    ): index
                    for index in (waiting.popleft() for _ in range(count))
                }
                if joining:
                    batch.add(list(joining))
                    running |= joining
                batch.advance(TOKENS_PER_STREAMED_CALL)
                for row, index in list(running.items()):
                    text = self._tokenizer.decode(row.tokens)
                    if not row.finished and not any(stop in text for stop in until if stop):
                        continue
                    if not row.finished:
                        batch.remove(row)
                    del running[row]
                    yield index, postprocess_generated_text(text, until, think_end_token=None)
        finally:
            batch.clear()

    def _batch(self) -> RunningBatch:
        if self._generating is None:
            stops = stop_token_array(stop_tokens_of(self.run), self._model.config.vocab_size)
            sizes = (self.batch_size,)  # one program, and not one for each number of rows
            self._generating = RunningBatch(self._model, self.run.params, sizes, stops)
        return self._generating

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness's results say of the model."""
        folder = str(self.run.folder.path)
        return {"model_run": folder, "model_step": self.run.step, "max_length": self.max_length}


def _longest_text(run: Run) -> int:
    """Return the number of tokens that a run's model is made for."""
    if run.model.config.max_length is not None:
        return run.model.config.max_length
    file = run.folder.pretrained / "config.json"
    fields = read_json(file) if file.exists() else {}
    of_text = fields.get("text_config", fields)
    return int(of_text.get("max_position_embeddings") or run.experiment.sequence_length)


def _sampling(options: dict[str, Any]) -> SamplingConfig:
    """Return the sampling of normalized options of generation."""
    # 1 and the like: one beam, one text, no penalty.
    given = {name for name, value in options.items() if value not in (None, False, 1)}
    if unknown := sorted(given - set(SAMPLING_OPTIONS)):
        raise UserError(
            f"gen_kwargs {', '.join(unknown)}: not supported; leave out all but until, "
            f"max_gen_toks, {', '.join(SAMPLING_OPTIONS)}"
        )
    temperature = options.get("temperature", 1.0) if options["do_sample"] else 0.0
    with as_usage_errors():
        return SamplingConfig(temperature, options.get("top_k", 0), options.get("top_p", 1.0))
