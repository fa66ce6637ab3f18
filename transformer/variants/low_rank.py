"""Keys and values projected along the length: a few mixtures for each document of a row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer.documents import previous_segments, token_segments
from transformer.masks import Mask


class KeyPlacement(NamedTuple):
    """Where each key of a row goes: to the mixtures of its document, by its place in it."""

    in_document: jax.Array  # [B, S, documents] True where the key is of the document
    positions: jax.Array | None = None  # [B, S] its place in the document; None: in the row
    segments: jax.Array | None = None  # [B, documents] what the mask calls them; None: there is one
    too_many_documents: jax.Array | None = None  # [B] whether there are more


def place_keys(
    mask: Mask,
    batch_size: int,  # B
    length: int,  # S
    max_documents: int,  # of documents
) -> KeyPlacement:
    """Numbers the documents of each row of keys in their order. Padding is of none of them."""
    own = mask.segments if mask.key_segments is None else mask.key_segments
    own = None if mask.segments is None else own
    found = token_segments(mask.replace(segments=own), length)
    if found is None:
        return KeyPlacement(jnp.ones((batch_size, length, 1), bool))
    segments = jnp.broadcast_to(found, (batch_size, length))
    if own is None:
        return KeyPlacement((segments != 0)[:, :, None])
    begins = (segments != 0) & (segments != previous_segments(segments))
    index = jnp.arange(length)[None, :]
    places = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    numbers = jnp.cumsum(begins, axis=1)[:, :, None]
    members = (numbers == 1 + jnp.arange(max_documents)[None, None, :]) & (segments != 0)[
        :, :, None
    ]
    called = jnp.max(jnp.where(members, segments[:, :, None], 0), axis=1)
    return KeyPlacement(members, places, called, numbers[:, -1, 0] > max_documents)


def project_length(
    projection: jax.Array,  # [length, rank], or [K, length, rank] with one for each head
    x: jax.Array,  # [B, S, K, H]
    placement: KeyPlacement,
) -> jax.Array:  # [B, documents * rank, K, H]
    """Sums over the length, each key times the row of its place: rank of them a document."""
    apart = jnp.where(placement.in_document[..., None, None], x[:, :, None], 0)
    heads = "K" if projection.ndim == 3 else ""
    if placement.positions is None:
        rows, axes = projection[..., : x.shape[1], :], f"{heads}SR"
    else:
        rows, axes = projection[..., placement.positions, :], f"{heads}BSR"
    summed = jnp.einsum(f"{axes},BSCKH->BCRKH", rows, apart)
    return summed.reshape(x.shape[0], -1, *x.shape[2:])
