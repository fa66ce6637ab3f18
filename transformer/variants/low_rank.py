"""Keys and values projected along the length: a few mixtures for each document of a row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer.documents import document_before, documents
from transformer.masks import Mask


class Slots(NamedTuple):
    """Where each key of a row goes: to the mixtures of its document, by its place in it."""

    members: jax.Array  # [B, S, documents] True where the key is of the document
    places: jax.Array | None = None  # [B, S] its place in the document; None: in the row
    segments: jax.Array | None = None  # [B, documents] what the mask calls them; None: there is one
    overfull: jax.Array | None = None  # [B] whether there are more


def make_slots(
    mask: Mask,
    batch: int,  # B
    length: int,  # S
    count: int,  # of documents
) -> Slots:
    """Numbers the documents of each row of keys in their order. Padding is of none of them."""
    own = mask.segments if mask.key_segments is None else mask.key_segments
    own = None if mask.segments is None else own
    found = documents(mask.replace(segments=own), length)
    if found is None:
        return Slots(jnp.ones((batch, length, 1), bool))
    segments = jnp.broadcast_to(found, (batch, length))
    if own is None:
        return Slots((segments != 0)[:, :, None])
    begins = (segments != 0) & (segments != document_before(segments))
    index = jnp.arange(length)[None, :]
    places = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    numbers = jnp.cumsum(begins, axis=1)[:, :, None]
    members = (numbers == 1 + jnp.arange(count)[None, None, :]) & (segments != 0)[:, :, None]
    called = jnp.max(jnp.where(members, segments[:, :, None], 0), axis=1)
    return Slots(members, places, called, numbers[:, -1, 0] > count)


def projected(
    table: jax.Array,  # [length, rank], or [K, length, rank] with one for each head
    x: jax.Array,  # [B, S, K, H]
    slots: Slots,
) -> jax.Array:  # [B, documents * rank, K, H]
    """Sums over the length, each key times the row of its place: rank of them a document."""
    apart = jnp.where(slots.members[..., None, None], x[:, :, None], 0)
    heads = "K" if table.ndim == 3 else ""
    if slots.places is None:
        rows, axes = table[..., : x.shape[1], :], f"{heads}SR"
    else:
        rows, axes = table[..., slots.places, :], f"{heads}BSR"
    summed = jnp.einsum(f"{axes},BSCKH->BCRKH", rows, apart)
    return summed.reshape(x.shape[0], -1, *x.shape[2:])
