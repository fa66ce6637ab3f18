"""Words hidden from a model that has to tell them: BERT's pretraining task."""

from __future__ import annotations

import dataclasses

import numpy as np

from train.data.batches import TextEvaluationBatches, TextTrainingBatches
from train.data.streams import HostBatch
from train.data.tokenizer import Tokenizer


class Masking:
    """Which tokens are hidden and how (Devlin et al. 2019, section 3.1).

    Of the tokens of a window that are no special ones, a share is chosen: the nearest number to it,
    and at least one. A chosen token is shown as the mask, as another word, or as it is. All of it
    is a pure function of the seed and the example's number, so that another epoch has other
    choices, and an evaluation always the same ones.
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
        """Makes it.

        Args:
          tokenizer: One with a mask token (see its `with_mask_token`).
          seed: Decides what is chosen.
          rate: The share of tokens that are chosen.
          masked: The share of those that are shown as the mask.
          replaced: The share of those that are shown as a word drawn from all that are not special.

        Raises:
          ValueError: The tokenizer has no mask token.
        """
        if tokenizer.mask_token_id is None:
            raise ValueError("the tokenizer has no mask token; give the one that with_mask() makes")
        self._mask, self._seed = tokenizer.mask_token_id, seed
        self._rate, self._masked, self._replaced = (
            mlm_probability,
            mask_replace_prob,
            random_replace_prob,
        )
        self._special = np.array([*tokenizer.special_token_ids, tokenizer.eos_token_id])
        self._words = np.setdiff1d(np.arange(tokenizer.vocab_size), self._special)

    def mask_batch(self, batch: HostBatch) -> HostBatch:
        """The task that a batch of windows makes.

        Args:
          batch: tokens, segments and positions [B, T], and examples [B]; nothing is hidden where
            segments are 0.

        Returns:
          tokens: [B, T] int32, with the chosen ones hidden.
          targets: [B, T] int32, the tokens as they were.
          weights: [B, T] float32, 1 where a token was chosen.
          segments, positions, examples: as they were.
        """
        tokens = batch["tokens"]
        draws = self._draws(batch["examples"], tokens.shape[1])  # [B, 3, T]
        chosen = self._choose(tokens, batch["segments"] > 0, draws[:, 0])  # [B, T]
        share = draws[:, 1] / 2.0**64  # [B, T], from 0 up to 1
        words = self._words[draws[:, 2] % len(self._words)]  # [B, T]
        shown = np.where(share < self._masked + self._replaced, words, tokens)
        shown = np.where(share < self._masked, self._mask, shown)
        return {
            **batch,
            "tokens": np.where(chosen, shown, tokens).astype(np.int32),
            "targets": tokens,
            "weights": chosen.astype(np.float32),
        }

    def _draws(
        self,
        examples: np.ndarray,  # [B] uint32
        length: int,
    ) -> np.ndarray:  # [B, 3, T] uint64
        """Random numbers from a stream of its own for each example."""
        streams = [
            np.random.PCG64(np.random.SeedSequence((self._seed, int(example))))
            for example in examples
        ]
        return np.stack([stream.random_raw(3 * length).reshape(3, length) for stream in streams])

    def _choose(
        self,
        tokens: np.ndarray,  # [B, T]
        real: np.ndarray,  # [B, T] bool
        draws: np.ndarray,  # [B, T] uint64
    ) -> np.ndarray:  # [B, T] bool
        """The tokens with the least draws, as many as are to be chosen in each row."""
        open_ = real & ~np.isin(tokens, self._special)
        count = np.rint(self._rate * open_.sum(axis=1)).clip(1)  # [B]
        order = np.where(open_, draws, np.iinfo(np.uint64).max).argsort(axis=1, kind="stable")
        rank = order.argsort(axis=1)  # [B, T]
        return open_ & (rank < count[:, None])


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedTrainingBatches:
    """Training batches of windows with tokens hidden."""

    batches: TextTrainingBatches
    masking: Masking

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """See `Batches.host` and `Masking.mask_batch`."""
        return self.masking.mask_batch(self.batches.host_batch(cursor, host, num_hosts))


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedEvaluationBatches:
    """Evaluation batches of windows with tokens hidden, always the same ones."""

    batches: TextEvaluationBatches
    masking: Masking

    def __len__(self) -> int:
        return len(self.batches)

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """See `EvaluationBatches.host` and `Masking.mask_batch`."""
        return self.masking.mask_batch(self.batches.host_batch(cursor, host, num_hosts))
