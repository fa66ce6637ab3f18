"""Choice of the attention backend: by name, or `auto` by hardware, dtype and mask."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from transformer.attention.backends.cudnn import needs_dense_mask
from transformer.attention.backends.query_blocks import MIN_QUERY_BLOCK
from transformer.attention.masks import MaskPattern
from transformer.hardware import Hardware
from transformer.validation import check_choice

Backend = Literal["auto", "reference", "query_blocks", "blockwise", "cudnn", "splash", "ring"]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Properties of an attention call that decide its backend. All are known at compile time.

    Lengths may be symbolic dimensions of `jax.export`, which have no order.
    """

    hardware: Hardware
    pattern: MaskPattern
    dtype: str
    """Dtype of queries, keys and values."""
    num_queries: int
    """T."""
    num_keys: int
    """S."""
    head_dim: int
    """H of queries and keys."""
    value_head_dim: int
    """H of values."""
    has_segments: bool = False
    """Segments separate packed documents or mark padding."""
    has_extra_masks: bool = False
    """Other arrays (lengths, prefixes, global positions, pairs) change the mask."""
    keys_match_queries: bool = True
    """Keys belong to the same tokens as the queries, in the same order."""
    is_dot_product: bool = True
    """Scores are dot products, perhaps with a soft cap: no bias, no tables, no MLP."""
    has_soft_cap: bool = False
    """Scores have a soft cap."""
    has_relative_tables: bool = False
    """Keys and values get a vector added by distance."""
    has_sinks: bool = False
    """The softmax includes a logit without a value."""
    has_dropout: bool = False
    """Attention weights are dropped."""
    returns_weights: bool = False
    """The caller requests the attention weights."""
    context_shards: int = 1
    """Number of devices along the length."""
    mesh_known: bool = False
    """The layout of arrays on several devices is known."""

    @property
    def lengths_known(self) -> bool:
        """Return False if T or S is symbolic."""
        lengths: tuple[Any, ...] = (self.num_queries, self.num_keys)
        return all(isinstance(length, int) for length in lengths)


class BackendChoice(NamedTuple):
    """A backend and the reason for it."""

    backend: Backend
    reason: str
    is_fallback: bool = False
    """The requested backend does not support the inputs."""


# Every layer of a model asks with the same spec, each time the model is traced.
@functools.cache
def choose_backend(backend: Backend, spec: AttentionSpec) -> BackendChoice:
    """Return the requested backend if it supports `spec`, else the reference.

    `auto` returns the fastest backend that supports it.

    Raises:
      ValueError: The length is sharded over devices, and the ring does not support `spec` or
        another backend is requested. No other backend works without gathering all tokens.
    """
    check_choice("backend", backend, get_args(Backend))
    if spec.context_shards > 1 and spec.keys_match_queries:
        obstacle = ring_obstacle(spec)
        if obstacle or backend not in ("auto", "ring"):
            obstacle = obstacle or "keys and values have to move around the ring"
            raise ValueError(
                f"attention.backend {backend}: cannot serve tokens that are spread over "
                f"{spec.context_shards} devices: {obstacle}; "
                "set mesh.context to 1, or the backend to auto"
            )
        return BackendChoice("ring", f"tokens are spread over {spec.context_shards} devices")
    if backend == "auto":
        return _choose_fastest(spec)
    obstacle = _obstacle(backend, spec)
    if obstacle:
        return BackendChoice("reference", f"{backend} cannot serve: {obstacle}", is_fallback=True)
    return BackendChoice(backend, "asked for")


PREFERRED_BACKENDS: dict[str, tuple[Backend, ...]] = {
    "cpu": ("query_blocks", "reference"),
    "gpu": ("cudnn", "query_blocks", "reference"),
    "tpu": ("splash", "reference"),
}
"""Backends that `auto` tries in turn, by platform."""

PREFERRED_FOR_MANY_SCORES: dict[str, tuple[Backend, ...]] = {
    "cpu": ("blockwise", "query_blocks", "reference"),
    "gpu": ("cudnn", "blockwise", "query_blocks", "reference"),
    "tpu": ("splash", "blockwise", "reference"),
}
"""The same for long inputs and narrow windows. On a CPU `blockwise` is before all others, because
its tiles stay in the cache, and elsewhere after the platform's own kernel."""


def _choose_fastest(spec: AttentionSpec) -> BackendChoice:
    """Return the first preferred backend of the platform that supports `spec`."""
    many = spec.lengths_known and _has_many_scores(spec)
    platform = spec.hardware.platform
    reason = ""
    for backend in (PREFERRED_FOR_MANY_SCORES if many else PREFERRED_BACKENDS)[platform]:
        obstacle = _obstacle(backend, spec)
        if not obstacle:
            return BackendChoice(backend, reason or f"the fastest on {platform}")
        reason = reason or f"{backend} cannot serve: {obstacle}"
    raise AssertionError("the reference supports every spec")


def _obstacle(backend: Backend, spec: AttentionSpec) -> str:
    """Return the reason why a backend does not support `spec`; empty if it does."""
    broken = dict(spec.hardware.broken_kernels)
    if backend in broken:
        return f"its kernel cannot be compiled here ({broken[backend]})"
    if backend != "reference" and not spec.lengths_known:
        return "it splits the tokens into blocks, and their number is symbolic"
    return OBSTACLES[backend](spec)


def _has_many_scores(spec: AttentionSpec) -> bool:
    """Return True for long inputs, and for windows that hide most of the scores."""
    window = spec.pattern.window * spec.pattern.dilation
    is_narrow = (
        0 < 2 * window <= spec.num_keys
        and spec.keys_match_queries
        and spec.num_queries >= 2 * spec.hardware.tile_size
    )
    is_long = min(spec.num_queries, spec.num_keys) >= spec.hardware.blockwise_min_length
    return is_long or is_narrow


def _query_blocks_obstacle(spec: AttentionSpec) -> str:
    if spec.returns_weights:
        return "attention weights are requested"
    if not (spec.pattern.causal and spec.pattern.ordered and spec.keys_match_queries):
        return "it needs a causal mask over tokens in order"
    if spec.pattern.prefix:
        return "a prefix is seen by earlier queries"
    if spec.num_queries < 2 * MIN_QUERY_BLOCK:
        return f"{spec.num_queries} queries are fewer than two blocks of {MIN_QUERY_BLOCK}"
    return ""


def _blockwise_obstacle(spec: AttentionSpec) -> str:
    if spec.returns_weights:
        return "attention weights are requested"
    if spec.has_relative_tables:
        return "tables of relative positions act on values too"
    return ""


MAX_DENSE_MASK = 16_384**2
"""Most entries, queries times keys, of a mask that cuDNN is given as an array: 512 MiB for a
sequence. On an H200, forward and backward over documents in 16,384 tokens: 13 ms, in tiles 54."""


def _cudnn_obstacle(spec: AttentionSpec) -> str:
    if spec.hardware.platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {spec.hardware.platform}"
    capability = spec.hardware.compute_capability
    if capability.startswith("gfx"):
        return f"it runs on NVIDIA GPUs, not on AMD's {capability}"
    if spec.hardware.nvidia_capability is not None and spec.hardware.nvidia_capability < 8:
        return f"it needs compute capability 8.0 (Ampere) or more, and this GPU has {capability}"
    if spec.dtype not in ("bfloat16", "float16"):
        return f"it computes in 16 bits, not in {spec.dtype}"
    if spec.head_dim != spec.value_head_dim:
        return "queries and values have different widths"
    if spec.context_shards > 1:
        return "the queries are spread over devices"
    # Hopper. JAX before 0.10 refuses more than 128 on all others.
    widest = 256 if capability == "9.0" else 128
    if spec.head_dim % 8 or spec.head_dim > widest:
        return f"the head width {spec.head_dim} is not a multiple of 8 up to {widest}"
    if not spec.is_dot_product or spec.has_soft_cap:
        return "it supports dot products only, without a bias or a cap"
    if spec.has_sinks:
        return "it does not support sinks"
    if spec.returns_weights or spec.has_dropout:
        return "it neither returns attention weights nor drops them"
    has_arrays = spec.has_segments or spec.has_extra_masks
    if needs_dense_mask(spec.pattern, spec.keys_match_queries, has_arrays):
        if spec.num_queries % 2 or spec.num_keys % 2:
            return "with a mask other than causal it needs even lengths"
        if spec.num_queries * spec.num_keys > MAX_DENSE_MASK:
            return "the mask is an array with an entry for each query and key, and both are many"
    return ""


def _splash_obstacle(spec: AttentionSpec) -> str:
    if spec.hardware.platform != "tpu":
        return f"it runs on TPUs, not on {spec.hardware.platform}"
    if spec.hardware.count > 1 and not spec.mesh_known:
        return "its kernel is for one chip, and the layout on several is not known"
    if spec.head_dim != spec.value_head_dim:
        return "queries and values have different widths"
    if not spec.is_dot_product:
        return "it supports dot products only, without a bias"
    if spec.returns_weights or spec.has_dropout:
        return "it neither returns attention weights nor drops them"
    if spec.has_sinks:
        return "it does not support sinks"
    if spec.has_extra_masks or spec.pattern.prefix or spec.pattern.dilation > 1:
        return "the mask is more than causal, a window and segments"
    if not (spec.keys_match_queries and spec.pattern.ordered):
        return "it needs the queries' own keys in order"
    return ""


def ring_obstacle(spec: AttentionSpec) -> str:
    """Return why the ring does not support a spec; empty if it does."""
    if spec.context_shards == 1:
        return "tokens are not spread over devices"
    if not spec.is_dot_product:
        return "it supports dot products only, without a bias"
    if spec.returns_weights:
        return "it does not return attention weights"
    if spec.has_extra_masks or spec.pattern.prefix:
        return "the mask is more than causal, a window and segments"
    if not spec.keys_match_queries:
        return "it needs the queries' own keys"
    return ""


OBSTACLES: dict[str, Callable[[AttentionSpec], str]] = {
    "reference": lambda spec: "",
    "query_blocks": _query_blocks_obstacle,
    "blockwise": _blockwise_obstacle,
    "cudnn": _cudnn_obstacle,
    "splash": _splash_obstacle,
    "ring": ring_obstacle,
}
"""Function of each backend that returns why it does not support a spec; empty if it does."""
