"""Masked language modeling: predict hidden tokens (Devlin et al. 2019)."""

import dataclasses
import functools
import re
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from train.data.corpus import TextCorpus
from train.data.data_config import TextDataConfig
from train.data.masking import MaskedEvaluationBatches, MaskedTrainingBatches, Masking
from train.data.mixed_corpora import prepare_any_text, prepare_tokenizer
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError
from train.step import Batch, LossFn
from train.tasks.evaluation import EvaluatedModel, EvaluationOptions, mean_losses
from train.tasks.task import (
    ModelInputs,
    TaskConfig,
    TrainedModel,
    TrainingOptions,
    check_no_encoder,
    check_no_target,
    token_inputs,
    tokenizer_of,
)
from train.tasks.text_task import AnyTextCorpus, TextTask
from train.tasks.vocabulary import Labels
from transformer.hardware import Hardware
from transformer.losses import Loss, auxiliary_losses, requested_outputs, token_loss
from transformer.model_context import ActivationConstraint
from transformer.models.config import TransformerConfig
from transformer.models.masked_lm import MaskedLanguageModel
from transformer.models.stack import supports_segments
from transformer.validation import Bounds, NonNegativeFloat

MASK_PATTERN = re.compile(r"\s*(?:\[MASK\]|<mask>)")
"""A mask in a prompt, with the space before it, which is part of the masked token."""


@dataclasses.dataclass(frozen=True)
class MaskedLanguageModeling(TaskConfig):
    """Masked language modeling: predict hidden tokens (Devlin et al. 2019, section 3.1)."""

    data_configs = (TextDataConfig,)

    mlm_probability: Annotated[float, Bounds(above=0, maximum=1)] = 0.15
    """Fraction of the tokens that are selected for prediction, in (0, 1]."""
    mask_replace_prob: NonNegativeFloat = 0.8
    """Fraction of the selected tokens that are replaced by the mask token."""
    random_replace_prob: NonNegativeFloat = 0.1
    """Fraction of the selected tokens that are replaced by a random token. The rest stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Chosen tokens that are neither masked nor replaced stay as they are.
        if self.mask_replace_prob + self.random_replace_prob > 1:
            raise UsageError(
                f"task.mask_replace_prob {self.mask_replace_prob}, task.random_replace_prob "
                f"{self.random_replace_prob}: give fractions that sum to at most 1"
            )

    def check(self, model: TransformerConfig) -> None:
        check_no_encoder(self, model)
        if model.causal:
            raise UsageError(
                f"model.causal: task {type(self).__name__} reads both sides of a token; set it to "
                "False (--model.no-causal)"
            )


@dataclasses.dataclass(frozen=True)
class MaskedLanguageModelTask(TextTask):
    """Masked language modeling."""

    config: MaskedLanguageModeling

    @property
    def max_targets(self) -> int:
        """Maximum number of prediction targets of a window."""
        return max(1, int(np.rint(self.config.mlm_probability * self.data.sequence_length)))

    @property
    def target_fraction(self) -> float:
        return self.max_targets / self.data.sequence_length

    @property
    def untrained_parts(self) -> tuple[str, ...]:
        if not self.model_config.pooler:
            return super().untrained_parts
        pooler = "model.pooler true: masked tokens do not train the pooler; false leaves it out"
        return (*super().untrained_parts, pooler)

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> Any:
        tokenizer = tokenizer or prepare_tokenizer(self.data)
        return prepare_any_text(self.data, tokenizer=tokenizer.with_mask_token())

    def make_model(
        self, hardware: Hardware, constrain: ActivationConstraint
    ) -> MaskedLanguageModel:
        return MaskedLanguageModel(self.model_config, hardware, constrain)

    def make_loss_fn(self, model: MaskedLanguageModel) -> LossFn:
        """Return the cross entropy of the masked tokens.

        A batch has `tokens`, `targets`, `weights`, `segments` and `positions` [B, T].
        """
        max_targets = self.max_targets
        document_masking = self.data.document_masking
        masks_padding = supports_segments(model.config.layer_pattern)

        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            # Training windows are full. Only evaluation (no dropout) has padding to mask.
            has_padding = dropout_rngs is None and masks_padding
            segments = batch["segments"] if document_masking or has_padding else None
            output = model.apply(
                {"params": params},
                batch["tokens"],
                positions=batch["positions"],
                segments=segments,
                dropout_rngs=dropout_rngs,
                outputs=requested_outputs(dropout_rngs),
            )
            # Gather the targets first, so that no logits are computed for the other tokens.
            hidden, targets = gather_targets(output.hidden, batch, max_targets)
            bias = params.get("head_output_bias")
            losses = token_loss(
                model, params, hidden, targets, bias=bias, with_accuracy=dropout_rngs is None
            )
            return {**losses, **auxiliary_losses(output.aux, losses["loss"].weight)}

        return loss

    def make_masking(self, tokenizer: Tokenizer, seed: int) -> Masking:
        """Return the masking that the task's settings describe."""
        config = self.config
        return Masking(
            tokenizer,
            seed=seed,
            mlm_probability=config.mlm_probability,
            mask_replace_prob=config.mask_replace_prob,
            random_replace_prob=config.random_replace_prob,
        )

    def training_batches(
        self, corpus: AnyTextCorpus, options: TrainingOptions
    ) -> MaskedTrainingBatches:
        masking = self.make_masking(corpus.tokenizer, options.seed)
        return MaskedTrainingBatches(super().training_batches(corpus, options), masking)

    def evaluation_batches(
        self, corpus: TextCorpus, split: str, options: EvaluationOptions
    ) -> MaskedEvaluationBatches:
        """Return the windows of one source, in order.

        Every evaluation masks the same tokens (seed 0), so that evaluations are comparable.
        """
        windows = self.evaluation_windows(corpus, split, dataclasses.replace(options, stride=0))
        return MaskedEvaluationBatches(windows, self.make_masking(corpus.tokenizer, 0))

    def evaluate_source(
        self, model: EvaluatedModel, corpus: TextCorpus, split: str, options: EvaluationOptions
    ) -> dict[str, float]:
        """Return the loss, in nats a masked token, and the accuracy."""
        return mean_losses(model, self.evaluation_batches(corpus, split, options))

    def check_prompt(self, prompt: str, tokenizer: Tokenizer) -> None:
        self.encode_prompt(prompt, tokenizer)

    def model_inputs(
        self, trained: TrainedModel, text: str, target: str | None = None
    ) -> ModelInputs:
        """Return the tokens of a text with or without [MASK]."""
        if MASK_PATTERN.search(text) is None:
            return super().model_inputs(trained, text, target)
        check_no_target(target)
        return token_inputs(trained, encode_masked_prompt(tokenizer_of(trained), text))

    def encode_prompt(self, prompt: str, tokenizer: Tokenizer) -> np.ndarray:  # [T]
        """Return the tokens of a prompt. Raises UserError if it is too long or has no mask."""
        tokens, longest = encode_masked_prompt(tokenizer, prompt), self.data.sequence_length
        if len(tokens) > longest:
            raise UserError(
                f"prompt: has {len(tokens)} tokens and the model reads {longest}; shorten it"
            )
        return tokens

    def predict(self, trained: TrainedModel, prompt: str) -> str:
        """Return the prompt with the most likely token in place of every [MASK]."""
        assert isinstance(trained.model, MaskedLanguageModel)
        tokenizer = tokenizer_of(trained)
        tokens = self.encode_prompt(prompt, tokenizer)
        row = np.zeros((1, self.data.sequence_length), np.int32)
        row[0, : len(tokens)] = tokens
        best = _predict_tokens(trained.params, row, np.int32(len(tokens)), model=trained.model)
        predicted = np.asarray(best)[0, : len(tokens)]
        filled = np.where(tokens == tokenizer.mask_token_id, predicted, tokens)
        return tokenizer.decode(filled).strip()


def gather_targets(
    hidden: jax.Array,  # [B, T, D]
    batch: Batch,
    max_targets: int,
) -> tuple[jax.Array, Batch]:  # [B, max_targets, D]; targets and weights [B, max_targets]
    """Return the positions of each row that have weight, in order, then others of weight 0."""
    # The number of targets varies by row, but shapes must be static. top_k puts the weights of 1
    # first, and breaks ties by position.
    weights, positions = jax.lax.top_k(batch["weights"], max_targets)  # [B, max_targets]
    targets = jnp.take_along_axis(batch["targets"], positions, axis=1)
    hidden = jnp.take_along_axis(hidden, positions[:, :, None], axis=1)
    return hidden, {"targets": targets, "weights": weights}


def encode_masked_prompt(tokenizer: Tokenizer, prompt: str) -> np.ndarray:  # [T]
    """Return a prompt's tokens, mask tokens and those around the text included.

    Raises:
      UserError: The prompt has no mask, or characters that the tokenizer lacks.
    """
    texts = MASK_PATTERN.split(prompt)
    if len(texts) == 1:
        raise UserError(f"prompt {prompt!r}: has no [MASK]; write [MASK] in place of a word")
    if tokenizer.mask_token_id is None:
        raise UserError("prompt: the tokenizer has no mask token; give one that has")
    before, after = tokenizer.text_frame
    tokens: list[Any] = [before, tokenizer.encode(texts[0])]
    for text in texts[1:]:
        tokens += [[tokenizer.mask_token_id], tokenizer.encode(text)]
    tokens.append(after)
    return np.concatenate([np.asarray(each, np.int32) for each in tokens])


@functools.partial(jax.jit, static_argnames="model")
def _predict_tokens(
    params: Any,
    tokens: jax.Array,  # [B, T]
    length: jax.Array,
    *,
    model: MaskedLanguageModel,
) -> jax.Array:  # [B, T]
    """Return the most likely token at each of the first `length` positions."""
    segments = (jnp.arange(tokens.shape[1]) < length).astype(jnp.int32)
    segments = jnp.broadcast_to(segments[None], tokens.shape)
    logits = model.apply({"params": params}, tokens, segments=segments).logits
    assert logits is not None
    return jnp.argmax(logits, axis=-1)
