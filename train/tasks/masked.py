"""Masked language modelling: the words that were hidden (Devlin et al. 2019)."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from train.data.batches import Batches
from train.data.config import DataConfig
from train.data.corpus import Corpus, prepare, tokenizer_of
from train.data.evaluation import evaluation_batches
from train.data.masked import MaskedBatches, MaskedEvaluationBatches, Masking
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.experiment import Experiment
from train.labels import Labels
from train.step import Batch, LossFunction
from train.tasks.config import MaskedLanguageModelling
from train.tasks.losses import auxiliary, wanted, word_loss
from train.tasks.measuring import fitting, limit, means
from train.tasks.task import Metric, SampleOptions, Show, Task
from train.tasks.vocabulary import with_vocabulary
from transformer.hardware import Hardware
from transformer.losses import Loss
from transformer.masked_language_model import MaskedLanguageModel
from transformer.shared import Constrain

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run

MASK = re.compile(r"\s*(?:\[MASK\]|<mask>)")
"""What stands for a hidden word in a prompt, with the space that belongs to the word."""


@dataclasses.dataclass(frozen=True)
class MaskedTask(Task):
    """A model of text that sees both sides of a word, judged by its loss."""

    experiment: Experiment

    @property
    def data(self) -> DataConfig:
        return self.experiment.text

    @property
    def settings(self) -> MaskedLanguageModelling:
        assert isinstance(self.experiment.task, MaskedLanguageModelling)
        return self.experiment.task

    @property
    def most(self) -> int:
        """Words of a window that are told at most."""
        return max(1, int(np.rint(self.settings.rate * self.data.sequence_length)))

    @property
    def told(self) -> float:
        return self.most / self.data.sequence_length

    @property
    def untrained(self) -> tuple[str, ...]:
        if not self.experiment.model.pooler:
            return super().untrained
        pooler = "model.pooler true: masked words do not train the pooler; false leaves it out"
        return (*super().untrained, pooler)

    def metric(self, corpus: Corpus) -> Metric:
        return Metric("loss", lower_is_better=True)

    def prepare(self, tokenizer: Tokenizer | None = None, labels: Labels | None = None) -> Corpus:
        tokenizer = tokenizer or tokenizer_of(self.data)
        return prepare(self.data, tokenizer=tokenizer.with_mask())

    def resolved(self, corpus: Corpus) -> Experiment:
        return with_vocabulary(self.experiment, corpus.tokenizer)

    def model(self, hardware: Hardware, constrain: Constrain) -> MaskedLanguageModel:
        return MaskedLanguageModel(self.experiment.model, hardware, constrain)

    def loss(self, model: MaskedLanguageModel) -> LossFunction:
        """The cross entropy of the hidden words alone; no logits are computed of the others.

        A batch has `tokens`, `targets`, `weights`, `segments` and `positions` [B, T]. Padding is
        met in evaluation alone.
        """
        most = self.most
        apart = self.data.segments

        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            output = model.apply(
                {"params": params},
                batch["tokens"],
                positions=batch["positions"],
                segments=batch["segments"] if apart or dropout_rngs is None else None,
                dropout_rngs=dropout_rngs,
                outputs=wanted(dropout_rngs),
            )
            hidden, hers = chosen(output.hidden, batch, most)
            bias = params["head_output_bias"]
            found = word_loss(model, params, hidden, hers, bias=bias, accuracy=dropout_rngs is None)
            return {**found, **auxiliary(output.aux, found["loss"].weight)}

        return loss

    def masking(self, tokenizer: Tokenizer, seed: int) -> Masking:
        settings = self.settings
        return Masking(
            tokenizer,
            seed=seed,
            rate=settings.rate,
            masked=settings.masked,
            replaced=settings.replaced,
        )

    def batches(self, corpus: Corpus) -> MaskedBatches:
        seed = self.experiment.seed
        windows = Batches(
            corpus.split("train"),
            batch_size=self.experiment.batch_size,
            sequence_length=self.data.sequence_length,
            seed=seed,
            segments=self.data.segments,
        )
        return MaskedBatches(windows, self.masking(corpus.tokenizer, seed))

    def amount(self, corpus: Corpus) -> str:
        return f"{len(corpus.split('train').tokens):,} tokens of text"

    def evaluate(
        self, engine: Engine, params: Any, corpus: Corpus, split: str, *, whole: bool
    ) -> dict[str, float]:
        """Loss in nats a hidden word, and the share of them told right; always the same ones."""
        settings = self.experiment.evaluation
        windows = evaluation_batches(
            corpus.split(split),
            batch_size=fitting(settings.batch_size or self.experiment.batch_size, engine.mesh),
            sequence_length=self.data.sequence_length,
            segments=self.data.segments,
            limit=limit(settings, whole),
        )
        batches = MaskedEvaluationBatches(windows, self.masking(corpus.tokenizer, 0))
        return means(engine, params, batches)

    def check_prompt(self, prompt: str, tokenizer: Tokenizer) -> None:
        self.hidden(prompt, tokenizer)

    def sample(
        self, run: Run, prompts: Sequence[str], options: SampleOptions, show: Show | None = None
    ) -> list[str]:
        """Each prompt with the likeliest word in place of every [MASK]."""
        filled = [self.filled(run, prompt) for prompt in prompts]
        if show is not None:
            show("".join(filled))
        return filled

    def hidden(self, prompt: str, tokenizer: Tokenizer) -> np.ndarray:  # [T]
        """The tokens of a prompt (UserError: it is too long, or hides no word)."""
        tokens, longest = masked_tokens(tokenizer, prompt), self.data.sequence_length
        if len(tokens) > longest:
            raise UserError(
                f"prompt: has {len(tokens)} tokens and the model reads {longest}; shorten it"
            )
        return tokens

    def filled(self, run: Run, prompt: str) -> str:
        """The prompt with the likeliest words."""
        assert isinstance(run.model, MaskedLanguageModel)
        tokenizer = run.tokenizer
        tokens = self.hidden(prompt, tokenizer)
        row = np.zeros((1, self.data.sequence_length), np.int32)
        row[0, : len(tokens)] = tokens
        best = np.asarray(_likeliest(run.params, row, np.int32(len(tokens)), model=run.model))[0]
        here = best[: len(tokens)]
        return tokenizer.decode(np.where(tokens == tokenizer.mask, here, tokens)).strip()


def chosen(
    hidden: jax.Array,  # [B, T, D]
    batch: Batch,
    most: int,
) -> tuple[jax.Array, Batch]:  # [B, most, D]; targets and weights [B, most]
    """The places of each row that have weight, in order, and others of weight 0 after them."""
    weights, places = jax.lax.top_k(batch["weights"], most)  # [B, most]
    targets = jnp.take_along_axis(batch["targets"], places, axis=1)
    hidden = jnp.take_along_axis(hidden, places[:, :, None], axis=1)
    return hidden, {"targets": targets, "weights": weights}


def masked_tokens(tokenizer: Tokenizer, prompt: str) -> np.ndarray:  # [T]
    """A prompt's tokens after one that begins a text, masks among them.

    Raises UserError if it has no mask, or characters that the tokenizer lacks.
    """
    pieces = MASK.split(prompt)
    if len(pieces) == 1:
        raise UserError(f"prompt {prompt!r}: hides no word; write [MASK] in place of one")
    parts: list[Any] = [[tokenizer.end_of_text], tokenizer.encode(pieces[0])]
    for piece in pieces[1:]:
        parts += [[tokenizer.mask], tokenizer.encode(piece)]
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


@functools.partial(jax.jit, static_argnames="model")
def _likeliest(
    params: Any,
    tokens: jax.Array,  # [B, T]
    length: jax.Array,
    *,
    model: MaskedLanguageModel,
) -> jax.Array:  # [B, T]
    """The likeliest word at each of the first `length` places."""
    segments = (jnp.arange(tokens.shape[1]) < length).astype(jnp.int32)
    segments = jnp.broadcast_to(segments[None], tokens.shape)
    logits = model.apply({"params": params}, tokens, segments=segments).logits
    assert logits is not None
    return jnp.argmax(logits, axis=-1)
