"""Translation: the text in another language (Vaswani et al. 2017)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from train.data.buckets import Bucket, buckets_by_rows, buckets_by_tokens
from train.data.example_batches import HeldOutBatches, TrainingBatches
from train.data.example_corpus import ExampleCorpus
from train.data.parallel import (
    ParallelSplit,
    decode_sentence,
    encode_sentences,
    prepare_parallel,
)
from train.data.parallel_config import ParallelDataConfig
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.experiment import Experiment
from train.labels import Labels
from train.scores.bleu import sacre_bleu, tokenised_bleu
from train.step import Batch, LossFunction
from train.tasks.config import Translation
from train.tasks.losses import auxiliary, wanted, word_loss
from train.tasks.measuring import fitting, limit, means
from train.tasks.task import Metric, SampleOptions, Show, Task
from train.tasks.vocabulary import with_vocabulary
from transformer.beam_search import BeamConfig
from transformer.encoder_decoder import EncoderDecoder
from transformer.hardware import Hardware
from transformer.losses import Loss
from transformer.nonautoregressive import NonAutoregressive
from transformer.parallel_translation import translate_at_once
from transformer.shared import Constrain
from transformer.translation import translate

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run

Corpus = ExampleCorpus[ParallelSplit]
Translator = EncoderDecoder | NonAutoregressive


@dataclasses.dataclass(frozen=True)
class TranslationTask(Task):
    """An encoder-decoder of sentences, judged by its loss on the way and scored by BLEU."""

    experiment: Experiment

    @property
    def data(self) -> ParallelDataConfig:
        assert isinstance(self.experiment.data, ParallelDataConfig)  # as the experiment has checked
        return self.experiment.data

    @property
    def settings(self) -> Translation:
        assert isinstance(self.experiment.task, Translation)
        return self.experiment.task

    @property
    def heeded(self) -> tuple[str, ...]:
        """Whoever writes all words at once does not search."""
        return ("beams",) if self.experiment.model.causal else ()

    @property
    def quoted(self) -> dict[str, str]:
        return {"bleu_signature": sacre_bleu(["a"], ["a"]).signature}

    def metric(self, corpus: Corpus) -> Metric:
        if self.settings.bleu == "always":
            return Metric("bleu", lower_is_better=False)
        return Metric("loss", lower_is_better=True)

    def prepare(self, tokenizer: Tokenizer | None = None, labels: Labels | None = None) -> Corpus:
        return prepare_parallel(self.data, tokenizer)

    def resolved(self, corpus: Corpus) -> Experiment:
        return with_vocabulary(self.experiment, corpus.tokenizer)

    def model(self, hardware: Hardware, constrain: Constrain) -> Translator:
        """Word by word, or without `model.causal` all words at once."""
        config = self.experiment.model
        kind = EncoderDecoder if config.causal else NonAutoregressive
        return kind(config, hardware, constrain)

    def loss(self, model: Translator) -> LossFunction:
        """The cross entropy of the target's words; smoothed in training alone.

        A batch has `source` and `source_segments` [B, S], and `tokens`, `segments`, `targets` and
        `weights` [B, T].
        """
        smoothing = self.settings.label_smoothing

        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            output = model.apply(
                {"params": params},
                batch["source"],
                batch["tokens"],
                source_segments=batch["source_segments"],
                segments=batch["segments"],
                dropout_rngs=dropout_rngs,
                outputs=wanted(dropout_rngs),
            )
            share = 0.0 if dropout_rngs is None else smoothing
            found = word_loss(model, params, output.hidden, batch, smoothing=share)
            return {**found, **auxiliary(output.aux, found["loss"].weight)}

        return loss

    def buckets(self, pairs: ParallelSplit, batch_size: int, multiple: int) -> tuple[Bucket, ...]:
        """Return pairs by length, in batches of `batch_size`, or of data.batch_tokens."""
        most = self.data.shapes
        if not self.data.batch_tokens:
            return buckets_by_rows(pairs.lengths, batch_size=batch_size, most=most)
        return buckets_by_tokens(
            pairs.lengths,
            batch_tokens=self.data.batch_tokens,
            batch_size=batch_size,
            row_multiple=multiple,
            most=most,
        )

    def batches(self, corpus: Corpus) -> TrainingBatches:
        split = corpus.split("train")
        buckets = self.buckets(split, self.experiment.batch_size, self.data.row_multiple)
        return TrainingBatches(split, buckets, seed=self.experiment.seed)

    def amount(self, corpus: Corpus) -> str:
        return f"{len(corpus.split('train').pairs):,} pairs of sentences"

    def evaluate(
        self, engine: Engine, params: Any, corpus: Corpus, split: str, *, whole: bool
    ) -> dict[str, float]:
        """Loss in nats a token of the target, perplexity, and at the end BLEU twice.

        `bleu` is sacreBLEU's, in lower case; `tokenised_bleu` that of Moses tokens in lower case.
        """
        settings, pairs = self.experiment.evaluation, corpus.split(split)
        rows = fitting(settings.batch_size or self.experiment.batch_size, engine.mesh)
        buckets = self.buckets(pairs, rows, fitting(1, engine.mesh))
        batches = HeldOutBatches(pairs, buckets, limit=limit(settings, whole))
        loss = means(engine, params, batches)["loss"]
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        if whole or self.settings.bleu == "always":
            metrics |= self.scores(engine, params, corpus, pairs, numbers_of(batches))
        return metrics

    def scores(
        self,
        engine: Engine,
        params: Any,
        corpus: Corpus,
        pairs: ParallelSplit,
        numbers: Sequence[int],
    ) -> dict[str, float]:
        """BLEU of the translations of some pairs' sources."""
        sources = [pairs.source[number] for number in numbers]
        found = self.translated(engine.model, params, corpus.tokenizer, sources)
        references = [pairs.pairs[number].target for number in numbers]
        return {
            "bleu": sacre_bleu(found, references).score,
            "tokenised_bleu": tokenised_bleu(found, references, self.data.target).score,
        }

    def check_prompt(self, prompt: str, tokenizer: Tokenizer) -> None:
        [source] = encode_sentences(tokenizer, [prompt])
        if len(source) > self.data.max_length:
            raise UserError(
                f"prompt: has {len(source)} tokens and the model reads {self.data.max_length}; "
                "shorten it"
            )

    def sample(
        self, run: Run, prompts: Sequence[str], options: SampleOptions, show: Show | None = None
    ) -> list[str]:
        """The translation of each prompt."""
        for prompt in prompts:
            self.check_prompt(prompt, run.tokenizer)
        sources = encode_sentences(run.tokenizer, prompts)
        found = self.translated(run.model, run.params, run.tokenizer, sources, options.beams)
        if show is not None:
            show("".join(found))
        return found

    def translated(
        self,
        model: Any,
        params: Any,
        tokenizer: Tokenizer,
        sources: Sequence[np.ndarray],  # each [S]
        beams: int = 0,
    ) -> list[str]:
        settings, end = self.settings, tokenizer.end_of_text
        if isinstance(model, NonAutoregressive):
            written = translate_at_once(model, params, sources, stop=end)
        else:
            written = translate(
                model,
                params,
                sources,
                begin=end,
                stop=end,
                beams=BeamConfig(beams or settings.beams, settings.length_penalty),
                extra=settings.extra_length,
            ).tokens
        return [decode_sentence(tokenizer, np.array(tokens, np.int32)) for tokens in written]


def numbers_of(batches: HeldOutBatches) -> list[int]:
    """The numbers of the examples of some batches, in order."""
    found: list[int] = []
    for cursor in range(len(batches)):
        rows = batches.host(cursor, 0, 1)
        found += rows["examples"][rows["weights"].any(axis=1)].tolist()
    return sorted(found)
