"""Translation: the text in another language (Vaswani et al. 2017)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from train.data.bitext import BitextSplit, decode_sentence, encode_sentences, prepare_bitext
from train.data.buckets import Bucket, bucket_by_rows, bucket_by_tokens
from train.data.example_configs import BitextDataConfig
from train.data.examples import ExampleCorpus, ExampleEvaluationBatches, ExampleTrainingBatches
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.evaluation.metrics import sacre_bleu, tokenized_bleu
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
from train.tasks.config import Translation
from train.tasks.losses import auxiliary_losses, requested_outputs, token_loss
from train.tasks.vocabulary import Labels, resolve_vocab_size
from transformer.baselines.nonautoregressive import NonAutoregressive, translate_nonautoregressive
from transformer.context import ActivationConstraint
from transformer.generation.beam_search import BeamSearchConfig
from transformer.generation.translate import translate
from transformer.hardware import Hardware
from transformer.losses import Loss
from transformer.models.encoder_decoder import EncoderDecoder

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run

Corpus = ExampleCorpus[BitextSplit]


Translator = EncoderDecoder | NonAutoregressive


@dataclasses.dataclass(frozen=True)
class TranslationTask(Task):
    """An encoder-decoder of sentences, judged by its loss on the way and scored by BLEU."""

    experiment: Experiment

    @property
    def data(self) -> BitextDataConfig:
        assert isinstance(self.experiment.data, BitextDataConfig)  # as the experiment has checked
        return self.experiment.data

    @property
    def task_config(self) -> Translation:
        assert isinstance(self.experiment.task, Translation)
        return self.experiment.task

    @property
    def supported_options(self) -> tuple[str, ...]:
        """Whoever writes all words at once does not search."""
        return ("beams",) if self.experiment.model.causal else ()

    @property
    def metric_notes(self) -> dict[str, str]:
        return {"bleu_signature": sacre_bleu(["a"], ["a"]).signature}

    def selection_metric(self, corpus: Corpus) -> Metric:
        if self.task_config.compute_bleu == "always":
            return Metric("bleu", lower_is_better=False)
        return Metric("loss", lower_is_better=True)

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> Corpus:
        return prepare_bitext(self.data, tokenizer)

    def resolve_experiment(self, corpus: Corpus) -> Experiment:
        return resolve_vocab_size(self.experiment, corpus.tokenizer)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> Translator:
        """Word by word, or without `model.causal` all words at once."""
        config = self.experiment.model
        kind = EncoderDecoder if config.causal else NonAutoregressive
        return kind(config, hardware, constrain)

    def make_loss_fn(self, model: Translator) -> LossFn:
        """The cross entropy of the target's words; smoothed in training alone.

        A batch has `source` and `source_segments` [B, S], and `tokens`, `segments`, `targets` and
        `weights` [B, T].
        """
        smoothing = self.task_config.label_smoothing

        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            output = model.apply(
                {"params": params},
                batch["source"],
                batch["tokens"],
                source_segments=batch["source_segments"],
                segments=batch["segments"],
                dropout_rngs=dropout_rngs,
                outputs=requested_outputs(dropout_rngs),
            )
            share = 0.0 if dropout_rngs is None else smoothing
            found = token_loss(model, params, output.hidden, batch, label_smoothing=share)
            return {**found, **auxiliary_losses(output.aux, found["loss"].weight)}

        return loss

    def make_buckets(
        self, pairs: BitextSplit, batch_size: int, batch_size_multiple: int
    ) -> tuple[Bucket, ...]:
        """Return pairs by length, in batches of `batch_size`, or of data.batch_tokens."""
        most = self.data.max_buckets
        if not self.data.batch_tokens:
            return bucket_by_rows(pairs.lengths, batch_size=batch_size, max_buckets=most)
        return bucket_by_tokens(
            pairs.lengths,
            batch_tokens=self.data.batch_tokens,
            batch_size=batch_size,
            batch_size_multiple=batch_size_multiple,
            max_buckets=most,
        )

    def training_batches(self, corpus: Corpus) -> ExampleTrainingBatches:
        split = corpus.split("train")
        buckets = self.make_buckets(
            split, self.experiment.batch_size, self.data.batch_size_multiple
        )
        return ExampleTrainingBatches(split, buckets, seed=self.experiment.seed)

    def describe_training_data(self, corpus: Corpus) -> str:
        return f"{len(corpus.split('train').pairs):,} pairs of sentences"

    def evaluate(
        self, engine: Engine, params: Any, corpus: Corpus, split: str, *, full_split: bool
    ) -> dict[str, float]:
        """Loss in nats a token of the target, perplexity, and at the end BLEU twice.

        `compute_bleu` is sacreBLEU's, in lower case; `tokenised_bleu` that of Moses tokens in lower case.
        """
        settings, pairs = self.experiment.evaluation, corpus.split(split)
        rows = round_up_batch_size(settings.batch_size or self.experiment.batch_size, engine.mesh)
        buckets = self.make_buckets(pairs, rows, round_up_batch_size(1, engine.mesh))
        batches = ExampleEvaluationBatches(
            pairs, buckets, max_batches=max_eval_batches(settings, full_split)
        )
        loss = mean_losses(engine, params, batches)["loss"]
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        if full_split or self.task_config.compute_bleu == "always":
            metrics |= self.bleu_scores(engine, params, corpus, pairs, example_indices(batches))
        return metrics

    def bleu_scores(
        self,
        engine: Engine,
        params: Any,
        corpus: Corpus,
        pairs: BitextSplit,
        indices: Sequence[int],
    ) -> dict[str, float]:
        """BLEU of the translations of some pairs' sources."""
        sources = [pairs.source[number] for number in indices]
        found = self.translate_sources(engine.model, params, corpus.tokenizer, sources)
        references = [pairs.pairs[number].target for number in indices]
        return {
            "bleu": sacre_bleu(found, references).score,
            "tokenised_bleu": tokenized_bleu(found, references, self.data.target_lang).score,
        }

    def check_prompt(self, prompt: str, tokenizer: Tokenizer) -> None:
        [source] = encode_sentences(tokenizer, [prompt])
        if len(source) > self.data.max_length:
            raise UserError(
                f"prompt: has {len(source)} tokens and the model reads {self.data.max_length}; "
                "shorten it"
            )

    def sample(
        self,
        run: Run,
        prompts: Sequence[str],
        options: SampleOptions,
        on_text: TextCallback | None = None,
    ) -> list[str]:
        """The translation of each prompt."""
        for prompt in prompts:
            self.check_prompt(prompt, run.tokenizer)
        sources = encode_sentences(run.tokenizer, prompts)
        found = self.translate_sources(
            run.model, run.params, run.tokenizer, sources, options.num_beams
        )
        if on_text is not None:
            on_text("".join(found))
        return found

    def translate_sources(
        self,
        model: Any,
        params: Any,
        tokenizer: Tokenizer,
        sources: Sequence[np.ndarray],  # each [S]
        num_beams: int = 0,
    ) -> list[str]:
        settings, end = self.task_config, tokenizer.eos_token_id
        if isinstance(model, NonAutoregressive):
            written = translate_nonautoregressive(model, params, sources, stop=end)
        else:
            written = translate(
                model,
                params,
                sources,
                start_token=end,
                stop_token=end,
                beam_search_config=BeamSearchConfig(
                    num_beams or settings.num_beams, settings.length_penalty
                ),
                extra_length=settings.extra_length,
            ).tokens
        return [decode_sentence(tokenizer, np.array(tokens, np.int32)) for tokens in written]


def example_indices(batches: ExampleEvaluationBatches) -> list[int]:
    """The numbers of the examples of some batches, in order."""
    found: list[int] = []
    for cursor in range(len(batches)):
        rows = batches.host_batch(cursor, 0, 1)
        found += rows["examples"][rows["weights"].any(axis=1)].tolist()
    return sorted(found)
