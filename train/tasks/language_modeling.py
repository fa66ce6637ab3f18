"""Causal language modeling: predict the next token."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from train.data.corpus import TextCorpus
from train.data.data_config import TextDataConfig
from train.data.mixed_corpora import prepare_any_text
from train.data.tokenizer import Tokenizer
from train.step import LossFn
from train.tasks.evaluation import EvaluatedModel, EvaluationOptions, mean_losses, perplexity
from train.tasks.task import (
    GENERATION_OPTIONS,
    SampleOptions,
    TaskConfig,
    TrainedModel,
    check_no_encoder,
)
from train.tasks.text_completion import complete_texts, encode_prompt
from train.tasks.text_task import TextTask
from train.tasks.vocabulary import Labels
from transformer.hardware import Hardware
from transformer.losses import next_token_loss
from transformer.model_context import ActivationConstraint
from transformer.models.config import TransformerConfig
from transformer.models.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class LanguageModeling(TaskConfig):
    """Causal language modeling: predict the next token."""

    data_configs = (TextDataConfig,)
    reports_bits_per_byte = True

    def check(self, model: TransformerConfig) -> None:
        check_no_encoder(self, model)


@dataclasses.dataclass(frozen=True)
class LanguageModelTask(TextTask):
    """Causal language modeling."""

    continues_prompt = True

    @property
    def supported_options(self) -> tuple[str, ...]:
        return GENERATION_OPTIONS

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> Any:
        return prepare_any_text(self.data, tokenizer=tokenizer)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> LanguageModel:
        return LanguageModel(self.model_config, hardware, constrain)

    def make_loss_fn(self, model: LanguageModel) -> LossFn:
        """Return the cross entropy of the next tokens of a batch of windows."""
        return partial(next_token_loss, model, has_segments=self.data.document_masking)

    def evaluate_source(
        self, model: EvaluatedModel, corpus: TextCorpus, split: str, options: EvaluationOptions
    ) -> dict[str, float]:
        """Return the loss, in nats a token, the perplexity, and the bits per byte of the text.

        With `options.compression_baselines`, a final evaluation also reports the bits per byte that
        general-purpose compressors need for the same text.
        """
        stream = corpus.split(split)
        loss = mean_losses(model, self.evaluation_batches(corpus, split, options))["loss"]
        metrics = {"loss": loss, "perplexity": perplexity(loss)}
        if stream.num_bytes:  # not for token arrays without a text
            # bits/byte = nats/token * tokens/byte / ln 2, with the bytes of the unnormalized text.
            bits_per_nat = stream.num_scored_targets / stream.num_bytes / math.log(2)
            metrics["bits_per_byte"] = loss * bits_per_nat
        if options.is_final and options.compression_baselines:
            baselines = corpus.compressed_bits_per_byte(split)
            metrics |= {f"bits_per_byte_{name.split()[0]}": x for name, x in baselines.items()}
        return metrics

    def sample(
        self, trained: TrainedModel, prompts: Sequence[str], options: SampleOptions
    ) -> list[str]:
        """Return the continuation of each prompt."""
        return complete_texts(trained, [encode_prompt(trained, each) for each in prompts], options)
