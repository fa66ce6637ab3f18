"""Reasons why an attention kernel of GPUs or TPUs, or the ring over devices, cannot serve."""

from collections.abc import Callable

from transformer.attention.backends.choose import AttentionSpec
from transformer.attention.backends.cudnn import reads_pattern

MAX_DENSE_MASK = 16_384**2
"""Most entries, queries times keys, of a mask that cuDNN is given as an array: 512 MiB for a
sequence. On an H200, forward and backward over documents in 16,384 tokens: 13 ms, in tiles 54."""


def _cudnn_obstacle(spec: AttentionSpec) -> str:
    if spec.hardware.platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {spec.hardware.platform}"
    capability = spec.hardware.compute_capability
    if capability.startswith("gfx"):
        return f"it runs on NVIDIA GPUs, not on AMD's {capability}"
    if capability and float(capability) < 8:
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
    if not spec.dot_product_only:
        return "it supports dot products only, without a bias or a cap"
    if spec.has_sinks:
        return "it does not support sinks"
    if spec.returns_weights or spec.has_dropout:
        return "it neither returns attention weights nor drops them"
    if _cudnn_needs_array(spec):
        if spec.num_queries % 2 or spec.num_keys % 2:
            return "with a mask other than causal it needs even lengths"
        if spec.num_queries * spec.num_keys > MAX_DENSE_MASK:
            return "the mask is an array with an entry for each query and key, and both are many"
    return ""


def _cudnn_needs_array(spec: AttentionSpec) -> bool:
    """Return True if the mask is not one that cuDNN computes from indices."""
    has_arrays = spec.has_segments or spec.has_extra_masks
    return has_arrays or not reads_pattern(spec.pattern, spec.keys_match_queries)


def _splash_obstacle(spec: AttentionSpec) -> str:
    if spec.hardware.platform != "tpu":
        return f"it runs on TPUs, not on {spec.hardware.platform}"
    if spec.hardware.count > 1 and not spec.mesh_known:
        return "its kernel is for one chip, and the layout on several is not known"
    if spec.head_dim != spec.value_head_dim:
        return "queries and values have different widths"
    if spec.has_relative_tables or not (spec.dot_product_only or spec.soft_capped):
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
    if spec.has_relative_tables or not (spec.dot_product_only or spec.soft_capped):
        return "it supports dot products only, without a bias"
    if spec.returns_weights:
        return "it does not return attention weights"
    if spec.has_extra_masks or spec.pattern.prefix:
        return "the mask is more than causal, a window and segments"
    if not spec.keys_match_queries:
        return "it needs the queries' own keys"
    return ""


KERNEL_OBSTACLES: dict[str, Callable[[AttentionSpec], str]] = {
    "cudnn": _cudnn_obstacle,
    "splash": _splash_obstacle,
    "ring": ring_obstacle,
}
"""Function of each backend that returns why it does not support a spec; empty if it does."""
