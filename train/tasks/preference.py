"""Direct preference optimization (DPO, Rafailov et al. 2023): prefer one answer to another.

With log-likelihoods of the chosen answer w and the rejected answer l under the trained model (pi)
and a fixed reference (ref), the loss of a pair is (equation 7)

    -log sigmoid(beta ((log pi(w) - log ref(w)) - (log pi(l) - log ref(l))))

The reference is the model without its LoRA adapter: the same frozen weights, and no second copy. Or
the pairs have its log-likelihoods, which `add_reference` computes before training and writes beside
them (`--task.reference data`): then all weights can be trained, and a step needs one forward pass
less.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from train.data.examples import ExampleCorpus
from train.data.preferences import PreferenceDataConfig, PreferenceSplit, prepare_preferences
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.step import Batch, LossFn
from train.tasks.evaluation import EvaluatedModel, EvaluationOptions, mean_losses
from train.tasks.example_task import ExampleTask
from train.tasks.instruction import answer_prompts
from train.tasks.task import (
    GENERATION_OPTIONS,
    SampleOptions,
    TaskConfig,
    TrainedModel,
    check_no_encoder,
    token_batch_shapes,
)
from train.tasks.vocabulary import Labels
from transformer.hardware import Hardware
from transformer.layers.low_rank import LowRankWeight
from transformer.losses import Loss, auxiliary_losses, requested_outputs, weighted_loss
from transformer.model_context import ActivationConstraint
from transformer.models.config import TransformerConfig
from transformer.models.language_model import LanguageModel
from transformer.models.model import LOGITS
from transformer.validation import PositiveFloat

CHOSEN, REJECTED = 1, 2
"""Segments of a row."""


@dataclasses.dataclass(frozen=True)
class PreferenceOptimization(TaskConfig):
    """Direct preference optimization (Rafailov et al. 2023): prefer one answer to another."""

    data_configs = (PreferenceDataConfig,)

    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference."""

    reference: Literal["base", "data"] = "base"
    """base: the model without its LoRA adapter. data: the log-likelihoods that the pairs have
    (`python -m train reference`), also for training of all weights."""

    def check(self, model: TransformerConfig) -> None:
        check_no_encoder(self, model)


@dataclasses.dataclass(frozen=True)
class PreferenceTask(ExampleTask):
    """DPO on pairs of answers. The best checkpoint is the one with the lowest loss."""

    config: PreferenceOptimization
    data: PreferenceDataConfig

    @property
    def supported_options(self) -> tuple[str, ...]:
        return GENERATION_OPTIONS

    @property
    def needs_base_weights(self) -> bool:
        """True unless the pairs have the log-likelihoods of the reference."""
        return self.config.reference == "base"

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> ExampleCorpus[PreferenceSplit]:
        corpus = prepare_preferences(self.data, tokenizer)
        for name, split in () if self.needs_base_weights else corpus.splits.items():
            if missing := int(np.isnan(split.reference).any(axis=1).sum()):
                raise UserError(
                    f"task.reference data: {missing:,} pairs of the {name} split have no "
                    "reference; add it: python -m train reference W --pairs FILE --output FILE"
                )
        return corpus

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> LanguageModel:
        return LanguageModel(self.model_config, hardware, constrain)

    def make_loss_fn(self, model: LanguageModel) -> LossFn:
        """Return the loss of pairs, with the accuracy and the margin of the rewards.

        A batch has `tokens`, `targets`, `weights`, `segments` and `positions` [B, T], and
        `reference_chosen` and `reference_rejected` [B].
        """

        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            policy, aux = _score_pairs(model, params, batch, dropout_rngs)
            if self.needs_base_weights:
                reference = pair_log_likelihoods(model, without_updates(params), batch)
            else:
                reference = reference_of_batch(batch)
            reference = jax.lax.stop_gradient(reference)
            losses = dpo_losses(policy, reference, self.config.beta, batch)
            return losses | auxiliary_losses(aux, losses["loss"].weight)

        return loss

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        shape = jax.ShapeDtypeStruct((batch_size,), np.float32)
        names = ("reference_chosen", "reference_rejected")
        return token_batch_shapes(batch_size, length) | dict.fromkeys(names, shape)

    def describe_training_data(self, corpus: ExampleCorpus[PreferenceSplit]) -> str:
        return f"{len(corpus.split('train').reference):,} pairs of answers"

    def evaluate(
        self,
        model: EvaluatedModel,
        corpus: ExampleCorpus[PreferenceSplit],
        split: str,
        options: EvaluationOptions,
    ) -> dict[str, float]:
        """Return the loss of a pair, the accuracy and the margin of the rewards."""
        if self.needs_base_weights and model.base_params is None:
            raise UserError(
                "task.reference: is the model without its adapter, and a merged run has none; "
                "evaluate the run before the merge, or give pairs with references (python -m train "
                "reference) and --task.reference data"
            )
        base = model.base_params if self.needs_base_weights else None

        def compute_losses(batch: Batch) -> dict[str, Loss]:
            losses = _evaluate_pairs(
                model.params, base, batch, model=model.model, beta=self.config.beta
            )
            # One program at a time: several CPU devices can hold only a few in flight.
            return jax.block_until_ready(losses)

        return mean_losses(model, self.evaluation_batches(corpus, split, options), compute_losses)

    def sample(
        self, trained: TrainedModel, prompts: Sequence[str], options: SampleOptions
    ) -> list[str]:
        """Return the answer to each prompt, written by the chat template as a question."""
        return answer_prompts(trained, prompts, options)


def pair_log_likelihoods(
    model: LanguageModel, params: Any, batch: Batch
) -> jax.Array:  # [B, 2] float32
    """Return the log-likelihoods of the chosen and the rejected answer of each row, in nats."""
    return _score_pairs(model, params, batch, None)[0]


def _score_pairs(
    model: LanguageModel, params: Any, batch: Batch, dropout_rngs: jax.Array | None
) -> tuple[jax.Array, Any]:  # [B, 2] float32
    """Return `pair_log_likelihoods` and, in training, the model's auxiliary outputs."""
    output = model.apply(
        {"params": params},
        batch["tokens"],
        positions=batch["positions"],
        segments=batch["segments"],
        dropout_rngs=dropout_rngs,
        outputs=LOGITS | requested_outputs(dropout_rngs),
    )
    assert output.logits is not None
    logits = output.logits.astype(jnp.float32)  # [B, T, V]
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    tokens = (picked - jax.nn.logsumexp(logits, axis=-1)) * batch["weights"]  # [B, T]
    parts = [jnp.sum(tokens * (batch["segments"] == each), axis=1) for each in (CHOSEN, REJECTED)]
    return jnp.stack(parts, axis=1), output.aux


def reference_of_batch(batch: Batch) -> jax.Array:  # [B, 2]
    """Return the log-likelihoods of the reference that the pairs have."""
    return jnp.stack([batch["reference_chosen"], batch["reference_rejected"]], axis=1)


def dpo_losses(
    policy: jax.Array,  # [B, 2]
    reference: jax.Array,  # [B, 2]
    beta: float,
    batch: Batch,
) -> dict[str, Loss]:
    """Return the loss of each pair (equation 7), the accuracy and margin of its rewards.

    The reward of an answer is beta (log pi - log ref). A pair is right if the chosen answer has the
    larger one. Rows without a pair have no weight.
    """
    rewards = beta * (policy - reference)  # [B, 2]
    margin = rewards[:, 0] - rewards[:, 1]
    weights = jnp.any(batch["weights"] > 0, axis=1).astype(jnp.float32)
    values = {
        "loss": -jax.nn.log_sigmoid(margin),
        "accuracy": (margin > 0).astype(jnp.float32),
        "margin": margin,
        "reward_chosen": rewards[:, 0],
        "reward_rejected": rewards[:, 1],
    }
    return {name: weighted_loss(each, weights) for name, each in values.items()}


def without_updates(params: Any) -> Any:
    """Return the frozen weights: those of a LoRA model without its low-rank updates."""
    return jax.tree.map(
        lambda leaf: leaf.base if isinstance(leaf, LowRankWeight) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, LowRankWeight),
    )


@functools.partial(jax.jit, static_argnames=("model", "beta"))
def _evaluate_pairs(
    params: Any, base: Any | None, batch: Batch, *, model: LanguageModel, beta: float
) -> dict[str, Loss]:
    """Return the losses of pairs. Without base weights the reference is in the batch."""
    # The weights to evaluate are merged, so that the base comes apart.
    policy = pair_log_likelihoods(model, params, batch)
    if base is None:
        return dpo_losses(policy, reference_of_batch(batch), beta, batch)
    return dpo_losses(policy, pair_log_likelihoods(model, base, batch), beta, batch)
