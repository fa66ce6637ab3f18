"""Translation: predict the target sentence of a source sentence (Vaswani et al. 2017)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from train.data.bitext import (
    BitextDataConfig,
    BitextSplit,
    SentenceFrame,
    decode_sentence,
    encode_sentences,
    prepare_bitext,
    sentence_ends,
    source_frame,
    target_frame,
)
from train.data.buckets import Bucket, bucket_by_tokens
from train.data.examples import ExampleCorpus, ExampleEvaluationBatches, Examples
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError
from train.runtime.stages import stage
from train.step import Batch, LossFn
from train.tasks.evaluation import EvaluatedModel, EvaluationOptions, mean_losses, perplexity
from train.tasks.example_task import ExampleTask
from train.tasks.metrics import sacre_bleu, tokenized_bleu
from train.tasks.task import (
    Metric,
    ModelInputs,
    SampleOptions,
    TaskConfig,
    TrainedModel,
    tokenizer_of,
)
from train.tasks.vocabulary import Labels
from transformer.attention.mixer import mixer_class
from transformer.baselines.nonautoregressive import NonAutoregressive, translate_nonautoregressive
from transformer.generation.beam_search import BeamSearchConfig
from transformer.generation.translate import translate
from transformer.hardware import Hardware
from transformer.losses import Loss, auxiliary_losses, requested_outputs, token_loss
from transformer.model_context import ActivationConstraint
from transformer.models.config import TransformerConfig
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.validation import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt

Corpus = ExampleCorpus[BitextSplit]
Translator = EncoderDecoder | NonAutoregressive


@dataclasses.dataclass(frozen=True)
class Translation(TaskConfig):
    """Translation: predict the target sentence of a source sentence."""

    data_configs = (BitextDataConfig,)

    label_smoothing: Fraction = 0.1
    """Probability mass spread evenly over the vocabulary (Vaswani et al. 2017, section 5.4)."""
    num_beams: PositiveInt = 5
    """Hypotheses kept at each step of beam search. 1: greedy decoding."""
    length_penalty: NonNegativeFloat = 0.6
    """Exponent a: hypotheses of n tokens score log p / ((5 + n) / 6)^a (Wu et al. 2016, 7)."""
    extra_length: NonNegativeInt = 50
    """Longest translation, in tokens beyond the length of its source."""
    start_token: str = ""
    """Token that the decoder reads first. Empty: that of an imported model's files, such as the
    `<pad>` of T5 and Marian, or else the one that separates documents."""
    source_language: str = ""
    """Code of the source language (en_XX, eng_Latn), where the tokenizer has tokens for languages.
    Empty: the one that the tokenizer's files put around a text."""
    target_language: str = ""
    """Code of the language to translate into, likewise. Empty: the one that an imported model's
    files name as `forced_bos_token_id` or as the decoder's first token, if any."""
    compute_bleu: Literal["end", "always"] = "end"
    """Evaluations that translate and compute BLEU: only the one at the end of a run, or every one.
    The others report the loss alone."""

    def check(self, model: TransformerConfig) -> None:
        if model.encoder is None:
            raise UsageError(
                f"model.encoder: is missing for task {type(self).__name__}; give an EncoderConfig"
            )


@dataclasses.dataclass(frozen=True)
class TranslationTask(ExampleTask):
    """Translation of sentences, scored by BLEU. The best checkpoint has the lowest loss.

    With `task.compute_bleu` "always", the best checkpoint has the highest BLEU.
    """

    config: Translation
    data: BitextDataConfig

    @property
    def supported_options(self) -> tuple[str, ...]:
        """Beam search applies to autoregressive models alone."""
        languages = ("source_language", "target_language")
        return ("beams", *languages) if self.model_config.causal else ()

    @property
    def metric_notes(self) -> dict[str, str]:
        return {"bleu_signature": sacre_bleu(["a"], ["a"]).signature}

    def selection_metric(self, corpus: Corpus) -> Metric:
        if self.config.compute_bleu == "always":
            return Metric("bleu", lower_is_better=False)
        return Metric("loss", lower_is_better=True)

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> Corpus:
        config = self.config
        return prepare_bitext(
            self.data,
            tokenizer,
            config.start_token,
            config.source_language,
            config.target_language,
        )

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> Translator:
        """Return an autoregressive model, or without `model.causal` a non-autoregressive one.

        Raises:
          ValueError: Beam search could not decode from a mixer of the decoder.
        """
        config = self.model_config
        if not config.causal:
            return NonAutoregressive(config, hardware, constrain)
        for mixer in {block.mixer for block in config.layer_pattern}:
            if not mixer_class(mixer).abilities(mixer).cached:
                raise ValueError(
                    f"mixer {mixer.kind}: has no cache, and translations are decoded from one; "
                    "choose another mixer for the decoder"
                )
        return EncoderDecoder(config, hardware, constrain)

    def make_loss_fn(self, model: Translator) -> LossFn:
        """Return the cross entropy of the target's tokens. Labels are smoothed in training alone.

        A batch has `source` and `source_segments` [B, S], and `tokens`, `segments`, `targets` and
        `weights` [B, T].
        """
        smoothing = self.config.label_smoothing

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
            label_smoothing = 0.0 if dropout_rngs is None else smoothing
            losses = token_loss(
                model, params, output.hidden, batch, label_smoothing=label_smoothing
            )
            return {**losses, **auxiliary_losses(output.aux, losses["loss"].weight)}

        return loss

    def make_buckets(
        self, examples: Examples, batch_size: int, row_multiple: int
    ) -> tuple[Bucket, ...]:
        """Return buckets by length, with batches of `batch_size` rows or of data.batch_tokens."""
        if not self.data.batch_tokens:
            return super().make_buckets(examples, batch_size, row_multiple)
        return bucket_by_tokens(
            examples.lengths,
            batch_tokens=self.data.batch_tokens,
            batch_size=batch_size,
            batch_size_multiple=row_multiple,
            max_buckets=self.data.max_buckets,
        )

    def describe_training_data(self, corpus: Corpus) -> str:
        return f"{len(corpus.split('train').pairs):,} pairs of sentences"

    def evaluate(
        self, model: EvaluatedModel, corpus: Corpus, split: str, options: EvaluationOptions
    ) -> dict[str, float]:
        """Return the loss, in nats a target token, the perplexity, and at the end of a run BLEU.

        `bleu` is sacreBLEU's, lowercase; `tokenised_bleu` is that of Moses tokens, lowercase.
        """
        batches = self.evaluation_batches(corpus, split, options)
        loss = mean_losses(model, batches)["loss"]
        metrics = {"loss": loss, "perplexity": perplexity(loss)}
        if options.is_final or self.config.compute_bleu == "always":
            metrics |= self.bleu_scores(model, corpus, split, example_indices(batches))
        return metrics

    def bleu_scores(
        self, model: EvaluatedModel, corpus: Corpus, split: str, indices: Sequence[int]
    ) -> dict[str, float]:
        """Translate the sources of some pairs and return the BLEU of the translations."""
        pairs = corpus.split(split)
        sources = [pairs.source[index] for index in indices]
        with stage(f"translating {len(sources):,} sentences for BLEU"):
            translations = self.translate_sources(
                model.model, model.params, corpus.tokenizer, sources
            )
        references = [pairs.pairs[index].target for index in indices]
        tokenized = tokenized_bleu(translations, references, self.data.target_lang)
        return {
            "bleu": sacre_bleu(translations, references).score,
            "tokenised_bleu": tokenized.score,
        }

    def check_prompt(self, prompt: str, tokenizer: Tokenizer) -> None:
        [source] = encode_sentences(tokenizer, [prompt])
        if len(source) > self.data.max_length:
            raise UserError(
                f"prompt: has {len(source)} tokens and the model reads {self.data.max_length}; "
                "shorten it"
            )

    def source_frame(self, tokenizer: Tokenizer) -> SentenceFrame:
        """Return the tokens around a source."""
        return source_frame(tokenizer, self.config.source_language)

    def target_frame(self, tokenizer: Tokenizer) -> SentenceFrame:
        """Return the tokens around a translation."""
        return target_frame(tokenizer, self.config.start_token, self.config.target_language)

    def model_inputs(
        self, trained: TrainedModel, text: str, target: str | None = None
    ) -> ModelInputs:
        """Return the tokens of a source, and those that the decoder reads for its translation."""
        tokenizer = tokenizer_of(trained)
        self.check_prompt(text, tokenizer)
        [source] = encode_sentences(tokenizer, [text], self.source_frame(tokenizer))
        if target is None:
            target = self.translate_sources(trained.model, trained.params, tokenizer, [source])[0]
        frame = self.target_frame(tokenizer)
        [written] = encode_sentences(tokenizer, [target], frame)
        tokens = np.append(frame.start, written[:-1]).astype(
            np.int32
        )  # shifted by one, as in training
        arguments = {"source": source[None], "tokens": tokens[None]}
        return ModelInputs(arguments, tuple(source.tolist()))

    def sample(
        self, trained: TrainedModel, prompts: Sequence[str], options: SampleOptions
    ) -> list[str]:
        """Return the translation of each prompt."""
        tokenizer = tokenizer_of(trained)
        for prompt in prompts:
            self.check_prompt(prompt, tokenizer)
        config = dataclasses.replace(
            self.config,
            source_language=options.source_language or self.config.source_language,
            target_language=options.target_language or self.config.target_language,
        )
        task = dataclasses.replace(self, config=config)
        sources = encode_sentences(tokenizer, prompts, task.source_frame(tokenizer))
        translations = task.translate_sources(
            trained.model, trained.params, tokenizer, sources, options.num_beams
        )
        if options.on_text is not None:
            options.on_text("".join(translations))
        return translations

    def translate_sources(
        self,
        model: Any,
        params: Any,
        tokenizer: Tokenizer,
        sources: Sequence[np.ndarray],  # each [S]
        num_beams: int = 0,
    ) -> list[str]:
        """Return the translations of tokenized sources, by beam search of `num_beams`.

        0 beams: as many as the settings say. A non-autoregressive model does not search.
        """
        config, ends = self.config, sentence_ends(tokenizer)
        if isinstance(model, NonAutoregressive):
            tokens = translate_nonautoregressive(model, params, sources, stop=ends)
        else:
            beam_search = BeamSearchConfig(num_beams or config.num_beams, config.length_penalty)
            frame = self.target_frame(tokenizer)
            tokens = translate(
                model,
                params,
                sources,
                start_token=frame.start,
                first_token=frame.forced,
                stop_token=ends,
                beam_search_config=beam_search,
                extra_length=config.extra_length,
            ).tokens
        return [decode_sentence(tokenizer, np.array(each, np.int32)) for each in tokens]


def example_indices(batches: ExampleEvaluationBatches) -> list[int]:
    """Return the indices of the examples of some batches, in ascending order."""
    indices: list[int] = []
    for cursor in range(len(batches)):
        rows = batches.host_batch(cursor, 0, 1)
        # A row that only fills up a batch has no weight.
        indices += rows["examples"][rows["weights"].any(axis=1)].tolist()
    return sorted(indices)
