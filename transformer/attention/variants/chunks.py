"""Chunks of a row: what mixers share that scan over them and carry a state from one to the next.

Within a chunk a causal pass is a few matmuls; between chunks it is a recurrence. Nothing of size
T x T exists, and the number of sequential steps is T / C.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from transformer.attention.document_boundaries import DocumentBoundaries

CHUNK_SIZE = 64
"""C, largest number of tokens per chunk."""

ACCUMULATION_DTYPE = jnp.float32
"""Dtype of sums over all tokens under every precision policy, because they grow with T."""


class Chunking(NamedTuple):
    """Equal chunks, not full ones and a rest: 65 tokens are 2 chunks of 33, padded by 1."""

    length: int  # T
    num_chunks: int
    size: int  # C

    @classmethod
    def of(cls, length: int) -> "Chunking":
        """Return the chunks of a row of `length` tokens."""
        num_chunks = -(-length // CHUNK_SIZE)
        return cls(length, num_chunks, -(-length // num_chunks))

    @property
    def padding(self) -> tuple[int, int]:
        """Numbers of tokens to pad the row with, before and after it."""
        return (0, self.num_chunks * self.size - self.length)

    def split(self, x: Shaped[Array, "B T *heads H"]) -> Shaped[Array, "chunks B *heads C H"]:
        """Pad a row with zeros and split it."""
        x = jnp.pad(x, [(0, 0), self.padding] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], self.num_chunks, self.size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 2, -2), 1, 0)

    def join(self, y: Shaped[Array, "chunks B *heads C H"]) -> Shaped[Array, "B T *heads H"]:
        """Return the row of which `split` gives these chunks."""
        y = jnp.moveaxis(jnp.moveaxis(y, 0, 1), -2, 2)
        y = y.reshape(y.shape[0], self.num_chunks * self.size, *y.shape[3:])
        return y[:, : self.length]

    def split_documents(self, boundaries: DocumentBoundaries | None) -> "ChunkDocuments":
        """Return the document of each token; None: one document without padding."""
        if boundaries is None:
            row = (1, self.length)
            boundaries = DocumentBoundaries(jnp.zeros(row, bool), jnp.ones(row, bool))
        is_start, is_token = boundaries
        # Documents are numbered by their starts: a document that continues from a cache is number
        # 0, that of the state before the first chunk.
        document = jnp.pad(jnp.cumsum(is_start, axis=1), [(0, 0), self.padding], mode="edge")
        is_token = jnp.pad(jnp.broadcast_to(is_token, is_start.shape), [(0, 0), self.padding])
        return ChunkDocuments(
            *(
                x.reshape(-1, self.num_chunks, self.size).swapaxes(0, 1)
                for x in (document, jnp.where(is_token, document, -1))
            )
        )


class ChunkDocuments(NamedTuple):
    """Documents of the tokens of all chunks, or of one (without the first axis)."""

    document: Int[Array, "*chunks #B C"]  # number of the document in the row
    key_document: Int[Array, "*chunks #B C"]  # the same; -1: padding, which nothing sees
