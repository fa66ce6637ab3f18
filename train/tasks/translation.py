"""Translation: predict the target sentence of a source sentence (Vaswani et al. 2017)."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from train.data.bitext import (
    BitextDataConfig,
    BitextSplit,
    decode_sentence,
    encode_sentences,
    find_start_token,
    prepare_bitext,
    sentence_ends,
)
from train.data.buckets import Bucket, bucket_by_rows, bucket_by_tokens
from train.data.examples import ExampleCorpus, ExampleEvaluationBatches, ExampleTrainingBatches
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.evaluation.metrics import (
    max_eval_batches,
    mean_losses,
    perplexity,
    round_up_batch_size,
    sacre_bleu,
    tokenized_bleu,
)
from train.experiment import Experiment
from train.runtime.stages import stage
from train.step import Batch, LossFn
from train.tasks.task import (
    Metric,
    ModelInputs,
    SampleOptions,
    Task,
    TextCallback,
    token_batch_shapes,
)
from train.tasks.task_configs import Translation
from train.tasks.vocabulary import Labels, resolve_vocab_size, tokenizer_of
from transformer.attention.mixer import mixer_class
from transformer.baselines.nonautoregressive import NonAutoregressive, translate_nonautoregressive
from transformer.generation.beam_search import BeamSearchConfig
from transformer.generation.translate import translate
from transformer.hardware import Hardware
from transformer.losses import Loss, auxiliary_losses, requested_outputs, token_loss
from transformer.model_context import ActivationConstraint
from transformer.models.encoder_decoder import EncoderDecoder

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run

Corpus = ExampleCorpus[BitextSplit]
Translator = EncoderDecoder | NonAutoregressive


@dataclasses.dataclass(frozen=True)
class TranslationTask(Task):
    """Translation of sentences, scored by BLEU. The best checkpoint has the lowest loss.

    With `task.compute_bleu` "always", the best checkpoint has the highest BLEU.
    """

    experiment: Experiment

    @property
    def data(self) -> BitextDataConfig:
        assert isinstance(self.experiment.data, BitextDataConfig)
        return self.experiment.data

    @property
    def task_config(self) -> Translation:
        assert isinstance(self.experiment.task, Translation)
        return self.experiment.task

    @property
    def supported_options(self) -> tuple[str, ...]:
        """Beam search applies to autoregressive models alone."""
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
        return prepare_bitext(self.data, tokenizer, self.task_config.start_token)

    def resolve_experiment(self, corpus: Corpus) -> Experiment:
        return resolve_vocab_size(self.experiment, corpus.tokenizer)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> Translator:
        """Return an autoregressive model, or without `model.causal` a non-autoregressive one.

        Raises:
          ValueError: Beam search could not decode from a mixer of the decoder.
        """
        config = self.experiment.model
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
            label_smoothing = 0.0 if dropout_rngs is None else smoothing
            losses = token_loss(
                model,
                params,
                output.hidden,
                batch,
                bias=params.get("output_bias"),
                label_smoothing=label_smoothing,
            )
            return {**losses, **auxiliary_losses(output.aux, losses["loss"].weight)}

        return loss

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_batch_shapes(batch_size, length)

    def make_buckets(
        self, pairs: BitextSplit, batch_size: int, batch_size_multiple: int
    ) -> tuple[Bucket, ...]:
        """Return buckets by length, with batches of `batch_size` rows or of data.batch_tokens."""
        max_buckets = self.data.max_buckets
        if not self.data.batch_tokens:
            return bucket_by_rows(pairs.lengths, batch_size=batch_size, max_buckets=max_buckets)
        return bucket_by_tokens(
            pairs.lengths,
            batch_tokens=self.data.batch_tokens,
            batch_size=batch_size,
            batch_size_multiple=batch_size_multiple,
            max_buckets=max_buckets,
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
        self, engine: "Engine", params: Any, corpus: Corpus, split: str, *, full_split: bool
    ) -> dict[str, float]:
        """Return the loss, in nats a target token, the perplexity, and for a full split BLEU.

        `bleu` is sacreBLEU's, lowercase; `tokenised_bleu` is that of Moses tokens, lowercase.
        """
        config, pairs = self.experiment.evaluation, corpus.split(split)
        batch_size = config.batch_size or self.experiment.batch_size
        buckets = self.make_buckets(
            pairs,
            round_up_batch_size(batch_size, engine.mesh),
            # Rows must divide among the devices; training has batch_size_multiple for that.
            round_up_batch_size(1, engine.mesh),
        )
        batches = ExampleEvaluationBatches(
            pairs, buckets, max_batches=max_eval_batches(config, full_split)
        )
        loss = mean_losses(engine, params, batches)["loss"]
        metrics = {"loss": loss, "perplexity": perplexity(loss)}
        if full_split or self.task_config.compute_bleu == "always":
            metrics |= self.bleu_scores(engine, params, corpus, pairs, example_indices(batches))
        return metrics

    def bleu_scores(
        self,
        engine: "Engine",
        params: Any,
        corpus: Corpus,
        pairs: BitextSplit,
        indices: Sequence[int],
    ) -> dict[str, float]:
        """Translate the sources of some pairs and return the BLEU of the translations."""
        sources = [pairs.source[index] for index in indices]
        with stage(f"translating {len(sources):,} sentences for BLEU"):
            translations = self.translate_sources(engine.model, params, corpus.tokenizer, sources)
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

    def model_inputs(self, run: "Run", text: str, target: str | None = None) -> ModelInputs:
        """Return the tokens of a source, and those that the decoder reads for its translation."""
        tokenizer = tokenizer_of(run)
        self.check_prompt(text, tokenizer)
        [source] = encode_sentences(tokenizer, [text])
        if target is None:
            target = self.translate_sources(run.model, run.params, tokenizer, [source])[0]
        [written] = encode_sentences(tokenizer, [target])
        start = find_start_token(tokenizer, self.task_config.start_token)
        tokens = np.append(start, written[:-1]).astype(np.int32)  # shifted by one, as in training
        arguments = {"source": source[None], "tokens": tokens[None]}
        return ModelInputs(arguments, tuple(source.tolist()))

    def sample(
        self,
        run: "Run",
        prompts: Sequence[str],
        options: SampleOptions,
        on_text: TextCallback | None = None,
    ) -> list[str]:
        """Return the translation of each prompt."""
        for prompt in prompts:
            self.check_prompt(prompt, tokenizer_of(run))
        sources = encode_sentences(tokenizer_of(run), prompts)
        translations = self.translate_sources(
            run.model, run.params, tokenizer_of(run), sources, options.num_beams
        )
        if on_text is not None:
            on_text("".join(translations))
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
        config, ends = self.task_config, sentence_ends(tokenizer)
        if isinstance(model, NonAutoregressive):
            tokens = translate_nonautoregressive(model, params, sources, stop=ends)
        else:
            beam_search = BeamSearchConfig(num_beams or config.num_beams, config.length_penalty)
            tokens = translate(
                model,
                params,
                sources,
                start_token=find_start_token(tokenizer, config.start_token),
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
