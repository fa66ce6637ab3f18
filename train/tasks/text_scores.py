"""Log-likelihoods of texts under a run's model: how probable it finds what somebody wrote.

With a context, they compare answers to a question, endings of a sentence, or translations of a
source. Without, exp(-total / num_tokens) is the perplexity of a text.
"""

from collections.abc import Sequence

import numpy as np

from train.data.bitext import encode_sentences
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.tasks.task import Task, TrainedModel
from train.tasks.translation import TranslationTask
from transformer.generation.log_likelihood import LogLikelihood, log_likelihoods
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.language_model import LanguageModel


def score_texts(
    task: Task,
    trained: TrainedModel,
    texts: Sequence[str],
    contexts: Sequence[str] | None = None,
) -> list[LogLikelihood]:
    """Return the log-likelihood of each text, in nats, with the number of its tokens.

    A language model reads a text after its context. Without one the first token is not scored, as
    nothing precedes it (a model that was trained with a token before every text reads that token
    first, and scores all of the text). An empty context stands for the beginning of a document.
    Nothing is put before any other context, as in the evaluations of published models.
    Where a token spans the end of the context and the beginning of the text, it is scored.

    A translation model scores the text as the translation of its context, with the token that ends
    it.

    Raises:
      UserError: The run's model does not predict the next token, a text or a context is missing,
        too short or too long, or has characters that the tokenizer lacks.
    """
    if contexts is not None and len(contexts) != len(texts):
        raise UserError(
            f"context: {len(contexts)} for {len(texts)} texts; give one for all, or one for each"
        )
    model, tokenizer = trained.model, trained.tokenizer
    if tokenizer is None or not isinstance(model, LanguageModel | EncoderDecoder):
        raise UserError(
            f"score: task {type(task.config).__name__} does not predict the next token; "
            "use a run of a language model or a translation model"
        )
    if isinstance(model, LanguageModel):
        before: Sequence[str | None] = [None] * len(texts) if contexts is None else contexts
        pairs = zip(texts, before, strict=True)
        encoded = [encode_continuation(tokenizer, *pair) for pair in pairs]
        rows, starts = [row for row, _ in encoded], [start for _, start in encoded]
        sources = None
    else:
        if contexts is None:
            raise UserError("context: is missing; give the source that the text translates")
        assert isinstance(task, TranslationTask)
        for context in contexts:
            task.check_prompt(context, tokenizer)
        frame = task.target_frame(tokenizer)
        targets = encode_sentences(tokenizer, texts, frame)
        rows = [np.append(np.int32(frame.start), target) for target in targets]
        # A token that is forced has no probability.
        starts = [1 if frame.forced is None else 2] * len(rows)
        sources = encode_sentences(tokenizer, contexts, task.source_frame(tokenizer))
    try:
        return log_likelihoods(model, trained.params, rows, context_lengths=starts, sources=sources)
    except ValueError as error:
        message = str(error).replace("sequence ", "text ").replace("source ", "context ")
        raise UserError(message) from error


def encode_continuation(
    tokenizer: Tokenizer, text: str, context: str | None
) -> tuple[np.ndarray, int]:  # [T]
    """Return the tokens that a model reads, and the index of the first that is scored.

    Raises:
      UserError: No token would be scored.
    """
    first, _ = tokenizer.added_token_ids
    if context is None:
        row = np.append(first, tokenizer.encode(text)).astype(np.int32)
        if len(row) <= max(1, len(first)):
            raise UserError(
                f"text {text!r}: has {len(row)} tokens, and the first is not scored; add a "
                "context (an empty one is the beginning of a document)"
            )
        return row, max(1, len(first))
    # Together, as the model read them in training: a space belongs to the word that follows it.
    whole, before = tokenizer.encode(context + text), tokenizer.encode(context)
    shared = min(len(whole), len(before))
    differs = np.flatnonzero(whole[:shared] != before[:shared])
    start = int(differs[0]) if len(differs) else shared
    if start == len(whole):
        raise UserError(f"text {text!r}: has no tokens after its context; give a longer one")
    if not len(first) and not start:
        first = np.array([tokenizer.eos_token_id], np.int32)
    return np.append(first, whole).astype(np.int32), len(first) + start
