"""The tables of relative positions, and what they add to scores and results (Shaw et al. 2018)."""

import jax
import jax.numpy as jnp
from flax import struct

from transformer.contract import DTypeLike, precise_einsum


class RelativeTables(struct.PyTreeNode):
    """The tables a^K and a^V of one layer.

    Rows are picked by products with zeros and ones: the gradient of a product is a product, where
    that of a look-up for each head, query and key would be slow to add up.
    """

    keys: jax.Array  # [R, H]
    values: jax.Array  # [R, H of values]

    def score_terms(
        self,
        q: jax.Array,  # [B, T, N, H]
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
        dtype: DTypeLike,  # of the scores
    ) -> jax.Array:  # [B, N, T, S]
        """q_i . a^K_ij: what the table adds to the scores (equation 4)."""
        picks, narrow = self.one_hot_distances(query_positions, key_positions), self.keys.dtype
        every = precise_einsum("BTNH,RH->BNTR", q, self.keys, narrow, dtype)
        return precise_einsum("BNTR,BTSR->BNTS", every, picks, narrow, dtype)

    def value_terms(
        self,
        weights: jax.Array,  # [B, N, T, S]
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
        dtype: DTypeLike,  # of the result
    ) -> jax.Array:  # [B, T, N, H of values]
        """sum over j of weight_ij a^V_ij: what the table adds to the result (equation 3)."""
        picks, narrow = self.one_hot_distances(query_positions, key_positions), self.values.dtype
        by_distance = precise_einsum("BNTS,BTSR->BNTR", weights, picks, narrow, dtype)
        return precise_einsum("BNTR,RH->BTNH", by_distance, self.values, narrow, dtype)

    def one_hot_distances(
        self,
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
    ) -> jax.Array:  # [B or 1, T, S, R]
        """A one at the row of each query's and key's distance, zeros elsewhere."""
        rows = len(self.keys)
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        row = jnp.clip(distance + rows // 2, 0, rows - 1)
        return jax.nn.one_hot(row, rows, dtype=self.keys.dtype)
