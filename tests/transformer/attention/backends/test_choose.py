import dataclasses
from typing import Any

import pytest

from transformer import Hardware, MaskPattern
from transformer.attention.attention_config import Backend
from transformer.attention.backends.choose import AttentionSpec, BackendChoice, choose_backend

CPU, GPU, TPU = Hardware("cpu"), Hardware("gpu", "NVIDIA H200", 8), Hardware("tpu", "TPU v5p", 4)
CAUSAL = AttentionSpec(
    hardware=CPU,
    pattern=MaskPattern(causal=True),
    dtype="float32",
    num_queries=256,
    num_keys=256,
    head_dim=64,
    value_head_dim=64,
)
T4 = Hardware("gpu", "Tesla T4", 1, "7.5")
ON_GPU = dataclasses.replace(CAUSAL, hardware=GPU, dtype="bfloat16")


@pytest.mark.parametrize(
    ("case", "choice"),
    [
        (CAUSAL, BackendChoice("query_blocks", "the fastest on cpu")),
        (ON_GPU, BackendChoice("cudnn", "the fastest on gpu")),
        (
            dataclasses.replace(
                ON_GPU, hardware=dataclasses.replace(T4, compute_capability="12.1")
            ),
            BackendChoice("cudnn", "the fastest on gpu"),
        ),
        (
            dataclasses.replace(ON_GPU, dtype="float16", pattern=MaskPattern()),
            BackendChoice("cudnn", "the fastest on gpu"),
        ),
        (
            dataclasses.replace(CAUSAL, num_queries=127, num_keys=127),
            BackendChoice(
                "reference",
                "query_blocks cannot serve: 127 queries are fewer than two blocks of 64",
            ),
        ),
        (
            dataclasses.replace(ON_GPU, dtype="float32"),
            BackendChoice(
                "query_blocks", "cudnn cannot serve: it computes in 16 bits, not in float32"
            ),
        ),
    ],
    ids=[
        "cpu",
        "gpu",
        "a newer gpu",
        "gpu in both directions",
        "short on a cpu",
        "float32 on a gpu",
    ],
)
def test_auto_depends_on_hardware_dtype_and_mask(
    case: AttentionSpec, choice: BackendChoice
) -> None:
    assert choose_backend("auto", case) == choice


def test_auto_on_tpu_falls_back_to_reference() -> None:
    case = dataclasses.replace(CAUSAL, hardware=TPU)
    assert choose_backend("auto", case).backend == "reference"


@pytest.mark.parametrize("hardware", [CPU, GPU, TPU])
def test_auto_never_materializes_scores_of_long_sequences(hardware: Hardware) -> None:
    long = dataclasses.replace(
        CAUSAL, hardware=hardware, num_queries=4096, num_keys=4096, dot_product_only=False
    )
    assert choose_backend("auto", long).backend == "blockwise"
    assert (
        choose_backend("auto", dataclasses.replace(long, returns_weights=True)).backend
        == "reference"
    )


def test_auto_skips_tiles_outside_a_window() -> None:
    wide_window = with_pattern(
        dataclasses.replace(CAUSAL, num_queries=512, num_keys=512), window=256
    )
    assert choose_backend("auto", wide_window).backend == "blockwise"
    assert choose_backend("auto", with_pattern(wide_window, window=257)).backend == "query_blocks"


@pytest.mark.parametrize(
    ("backend", "case"), [("reference", CAUSAL), ("query_blocks", CAUSAL), ("cudnn", ON_GPU)]
)
def test_requested_backend_is_used_if_supported(backend: Backend, case: AttentionSpec) -> None:
    assert choose_backend(backend, case) == BackendChoice(backend, "asked for")


def with_pattern(case: AttentionSpec, **fields: Any) -> AttentionSpec:
    return dataclasses.replace(case, pattern=dataclasses.replace(case.pattern, **fields))


QUERY_BLOCKS = {
    "attention weights are requested": dataclasses.replace(CAUSAL, returns_weights=True),
    "it needs a causal mask over tokens in order": with_pattern(CAUSAL, causal=False),
    "a prefix is seen by earlier queries": with_pattern(CAUSAL, prefix=True),
    "3 queries are fewer than two blocks of 64": dataclasses.replace(CAUSAL, num_queries=3),
}


@pytest.mark.parametrize("obstacle", QUERY_BLOCKS)
def test_query_blocks_fall_back_with_a_reason(obstacle: str) -> None:
    choice = choose_backend("query_blocks", QUERY_BLOCKS[obstacle])
    assert choice == BackendChoice(
        "reference", f"query_blocks cannot serve: {obstacle}", is_fallback=True
    )


@pytest.mark.parametrize(
    "case",
    [with_pattern(CAUSAL, ordered=False), dataclasses.replace(CAUSAL, keys_match_queries=False)],
    ids=["out of order", "other keys"],
)
def test_query_blocks_require_ordered_self_attention(case: AttentionSpec) -> None:
    assert "a causal mask over tokens in order" in choose_backend("query_blocks", case).reason


def test_query_blocks_support_windows_segments_dropout_and_biases() -> None:
    fields: dict[str, Any] = dict(has_segments=True, has_dropout=True, dot_product_only=False)
    case = dataclasses.replace(with_pattern(CAUSAL, window=7), **fields)
    assert choose_backend("query_blocks", case).backend == "query_blocks"


CUDNN: dict[str, Any] = {
    "it runs on NVIDIA GPUs, not on cpu": {"hardware": CPU},
    "it runs on NVIDIA GPUs, not on tpu": {"hardware": TPU},
    "it runs on NVIDIA GPUs, not on AMD's gfx942": {
        "hardware": Hardware("gpu", "AMD Instinct MI300X", 8, "gfx942")
    },
    "it needs compute capability 8.0 (Ampere) or more, and this GPU has 7.5": {"hardware": T4},
    "it computes in 16 bits, not in float32": {"dtype": "float32"},
    "queries and values have different widths": {"value_head_dim": 32},
    "it supports dot products only, without a bias or a cap": {"dot_product_only": False},
    "the head width 36 is not a multiple of 8 up to 128": {"head_dim": 36, "value_head_dim": 36},
    "the head width 136 is not a multiple of 8 up to 128": {"head_dim": 136, "value_head_dim": 136},
    "the queries are spread over devices": {
        "context_shards": 2,
        "keys_match_queries": False,
        "num_keys": 512,
    },
    "with a mask other than causal it needs even lengths": {"has_segments": True, "num_keys": 255},
    "the mask is an array with an entry for each query and key, and both are many": {
        "has_segments": True,
        "num_queries": 32_768,
        "num_keys": 32_768,
    },
}


@pytest.mark.parametrize("obstacle", CUDNN)
def test_cudnn_falls_back_with_a_reason(obstacle: str) -> None:
    case = dataclasses.replace(ON_GPU, **CUDNN[obstacle])
    choice = choose_backend("cudnn", case)
    assert choice == BackendChoice("reference", f"cudnn cannot serve: {obstacle}", is_fallback=True)


@pytest.mark.parametrize("field", ["returns_weights", "has_dropout"])
def test_cudnn_rejects_returned_weights_and_dropout(field: str) -> None:
    fields: Any = {field: True}
    case = dataclasses.replace(ON_GPU, **fields)
    assert choose_backend("cudnn", case).reason.endswith(
        "it neither returns attention weights nor drops them"
    )


@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(ON_GPU, has_segments=True),
        dataclasses.replace(ON_GPU, has_extra_masks=True),
        dataclasses.replace(ON_GPU, keys_match_queries=False, num_keys=100),
        dataclasses.replace(ON_GPU, num_queries=32_767, num_keys=32_767),
        with_pattern(ON_GPU, window=7),
        with_pattern(ON_GPU, window=7, causal=False),
        with_pattern(ON_GPU, prefix=True),
        with_pattern(ON_GPU, ordered=False),
    ],
    ids=[
        "segments",
        "other arrays",
        "other keys",
        "odd and long, but causal",
        "window",
        "window in both directions",
        "prefix",
        "out of order",
    ],
)
def test_cudnn_supports_all_masks(case: AttentionSpec) -> None:
    assert choose_backend("auto", case) == BackendChoice("cudnn", "the fastest on gpu")


def test_wide_heads_need_hopper() -> None:
    wide = dataclasses.replace(ON_GPU, head_dim=256, value_head_dim=256)
    hopper = Hardware("gpu", "NVIDIA H200", 1, "9.0")
    assert choose_backend("auto", dataclasses.replace(wide, hardware=hopper)).backend == "cudnn"
    for capability in ("8.0", "10.0"):
        other = Hardware("gpu", "another", 1, capability)
        choice = choose_backend("cudnn", dataclasses.replace(wide, hardware=other))
        assert "multiple of 8 up to 128" in choice.reason
