"""Which backend is chosen, for each kind of call."""

import dataclasses
from typing import Any

import pytest

from transformer import Hardware, MaskPattern
from transformer.attention.backends.choose import (
    AttentionSpec,
    Backend,
    BackendChoice,
    choose_backend,
)

CPU, GPU, TPU = Hardware("cpu"), Hardware("gpu", "NVIDIA H200", 8), Hardware("tpu", "TPU v5p", 4)
T4 = Hardware("gpu", "Tesla T4", 1, "7.5")
CAUSAL = AttentionSpec(
    hardware=CPU,
    pattern=MaskPattern(causal=True),
    dtype="float32",
    num_queries=256,
    num_keys=256,
    head_dim=64,
    value_head_dim=64,
)
ON_GPU = dataclasses.replace(CAUSAL, hardware=GPU, dtype="bfloat16")
ON_TPU = AttentionSpec(
    Hardware("tpu", "TPU v5e"), MaskPattern(causal=True), "bfloat16", 4096, 4096, 128, 128
)
SPECS = {"query_blocks": CAUSAL, "cudnn": ON_GPU, "splash": ON_TPU}


def changed(spec: AttentionSpec, fields: dict[str, Any]) -> AttentionSpec:
    """Return the spec with other fields; those of the mask's pattern too."""
    of_pattern = {key: each for key, each in fields.items() if hasattr(spec.pattern, key)}
    fields = {key: each for key, each in fields.items() if key not in of_pattern}
    return dataclasses.replace(
        spec, pattern=dataclasses.replace(spec.pattern, **of_pattern), **fields
    )


@pytest.mark.parametrize(
    ("spec", "fields", "backend"),
    [
        (CAUSAL, {}, "query_blocks"),
        (CAUSAL, dict(num_queries=128, num_keys=128), "query_blocks"),
        (CAUSAL, dict(num_queries=127, num_keys=127), "reference"),
        (CAUSAL, dict(hardware=TPU), "reference"),
        # Tiles outside of a window are skipped, if it leaves enough of them.
        (CAUSAL, dict(num_queries=512, num_keys=512, window=256), "blockwise"),
        (CAUSAL, dict(num_queries=512, num_keys=512, window=257), "query_blocks"),
        (ON_GPU, {}, "cudnn"),
        (ON_GPU, dict(has_segments=True), "cudnn"),
        (ON_GPU, dict(has_extra_masks=True), "cudnn"),
        (ON_GPU, dict(keys_match_queries=False, num_keys=100), "cudnn"),
        (ON_GPU, dict(num_queries=32_767, num_keys=32_767), "cudnn"),  # odd and long, but causal
        (ON_GPU, dict(window=7), "cudnn"),
        (ON_GPU, dict(window=7, causal=False), "cudnn"),
        (ON_GPU, dict(prefix=True), "cudnn"),
        (ON_GPU, dict(ordered=False), "cudnn"),
        (ON_GPU, dict(hardware=dataclasses.replace(T4, compute_capability="12.1")), "cudnn"),
        (ON_GPU, dict(dtype="float16", causal=False), "cudnn"),
        (ON_GPU, dict(dtype="float32"), "query_blocks"),
        (ON_TPU, {}, "splash"),
        (ON_TPU, dict(hardware=Hardware("tpu", "TPU v5e", 8)), "blockwise"),
        (ON_TPU, dict(hardware=Hardware("tpu", "TPU v5e", 8), mesh_known=True), "splash"),
    ],
)
def test_auto(spec: AttentionSpec, fields: dict[str, Any], backend: Backend) -> None:
    assert choose_backend("auto", changed(spec, fields)).backend == backend


@pytest.mark.parametrize("hardware", [CPU, GPU, TPU])
def test_auto_never_materializes_scores_of_long_sequences(hardware: Hardware) -> None:
    long = dict(hardware=hardware, num_queries=4096, num_keys=4096, is_dot_product=False)
    assert choose_backend("auto", changed(CAUSAL, long)).backend == "blockwise"
    weights = changed(CAUSAL, long | dict(returns_weights=True))
    assert choose_backend("auto", weights).backend == "reference"


def test_wide_heads_need_hopper() -> None:
    wide = changed(ON_GPU, dict(head_dim=256, value_head_dim=256))
    for capability, backend in (("9.0", "cudnn"), ("8.0", "reference"), ("10.0", "reference")):
        spec = changed(wide, dict(hardware=Hardware("gpu", "some", 1, capability)))
        assert choose_backend("cudnn", spec).backend == backend


@pytest.mark.parametrize("backend", SPECS)
def test_requested_backend_is_used_if_supported(backend: Any) -> None:
    assert choose_backend(backend, SPECS[backend]) == BackendChoice(backend, "asked for")


def test_query_blocks_support_windows_segments_dropout_and_biases() -> None:
    fields = dict(has_segments=True, has_dropout=True, is_dot_product=False, window=7)
    assert choose_backend("query_blocks", changed(CAUSAL, fields)).backend == "query_blocks"


OBSTACLES: list[tuple[str, dict[str, Any], str]] = [
    ("query_blocks", dict(returns_weights=True), "weights are requested"),
    ("query_blocks", dict(causal=False), "a causal mask"),
    ("query_blocks", dict(ordered=False), "over tokens in order"),
    ("query_blocks", dict(keys_match_queries=False), "a causal mask"),
    ("query_blocks", dict(prefix=True), "a prefix"),
    ("query_blocks", dict(num_queries=3), "3 queries"),
    ("cudnn", dict(hardware=CPU), "not on cpu"),
    ("cudnn", dict(hardware=TPU), "not on tpu"),
    ("cudnn", dict(hardware=Hardware("gpu", "AMD Instinct MI300X", 8, "gfx942")), "not on AMD"),
    ("cudnn", dict(hardware=T4), "compute capability"),
    ("cudnn", dict(dtype="float32"), "16 bits"),
    ("cudnn", dict(value_head_dim=32), "different widths"),
    ("cudnn", dict(is_dot_product=False), "dot products only"),
    ("cudnn", dict(returns_weights=True), "returns attention weights"),
    ("cudnn", dict(has_dropout=True), "drops them"),
    ("cudnn", dict(head_dim=36, value_head_dim=36), "multiple of 8"),
    ("cudnn", dict(head_dim=136, value_head_dim=136), "up to 128"),
    ("cudnn", dict(context_shards=2, keys_match_queries=False, num_keys=512), "over devices"),
    ("cudnn", dict(has_segments=True, num_keys=255), "even lengths"),
    ("cudnn", dict(has_segments=True, num_queries=32_768, num_keys=32_768), "is an array"),
    ("splash", dict(hardware=CPU), "not on cpu"),
    ("splash", dict(value_head_dim=64), "different widths"),
    ("splash", dict(is_dot_product=False), "dot products only"),
    ("splash", dict(returns_weights=True), "returns attention weights"),
    ("splash", dict(has_sinks=True), "sinks"),
    ("splash", dict(has_extra_masks=True), "more than causal"),
    ("splash", dict(keys_match_queries=False), "own keys"),
]


@pytest.mark.parametrize(("backend", "fields", "obstacle"), OBSTACLES)
def test_unsupported_calls_fall_back_with_a_reason(
    backend: Any, fields: dict[str, Any], obstacle: str
) -> None:
    choice = choose_backend(backend, changed(SPECS[backend], fields))
    assert (choice.backend, choice.is_fallback) == ("reference", True)
    assert choice.reason.startswith(f"{backend} cannot serve: ")
    assert obstacle in choice.reason
