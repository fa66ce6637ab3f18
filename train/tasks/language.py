"""Language modelling: the next token of every token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from train.data import Batches, Corpus, Tokenizer, evaluation_batches, prepare
from train.data.config import DataConfig
from train.experiment import Experiment
from train.labels import Labels
from train.step import Batch, LossFunction
from train.tasks.continuation import continue_texts
from train.tasks.losses import auxiliary, wanted, word_loss
from train.tasks.measuring import fitting, limit, means
from train.tasks.task import Metric, SampleOptions, Show, Task
from train.tasks.vocabulary import with_vocabulary
from transformer.hardware import Hardware
from transformer.language_model import LanguageModel
from transformer.losses import Loss
from transformer.shared import Constrain

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run


@dataclasses.dataclass(frozen=True)
class LanguageTask(Task):
    """A causal model of text, judged by its loss."""

    experiment: Experiment

    @property
    def data(self) -> DataConfig:
        return self.experiment.text

    @property
    def continues(self) -> bool:
        return True

    @property
    def heeded(self) -> tuple[str, ...]:
        return "max_new_tokens", "temperature", "top_k", "top_p", "seed"

    def metric(self, corpus: Corpus) -> Metric:
        return Metric("loss", lower_is_better=True)

    def prepare(self, tokenizer: Tokenizer | None = None, labels: Labels | None = None) -> Corpus:
        return prepare(self.data, tokenizer=tokenizer)

    def resolved(self, corpus: Corpus) -> Experiment:
        return with_vocabulary(self.experiment, corpus.tokenizer)

    def model(self, hardware: Hardware, constrain: Constrain) -> LanguageModel:
        return LanguageModel(self.experiment.model, hardware, constrain)

    def loss(self, model: LanguageModel) -> LossFunction:
        """The cross entropy of a batch of windows.

        A batch has `tokens`, `targets` and `weights` [B, T], and where documents are kept apart
        `segments` and `positions` [B, T].
        """
        segments = self.data.segments
        spread = model.constrain.parts("length") > 1  # then tokens do not lie in order

        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            output = model.apply(
                {"params": params},
                batch["tokens"],
                positions=batch["positions"] if segments or spread else None,
                segments=batch["segments"] if segments else None,
                dropout_rngs=dropout_rngs,
                outputs=wanted(dropout_rngs),
            )
            found = word_loss(model, params, output.hidden, batch)
            return {**found, **auxiliary(output.aux, found["loss"].weight)}

        return loss

    def batches(self, corpus: Corpus) -> Batches:
        return Batches(
            corpus.split("train"),
            batch_size=self.experiment.batch_size,
            sequence_length=self.data.sequence_length,
            seed=self.experiment.seed,
            segments=self.data.segments,
        )

    def amount(self, corpus: Corpus) -> str:
        return f"{len(corpus.split('train').tokens):,} tokens of text"

    def evaluate(
        self, engine: Engine, params: Any, corpus: Corpus, split: str, *, whole: bool
    ) -> dict[str, float]:
        """Loss in nats a token, perplexity, and bits per byte of the text.

        With `evaluation.compressors`, at the end what compressors make of the same text too.
        """
        settings, stream = self.experiment.evaluation, corpus.split(split)
        batches = evaluation_batches(
            stream,
            batch_size=fitting(settings.batch_size or self.experiment.batch_size, engine.mesh),
            sequence_length=self.data.sequence_length,
            stride=settings.stride or None,
            segments=self.data.segments,
            limit=limit(settings, whole),
        )
        loss = means(engine, params, batches)["loss"]
        bits_per_nat = stream.targets / stream.bytes / math.log(2)
        metrics = {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": loss * bits_per_nat,
        }
        if whole and settings.compressors:
            needed = corpus.compressed_bits_per_byte(split)
            metrics |= {f"bits_per_byte_{name.split()[0]}": x for name, x in needed.items()}
        return metrics

    def check_prompt(self, prompt: str, tokenizer: Tokenizer) -> None:
        tokenizer.encode(prompt)

    def sample(
        self, run: Run, prompts: Sequence[str], options: SampleOptions, show: Show | None = None
    ) -> list[str]:
        return continue_texts(
            run,
            prompts,
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling,
            seed=options.seed,
            stream=show,
        )
