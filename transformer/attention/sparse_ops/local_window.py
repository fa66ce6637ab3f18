"""Windows of neighboring tokens of the same document: the inputs of convolutions."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Shaped

from transformer.attention.document_boundaries import token_segments
from transformer.attention.masks import Mask


class NeighborCache(struct.PyTreeNode):
    """Inputs of a causal convolution at the last k - 1 tokens, newest last."""

    inputs: Shaped[Array, "B k_minus_1 ..."]

    @classmethod
    def empty(
        cls,
        batch_size: int,  # B
        num_tokens: int,  # k - 1
        channels: tuple[int, ...],  # axes of the input of one token
        dtype: Any,
    ) -> "NeighborCache":
        """Return a cache without tokens."""
        return cls(jnp.zeros((batch_size, num_tokens, *channels), dtype))

    def append(
        self,
        x: Shaped[Array, "B T ..."],
        positions: Int[Array, "#B T"],  # -1: padding, at the end of a row
    ) -> "NeighborCache":
        """Return the cache with the last k - 1 of its tokens and T more."""
        # Rows have different numbers of new tokens. Padding is at the end, so the last k - 1 tokens
        # of a row with n new ones begin at index n of old and new together.
        row = jnp.concatenate([self.inputs, x.astype(self.inputs.dtype)], axis=1)
        num_new = jnp.sum(jnp.broadcast_to(positions >= 0, x.shape[:2]), axis=1)

        def slice_row(row: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(row, start, self.inputs.shape[1])

        return NeighborCache(jax.vmap(slice_row)(row, num_new))

    def read(self, dtype: Any) -> Shaped[Array, "B k_minus_1 ..."]:
        """Return the inputs in `dtype`."""
        return self.inputs.astype(dtype)


def neighbor_window(
    x: Shaped[Array, "B T ..."],
    num_before: int,
    num_after: int,
    *,
    positions: Int[Array, "#B T"],
    mask: Mask,
    cache: NeighborCache | None = None,  # of `num_before` tokens; None: no previous tokens
) -> Shaped[Array, "B T num_before_plus_1_plus_num_after ..."]:  # in the order of the row
    """Stack each token with its neighbors of the same document; zeros elsewhere."""
    length, size = x.shape[1], num_before + 1 + num_after

    def stack_shifted(
        padded: Shaped[Array, "B T_plus_size_minus_1 ..."],
    ) -> Shaped[Array, "B T size ..."]:
        # Slices at static offsets: XLA fuses them into what reads the windows, which it would not
        # do with a gather by an array of indices.
        return jnp.stack([padded[:, i : i + length] for i in range(size)], axis=2)

    def zeros(num_tokens: int) -> jax.Array:
        return jnp.zeros((x.shape[0], num_tokens, *x.shape[2:]), x.dtype)

    before = zeros(num_before) if cache is None else cache.read(x.dtype)
    windows = stack_shifted(jnp.concatenate([before, x, zeros(num_after)], axis=1))
    if cache is not None:
        # A row of the cache holds one document, whose first token has position 0: what precedes it
        # in the cache is another document's, or zeros.
        visible = positions[:, :, None] - num_before + jnp.arange(size)[None, None, :] >= 0
    elif (segments := token_segments(mask, length)) is not None:
        # Zeros beyond the row are segment 0, too.
        neighbor_segments = stack_shifted(jnp.pad(segments, ((0, 0), (num_before, num_after))))
        visible = (neighbor_segments == segments[:, :, None]) & (neighbor_segments != 0)
    else:
        return windows
    return jnp.where(visible.reshape(visible.shape + (1,) * (windows.ndim - 3)), windows, 0)
