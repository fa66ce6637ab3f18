"""The tables of relative positions, and what they add to scores and results (Shaw et al. 2018)."""

import jax
import jax.numpy as jnp
from flax import struct

from transformer.contract import DType, contract


class RelativeTables(struct.PyTreeNode):
    """The tables a^K and a^V of one layer.

    Rows are picked by products with zeros and ones: the gradient of a product is a product, where
    that of a look-up for each head, query and key would be slow to add up.
    """

    keys: jax.Array  # [R, H]
    values: jax.Array  # [R, H of values]

    def scores(
        self,
        q: jax.Array,  # [B, T, N, H]
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
        dtype: DType,  # of the scores
    ) -> jax.Array:  # [B, N, T, S]
        """q_i . a^K_ij: what the table adds to the scores (equation 4)."""
        picks, narrow = self.picks(query_positions, key_positions), self.keys.dtype
        every = contract("BTNH,RH->BNTR", q, self.keys, narrow, dtype)
        return contract("BNTR,BTSR->BNTS", every, picks, narrow, dtype)

    def look_up(
        self,
        weights: jax.Array,  # [B, N, T, S]
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
        dtype: DType,  # of the result
    ) -> jax.Array:  # [B, T, N, H of values]
        """sum over j of weight_ij a^V_ij: what the table adds to the result (equation 3)."""
        picks, narrow = self.picks(query_positions, key_positions), self.values.dtype
        by_distance = contract("BNTS,BTSR->BNTR", weights, picks, narrow, dtype)
        return contract("BNTR,RH->BTNH", by_distance, self.values, narrow, dtype)

    def picks(
        self,
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
    ) -> jax.Array:  # [B or 1, T, S, R]
        """A one at the row of each query's and key's distance, zeros elsewhere."""
        rows = len(self.keys)
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        row = jnp.clip(distance + rows // 2, 0, rows - 1)
        return jax.nn.one_hot(row, rows, dtype=self.keys.dtype)
