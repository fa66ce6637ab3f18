"""Masking of tokens for masked language modeling (Devlin et al. 2019, section 3.1)."""

import dataclasses
from typing import Any

import numpy as np

from train.data.batches import TextEvaluationBatches, TrainingBatches
from train.data.token_file import HostBatch
from train.data.tokenizer import Tokenizer


class Masking:
    """Selects tokens for prediction, and hides them.

    A fraction of a window's tokens, special tokens excepted, is selected: the nearest integer, at
    least 1. A selected token is replaced by the mask, replaced by a random token, or left as it is.
    The result is a pure function of the seed and the example's index: it differs between epochs,
    and is the same in every evaluation.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        seed: int = 0,
        mlm_probability: float = 0.15,
        mask_replace_prob: float = 0.8,
        random_replace_prob: float = 0.1,
    ):
        """Set up the masking.

        Args:
          tokenizer: A tokenizer with a mask token (see `Tokenizer.with_mask_token`).
          seed: Seed of the selection.
          mlm_probability: Fraction of the tokens that are selected.
          mask_replace_prob: Fraction of the selected tokens that become the mask.
          random_replace_prob: Fraction of the selected tokens that become a random, regular token.

        Raises:
          ValueError: The tokenizer has no mask token.
        """
        if tokenizer.mask_token_id is None:
            raise ValueError(
                "the tokenizer has no mask token; give the one that with_mask_token() returns"
            )
        self._mask_token_id, self._seed = tokenizer.mask_token_id, seed
        self._mlm_probability = mlm_probability
        self._mask_replace_prob = mask_replace_prob
        self._random_replace_prob = random_replace_prob
        self._special = np.array([*tokenizer.special_token_ids, tokenizer.eos_token_id])
        self._regular_tokens = np.setdiff1d(np.arange(tokenizer.vocab_size), self._special)

    def mask_batch(self, batch: HostBatch) -> HostBatch:
        """Return a batch of windows with some tokens hidden.

        Returns:
          tokens: [B, T] int32, with the selected tokens hidden.
          targets: [B, T] int32, the original tokens.
          weights: [B, T] float32, 1 where a token was selected.
          segments, positions, examples: unchanged.
        """
        tokens = batch["tokens"]
        draws = self._draws(batch["examples"], tokens.shape[1])  # [B, 3, T]
        selected = self._select(tokens, batch["segments"] > 0, draws[:, 0])  # [B, T]
        uniform = draws[:, 1] / 2.0**64  # [B, T], in [0, 1)
        random_tokens = self._regular_tokens[draws[:, 2] % len(self._regular_tokens)]  # [B, T]
        replace_prob = self._mask_replace_prob + self._random_replace_prob
        replaced = np.where(uniform < replace_prob, random_tokens, tokens)
        replaced = np.where(uniform < self._mask_replace_prob, self._mask_token_id, replaced)
        return {
            **batch,
            "tokens": np.where(selected, replaced, tokens).astype(np.int32),
            "targets": tokens,
            "weights": selected.astype(np.float32),
        }

    def _draws(
        self,
        examples: np.ndarray,  # [B] uint32
        length: int,
    ) -> np.ndarray:  # [B, 3, T] uint64
        """Return random integers, from a separate generator for each example."""
        # Raw output of PCG64: NumPy promises never to change it, unlike its distributions.
        generators = [
            np.random.PCG64(np.random.SeedSequence((self._seed, int(example))))
            for example in examples
        ]
        return np.stack([each.random_raw(3 * length).reshape(3, length) for each in generators])

    def _select(
        self,
        tokens: np.ndarray,  # [B, T]
        real: np.ndarray,  # [B, T] bool
        draws: np.ndarray,  # [B, T] uint64
    ) -> np.ndarray:  # [B, T] bool
        """Select the tokens with the smallest draws, as many as are due in each row."""
        maskable = real & ~np.isin(tokens, self._special)
        count = np.rint(self._mlm_probability * maskable.sum(axis=1)).clip(1)  # [B]
        order = np.where(maskable, draws, np.iinfo(np.uint64).max).argsort(axis=1, kind="stable")
        rank = order.argsort(axis=1)  # [B, T]
        return maskable & (rank < count[:, None])


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedTrainingBatches(TrainingBatches):
    """Training batches of windows with hidden tokens."""

    batches: TrainingBatches
    masking: Masking

    @property
    def one_shape(self) -> bool:
        return self.batches.one_shape

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        return self.masking.mask_batch(self.batches.host_batch(cursor, host, num_hosts))

    def position(self, cursor: int) -> Any:
        return self.batches.position(cursor)

    def seek(self, position: Any) -> None:
        self.batches.seek(position)

    def source_shares(self, cursor: int) -> dict[str, float]:
        return self.batches.source_shares(cursor)


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedEvaluationBatches:
    """Evaluation batches of windows with hidden tokens, the same ones every time."""

    batches: TextEvaluationBatches
    masking: Masking

    def __len__(self) -> int:
        return len(self.batches)

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        return self.masking.mask_batch(self.batches.host_batch(cursor, host, num_hosts))
