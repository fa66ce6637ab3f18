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

from train.data.batches import TextTrainingBatches, make_text_evaluation_batches
from train.data.config import TextDataConfig
from train.data.corpus import TextCorpus, prepare_text, prepare_tokenizer
from train.data.masking import MaskedEvaluationBatches, MaskedTrainingBatches, Masking
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.experiment import Experiment
from train.step import Batch, LossFn
from train.tasks.base import (
    Metric,
    SampleOptions,
    Task,
    TextCallback,
    max_eval_batches,
    mean_losses,
    round_up_batch_size,
)
from train.tasks.config import MaskedLanguageModeling
from train.tasks.losses import auxiliary_losses, requested_outputs, token_loss
from train.tasks.vocabulary import Labels, resolve_vocab_size
from transformer.context import ActivationConstraint
from transformer.hardware import Hardware
from transformer.losses import Loss
from transformer.models.masked_lm import MaskedLanguageModel

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run

MASK_PATTERN = re.compile(r"\s*(?:\[MASK\]|<mask>)")
"""What stands for a hidden word in a prompt, with the space that belongs to the word."""


@dataclasses.dataclass(frozen=True)
class MaskedLanguageModelTask(Task):
    """A model of text that sees both sides of a word, judged by its loss."""

    experiment: Experiment

    @property
    def data(self) -> TextDataConfig:
        return self.experiment.text_data

    @property
    def task_config(self) -> MaskedLanguageModeling:
        assert isinstance(self.experiment.task, MaskedLanguageModeling)
        return self.experiment.task

    @property
    def max_targets(self) -> int:
        """Words of a window that are told at most."""
        return max(1, int(np.rint(self.task_config.mlm_probability * self.data.sequence_length)))

    @property
    def target_fraction(self) -> float:
        return self.max_targets / self.data.sequence_length

    @property
    def untrained_parts(self) -> tuple[str, ...]:
        if not self.experiment.model.pooler:
            return super().untrained_parts
        pooler = "model.pooler true: masked words do not train the pooler; false leaves it out"
        return (*super().untrained_parts, pooler)

    def selection_metric(self, corpus: TextCorpus) -> Metric:
        return Metric("loss", lower_is_better=True)

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> TextCorpus:
        tokenizer = tokenizer or prepare_tokenizer(self.data)
        return prepare_text(self.data, tokenizer=tokenizer.with_mask_token())

    def resolve_experiment(self, corpus: TextCorpus) -> Experiment:
        return resolve_vocab_size(self.experiment, corpus.tokenizer)

    def make_model(
        self, hardware: Hardware, constrain: ActivationConstraint
    ) -> MaskedLanguageModel:
        return MaskedLanguageModel(self.experiment.model, hardware, constrain)

    def make_loss_fn(self, model: MaskedLanguageModel) -> LossFn:
        """The cross entropy of the hidden words alone; no logits are computed of the others.

        A batch has `tokens`, `targets`, `weights`, `segments` and `positions` [B, T]. Padding is
        met in evaluation alone.
        """
        most = self.max_targets
        apart = self.data.document_masking

        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            output = model.apply(
                {"params": params},
                batch["tokens"],
                positions=batch["positions"],
                segments=batch["segments"] if apart or dropout_rngs is None else None,
                dropout_rngs=dropout_rngs,
                outputs=requested_outputs(dropout_rngs),
            )
            hidden, hers = gather_targets(output.hidden, batch, most)
            bias = params["head_output_bias"]
            found = token_loss(
                model, params, hidden, hers, bias=bias, with_accuracy=dropout_rngs is None
            )
            return {**found, **auxiliary_losses(output.aux, found["loss"].weight)}

        return loss

    def make_masking(self, tokenizer: Tokenizer, seed: int) -> Masking:
        settings = self.task_config
        return Masking(
            tokenizer,
            seed=seed,
            mlm_probability=settings.mlm_probability,
            mask_replace_prob=settings.mask_replace_prob,
            random_replace_prob=settings.random_replace_prob,
        )

    def training_batches(self, corpus: TextCorpus) -> MaskedTrainingBatches:
        seed = self.experiment.seed
        windows = TextTrainingBatches(
            corpus.split("train"),
            batch_size=self.experiment.batch_size,
            sequence_length=self.data.sequence_length,
            seed=seed,
            document_masking=self.data.document_masking,
        )
        return MaskedTrainingBatches(windows, self.make_masking(corpus.tokenizer, seed))

    def describe_training_data(self, corpus: TextCorpus) -> str:
        return f"{len(corpus.split('train').tokens):,} tokens of text"

    def evaluate(
        self, engine: Engine, params: Any, corpus: TextCorpus, split: str, *, full_split: bool
    ) -> dict[str, float]:
        """Loss in nats a hidden word, and the share of them told right; always the same ones."""
        settings = self.experiment.evaluation
        windows = make_text_evaluation_batches(
            corpus.split(split),
            batch_size=round_up_batch_size(
                settings.batch_size or self.experiment.batch_size, engine.mesh
            ),
            sequence_length=self.data.sequence_length,
            document_masking=self.data.document_masking,
            max_batches=max_eval_batches(settings, full_split),
        )
        batches = MaskedEvaluationBatches(windows, self.make_masking(corpus.tokenizer, 0))
        return mean_losses(engine, params, batches)

    def check_prompt(self, prompt: str, tokenizer: Tokenizer) -> None:
        self.encode_prompt(prompt, tokenizer)

    def sample(
        self,
        run: Run,
        prompts: Sequence[str],
        options: SampleOptions,
        on_text: TextCallback | None = None,
    ) -> list[str]:
        """Each prompt with the likeliest word in place of every [MASK]."""
        filled = [self.fill_masks(run, prompt) for prompt in prompts]
        if on_text is not None:
            on_text("".join(filled))
        return filled

    def encode_prompt(self, prompt: str, tokenizer: Tokenizer) -> np.ndarray:  # [T]
        """The tokens of a prompt (UserError: it is too long, or hides no word)."""
        tokens, longest = encode_masked_prompt(tokenizer, prompt), self.data.sequence_length
        if len(tokens) > longest:
            raise UserError(
                f"prompt: has {len(tokens)} tokens and the model reads {longest}; shorten it"
            )
        return tokens

    def fill_masks(self, run: Run, prompt: str) -> str:
        """The prompt with the likeliest words."""
        assert isinstance(run.model, MaskedLanguageModel)
        tokenizer = run.tokenizer
        tokens = self.encode_prompt(prompt, tokenizer)
        row = np.zeros((1, self.data.sequence_length), np.int32)
        row[0, : len(tokens)] = tokens
        best = np.asarray(_likeliest(run.params, row, np.int32(len(tokens)), model=run.model))[0]
        here = best[: len(tokens)]
        return tokenizer.decode(np.where(tokens == tokenizer.mask_token_id, here, tokens)).strip()


def gather_targets(
    hidden: jax.Array,  # [B, T, D]
    batch: Batch,
    max_targets: int,
) -> tuple[jax.Array, Batch]:  # [B, most, D]; targets and weights [B, most]
    """The places of each row that have weight, in order, and others of weight 0 after them."""
    weights, places = jax.lax.top_k(batch["weights"], max_targets)  # [B, most]
    targets = jnp.take_along_axis(batch["targets"], places, axis=1)
    hidden = jnp.take_along_axis(hidden, places[:, :, None], axis=1)
    return hidden, {"targets": targets, "weights": weights}


def encode_masked_prompt(tokenizer: Tokenizer, prompt: str) -> np.ndarray:  # [T]
    """A prompt's tokens after one that begins a text, masks among them.

    Raises UserError if it has no mask, or characters that the tokenizer lacks.
    """
    pieces = MASK_PATTERN.split(prompt)
    if len(pieces) == 1:
        raise UserError(f"prompt {prompt!r}: hides no word; write [MASK] in place of one")
    parts: list[Any] = [[tokenizer.eos_token_id], tokenizer.encode(pieces[0])]
    for piece in pieces[1:]:
        parts += [[tokenizer.mask_token_id], tokenizer.encode(piece)]
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
