"""Causal language modeling: predict the next token."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from train.data.corpus import TextCorpus
from train.data.mixed_corpora import prepare_any_text
from train.data.tokenizer import Tokenizer
from train.evaluation.metrics import mean_losses, perplexity
from train.step import LossFn
from train.tasks.task import SampleOptions, TextCallback
from train.tasks.text_completion import complete_texts
from train.tasks.text_task import AnyTextCorpus, TextBatches, TextTask
from train.tasks.vocabulary import Labels
from transformer.hardware import Hardware
from transformer.losses import next_token_loss
from transformer.model_context import ActivationConstraint
from transformer.models.language_model import LanguageModel

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run


@dataclasses.dataclass(frozen=True)
class LanguageModelTask(TextTask):
    """Causal language modeling."""

    @property
    def continues_prompt(self) -> bool:
        return True

    @property
    def supported_options(self) -> tuple[str, ...]:
        return "max_new_tokens", "temperature", "top_k", "top_p", "seed"

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> Any:
        return prepare_any_text(self.data, tokenizer=tokenizer)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> LanguageModel:
        return LanguageModel(self.experiment.model, hardware, constrain)

    def make_loss_fn(self, model: LanguageModel) -> LossFn:
        """Return the cross entropy of the next tokens of a batch of windows."""
        return partial(next_token_loss, model, has_segments=self.data.document_masking)

    def training_batches(self, corpus: AnyTextCorpus) -> TextBatches:
        return self.training_windows(corpus)

    def evaluate_source(
        self, engine: "Engine", params: Any, corpus: TextCorpus, split: str, *, full_split: bool
    ) -> dict[str, float]:
        """Return the loss, in nats a token, the perplexity, and the bits per byte of the text.

        With `evaluation.compression_baselines`, a full split also reports the bits per byte that
        general-purpose compressors need for the same text.
        """
        config, stream = self.experiment.evaluation, corpus.split(split)
        batches = self.evaluation_windows(
            corpus, split, engine.mesh, full_split=full_split, stride=config.stride
        )
        loss = mean_losses(engine, params, batches)["loss"]
        metrics = {"loss": loss, "perplexity": perplexity(loss)}
        if stream.num_bytes:  # not for token arrays without a text
            # bits/byte = nats/token * tokens/byte / ln 2, with the bytes of the unnormalized text.
            bits_per_nat = stream.num_scored_targets / stream.num_bytes / math.log(2)
            metrics["bits_per_byte"] = loss * bits_per_nat
        if full_split and config.compression_baselines:
            baselines = corpus.compressed_bits_per_byte(split)
            metrics |= {f"bits_per_byte_{name.split()[0]}": x for name, x in baselines.items()}
        return metrics

    def sample(
        self,
        run: "Run",
        prompts: Sequence[str],
        options: SampleOptions,
        on_text: TextCallback | None = None,
    ) -> list[str]:
        """Return the continuation of each prompt."""
        return complete_texts(
            run,
            prompts,
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling,
            seed=options.seed,
            on_text=on_text,
        )
