"""Direct preference optimization (DPO, Rafailov et al. 2023): prefer one answer to another.

With log-likelihoods of the chosen answer w and the rejected answer l under the trained model (pi)
and a fixed reference (ref), the loss of a pair is (equation 7)

    -log sigmoid(beta ((log pi(w) - log ref(w)) - (log pi(l) - log ref(l))))

The reference is the model without its LoRA adapter: the same frozen weights, and no second copy. Or
the pairs have its log-likelihoods, which `add_reference` computes before training and writes beside
them (`--task.reference data`): then all weights can be trained, and a step needs one forward pass
less.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from train.data.buckets import bucket_by_rows
from train.data.chat_template import ChatTemplate
from train.data.conversations import with_template
from train.data.examples import (
    ExampleCorpus,
    ExampleEvaluationBatches,
    ExampleTrainingBatches,
)
from train.data.preferences import (
    PreferenceDataConfig,
    PreferenceSplit,
    encode_split,
    parse_pair,
    prepare_preferences,
)
from train.data.rows import read_rows
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.evaluation.metrics import max_eval_batches, round_up_batch_size
from train.experiment import Experiment
from train.run_folder.writing import write_atomically
from train.runtime.stages import track
from train.step import Batch, LossFn
from train.tasks.instruction import answer_prompts
from train.tasks.task import SampleOptions, Task, TextCallback, token_batch_shapes
from train.tasks.task_configs import PreferenceOptimization
from train.tasks.vocabulary import Labels
from transformer.hardware import Hardware
from transformer.layers.low_rank import LowRankWeight
from transformer.losses import Loss, auxiliary_losses, requested_outputs, weighted_loss
from transformer.model_context import ActivationConstraint
from transformer.models.language_model import LanguageModel
from transformer.models.model import LOGITS

if TYPE_CHECKING:
    from train.engine import Engine
    from train.run import Run

CHOSEN, REJECTED = 1, 2
"""Segments of a row."""

FIELDS = ("tokens", "targets", "weights", "segments", "positions")
"""Arrays of a batch that `pair_log_likelihoods` reads."""


@dataclasses.dataclass(frozen=True)
class PreferenceTask(Task):
    """DPO on pairs of answers. The best checkpoint is the one with the lowest loss."""

    experiment: Experiment

    @property
    def data(self) -> PreferenceDataConfig:
        assert isinstance(self.experiment.data, PreferenceDataConfig)
        return self.experiment.data

    @property
    def settings(self) -> PreferenceOptimization:
        assert isinstance(self.experiment.task, PreferenceOptimization)
        return self.experiment.task

    @property
    def has_reference_in_data(self) -> bool:
        """True if the pairs have the log-likelihoods of the reference."""
        return self.settings.reference == "data"

    @property
    def supported_options(self) -> tuple[str, ...]:
        return "max_new_tokens", "temperature", "top_k", "top_p", "seed"

    @property
    def needs_base_weights(self) -> bool:
        return not self.has_reference_in_data

    @property
    def has_reference_pass(self) -> bool:
        return not self.has_reference_in_data

    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> ExampleCorpus[PreferenceSplit]:
        corpus = prepare_preferences(self.data, tokenizer)
        for name, split in corpus.splits.items() if self.has_reference_in_data else ():
            if missing := int(np.isnan(split.reference).any(axis=1).sum()):
                raise UserError(
                    f"task.reference data: {missing:,} pairs of the {name} split have no "
                    "reference; add it: python -m train reference W --pairs FILE --output FILE"
                )
        return corpus

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> LanguageModel:
        return LanguageModel(self.experiment.model, hardware, constrain)

    def make_loss_fn(self, model: LanguageModel) -> LossFn:
        """Return the loss of pairs, with the accuracy and the margin of the rewards.

        A batch has `tokens`, `targets`, `weights`, `segments` and `positions` [B, T], and
        `reference_chosen` and `reference_rejected` [B].
        """

        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            policy, aux = _score_pairs(model, params, batch, dropout_rngs)
            if self.has_reference_in_data:
                reference = reference_of_batch(batch)
            else:
                reference = pair_log_likelihoods(model, without_updates(params), batch)
            reference = jax.lax.stop_gradient(reference)
            losses = dpo_losses(policy, reference, self.settings.beta, batch)
            return losses | auxiliary_losses(aux, losses["loss"].weight)

        return loss

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        shape = jax.ShapeDtypeStruct((batch_size,), np.float32)
        names = ("reference_chosen", "reference_rejected")
        return token_batch_shapes(batch_size, length) | dict.fromkeys(names, shape)

    def training_batches(self, corpus: ExampleCorpus[PreferenceSplit]) -> ExampleTrainingBatches:
        lora = self.experiment.lora
        if not self.has_reference_in_data and (not lora.rank or lora.train_fully):
            setting = f"train_fully {lora.train_fully[0]}" if lora.rank else "rank 0"
            raise UserError(
                f"lora.{setting}: DPO needs an adapter, as its reference is the model without "
                "one; give --init-from W --lora.rank 8 and the model of W, or --task.reference data"
            )
        split = corpus.split("train")
        buckets = bucket_by_rows(
            split.lengths,
            batch_size=self.experiment.batch_size,
            max_buckets=self.data.max_buckets,
        )
        return ExampleTrainingBatches(split, buckets, seed=self.experiment.seed)

    def describe_training_data(self, corpus: ExampleCorpus[PreferenceSplit]) -> str:
        return f"{len(corpus.split('train').reference):,} pairs of answers"

    def evaluate(
        self,
        engine: Engine,
        params: Any,
        corpus: ExampleCorpus[PreferenceSplit],
        split: str,
        *,
        full_split: bool,
    ) -> dict[str, float]:
        """Return the loss of a pair, the accuracy and the margin of the rewards."""
        if not self.has_reference_in_data and engine.frozen is None:
            raise UserError(
                "task.reference: is the model without its adapter, and a merged run has none; "
                "evaluate the run before the merge, or give pairs with references (python -m train "
                "reference) and --task.reference data"
            )
        config, examples = self.experiment.evaluation, corpus.split(split)
        batch_size = config.batch_size or self.experiment.batch_size
        buckets = bucket_by_rows(
            examples.lengths,
            batch_size=round_up_batch_size(batch_size, engine.mesh),
            max_buckets=self.data.max_buckets,
        )
        batches = ExampleEvaluationBatches(
            examples, buckets, max_batches=max_eval_batches(config, full_split)
        )
        totals: dict[str, np.ndarray] = {}
        for cursor in track(range(len(batches)), "evaluating"):
            host, num_hosts = jax.process_index(), jax.process_count()
            batch = engine.put_batch(batches.host_batch(cursor, host, num_hosts))
            base = None if self.has_reference_in_data else engine.frozen
            sums = _evaluate_pairs(params, base, batch, model=engine.model, beta=self.settings.beta)
            for name, each in jax.device_get(sums).items():
                totals[name] = totals.get(name, 0) + np.array(each, np.float64)
        return {name: float(total / weight) for name, (total, weight) in totals.items()}

    def sample(
        self,
        run: Run,
        prompts: Sequence[str],
        options: SampleOptions,
        on_text: TextCallback | None = None,
    ) -> list[str]:
        """Return the answer to each prompt, written by the chat template as a question."""
        return answer_prompts(run, prompts, options, on_text)


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


def add_reference(
    workdir: str,
    pairs_path: str,
    output: str,
    *,
    max_length: int = PreferenceDataConfig.max_length,
    chat_template: str = "",
    batch_size: int = 8,
) -> int:
    """Write pairs with the log-likelihoods of a run; return their number.

    Args:
      workdir: Folder of the run, a language model.
      pairs_path: JSON lines of pairs.
      output: File to write.
      max_length: `data.max_length` of the DPO run.
      chat_template: `data.chat_template` of the DPO run.
      batch_size: Pairs of a forward pass.

    Raises:
      UserError: The pairs are malformed, the run is no language model, or a file cannot be read or
        written, or a log-likelihood is not finite.
    """
    from train.run import load  # the reader of finished runs, which training does not need

    run = load(workdir)
    model = run.model
    if not isinstance(model, LanguageModel) or run.tokenizer is None:
        raise UserError(f"{workdir}: is not a language model; give the run that DPO starts from")
    longest = model.config.max_length
    if longest is not None and max_length // 2 > longest:
        raise UserError(
            f"max_length {max_length}: half of it is more than the model's {longest} positions; "
            f"give {2 * longest} or less"
        )
    records = list(read_rows("pairs", pairs_path))
    pairs = [parse_pair(*each)._replace(reference=None) for each in records]
    tokenizer = with_template(run.tokenizer, chat_template)
    template = ChatTemplate.of_tokenizer(tokenizer)
    notes: list[str] = []
    split = encode_split("pairs", pairs, tokenizer, template, max_length // 2, notes)
    if len(split.reference) != len(pairs):
        raise UserError(f"{pairs_path}: {notes[-1]}; leave such pairs out, or raise --max-length")
    score = jax.jit(functools.partial(pair_log_likelihoods, model))
    length = int(split.lengths.max())
    found: list[np.ndarray] = []
    for start in track(range(0, len(pairs), batch_size), "scoring"):
        indices = np.arange(start, start + batch_size)
        batch = split.batch(np.where(indices < len(pairs), indices, -1), (length,))
        arrays = {name: batch[name] for name in FIELDS}
        found += list(np.asarray(score(run.params, arrays)))
    lines = [
        json.dumps({**record, "reference": _entry(where, scores, counts)}, ensure_ascii=False)
        for (where, record), scores, counts in zip(
            records, found[: len(pairs)], split.num_targets, strict=True
        )
    ]
    path = Path(output).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join([*lines, ""]))
    return len(lines)


def _entry(where: str, scores: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    if not np.isfinite(scores).all():  # JSON has no such numbers
        raise UserError(
            f"{where}: the log-likelihoods of its answers are not finite ({scores[0]}, "
            f"{scores[1]}); use an earlier checkpoint or a run trained in float32"
        )
    chosen, rejected = (min(float(each), 0.0) for each in scores)
    return {"chosen": chosen, "rejected": rejected, "tokens": [int(each) for each in counts]}
