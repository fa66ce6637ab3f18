"""Causal language modeling: predict the next token."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from train.data.batches import TextTrainingBatches, make_text_evaluation_batches
from train.data.config import TextDataConfig
from train.data.corpus import TextCorpus, prepare_text
from train.data.tokenizer import Tokenizer
from train.experiment import Experiment
from train.step import Batch, LossFn
from train.tasks.base import Metric, SampleOptions, Task, TextCallback, token_batch_shapes
from train.tasks.evaluation import max_eval_batches, mean_losses, perplexity, round_up_batch_size
from train.tasks.losses import auxiliary_losses, requested_outputs, token_loss
from train.tasks.text_completion import complete_texts
from train.tasks.vocabulary import Labels, resolve_vocab_size
from transformer.context import ActivationConstraint
from transformer.hardware import Hardware
from transformer.losses import Loss
from transformer.models.language_model import LanguageModel

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run


@dataclasses.dataclass(frozen=True)
class LanguageModelTask(Task):
    """Causal language modeling. The best checkpoint is the one with the lowest loss."""

    experiment: Experiment

    @property
    def data(self) -> TextDataConfig:
        return self.experiment.text_data

    @property
    def continues_prompt(self) -> bool:
        return True

    @property
    def supported_options(self) -> tuple[str, ...]:
        return "max_new_tokens", "temperature", "top_k", "top_p", "seed"

    def selection_metric(self, corpus: TextCorpus) -> Metric:
        return Metric("loss", lower_is_better=True)

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> TextCorpus:
        return prepare_text(self.data, tokenizer=tokenizer)

    def resolve_experiment(self, corpus: TextCorpus) -> Experiment:
        return resolve_vocab_size(self.experiment, corpus.tokenizer)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> LanguageModel:
        return LanguageModel(self.experiment.model, hardware, constrain)

    def make_loss_fn(self, model: LanguageModel) -> LossFn:
        """Return the cross entropy of the next tokens of a batch of windows.

        A batch has `tokens`, `targets` and `weights` [B, T], and with document masking `segments`
        and `positions` [B, T].
        """
        segments = self.data.document_masking
        # Under context parallelism a device's tokens are not contiguous: pass their positions.
        context_parallel = model.constrain.num_shards("length") > 1

        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            output = model.apply(
                {"params": params},
                batch["tokens"],
                positions=batch["positions"] if segments or context_parallel else None,
                segments=batch["segments"] if segments else None,
                dropout_rngs=dropout_rngs,
                outputs=requested_outputs(dropout_rngs),
            )
            losses = token_loss(model, params, output.hidden, batch)
            return {**losses, **auxiliary_losses(output.aux, losses["loss"].weight)}

        return loss

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_batch_shapes(batch_size, length)

    def training_batches(self, corpus: TextCorpus) -> TextTrainingBatches:
        return TextTrainingBatches(
            corpus.split("train"),
            batch_size=self.experiment.batch_size,
            sequence_length=self.data.sequence_length,
            seed=self.experiment.seed,
            document_masking=self.data.document_masking,
        )

    def describe_training_data(self, corpus: TextCorpus) -> str:
        return f"{len(corpus.split('train').tokens):,} tokens of text"

    def evaluate(
        self, engine: "Engine", params: Any, corpus: TextCorpus, split: str, *, full_split: bool
    ) -> dict[str, float]:
        """Return the loss, in nats a token, the perplexity, and the bits per byte of the text.

        With `evaluation.compression_baselines`, a full split also reports the bits per byte that
        general-purpose compressors need for the same text.
        """
        config, stream = self.experiment.evaluation, corpus.split(split)
        batch_size = config.batch_size or self.experiment.batch_size
        batches = make_text_evaluation_batches(
            stream,
            batch_size=round_up_batch_size(batch_size, engine.mesh),
            sequence_length=self.data.sequence_length,
            stride=config.stride or None,
            document_masking=self.data.document_masking,
            max_batches=max_eval_batches(config, full_split),
        )
        loss = mean_losses(engine, params, batches)["loss"]
        # bits/byte = nats/token * tokens/byte / ln 2, with the bytes of the unnormalized text.
        bits_per_nat = stream.num_targets / stream.num_bytes / math.log(2)
        metrics = {
            "loss": loss,
            "perplexity": perplexity(loss),
            "bits_per_byte": loss * bits_per_nat,
        }
        if full_split and config.compression_baselines:
            baselines = corpus.compressed_bits_per_byte(split)
            metrics |= {f"bits_per_byte_{name.split()[0]}": x for name, x in baselines.items()}
        return metrics

    def check_prompt(self, prompt: str, tokenizer: Tokenizer) -> None:
        tokenizer.encode(prompt)

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
