import dataclasses
from typing import Any

import pytest

from transformer import Hardware, Pattern
from transformer.attend import Case, Choice, Form, choose

CPU, GPU, TPU = Hardware("cpu"), Hardware("gpu", "NVIDIA H200", 8), Hardware("tpu", "TPU v5p", 4)
CAUSAL = Case(
    hardware=CPU,
    pattern=Pattern(causal=True),
    dtype="float32",
    queries=256,
    keys=256,
    query_width=64,
    value_width=64,
)
T4 = Hardware("gpu", "Tesla T4", 1, "7.5")
ON_GPU = dataclasses.replace(CAUSAL, hardware=GPU, dtype="bfloat16")


@pytest.mark.parametrize(
    ("case", "choice"),
    [
        (CAUSAL, Choice("query_blocks", "the fastest on cpu")),
        (ON_GPU, Choice("cudnn", "the fastest on gpu")),
        (
            dataclasses.replace(
                ON_GPU, hardware=dataclasses.replace(T4, compute_capability="12.1")
            ),
            Choice("cudnn", "the fastest on gpu"),
        ),
        (
            dataclasses.replace(ON_GPU, dtype="float16", pattern=Pattern()),
            Choice("cudnn", "the fastest on gpu"),
        ),
        (
            dataclasses.replace(CAUSAL, queries=127, keys=127),
            Choice(
                "reference",
                "query_blocks cannot serve: 127 queries are fewer than two blocks of 64",
            ),
        ),
        (
            dataclasses.replace(ON_GPU, dtype="float32"),
            Choice("reference", "cudnn cannot serve: it computes in 16 bits, not in float32"),
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
def test_auto_goes_by_hardware_dtype_and_mask(case: Case, choice: Choice) -> None:
    assert choose("auto", case) == choice


def test_auto_on_a_tpu_serves_every_case() -> None:
    case = dataclasses.replace(CAUSAL, hardware=TPU)
    assert choose("auto", case).form == "reference"


@pytest.mark.parametrize("hardware", [CPU, GPU, TPU])
def test_auto_never_keeps_the_scores_of_a_long_sequence(hardware: Hardware) -> None:
    long = dataclasses.replace(CAUSAL, hardware=hardware, queries=4096, keys=4096, products=False)
    assert choose("auto", long).form == "blockwise"
    assert choose("auto", dataclasses.replace(long, weights=True)).form == "reference"


def test_auto_does_not_visit_what_a_window_hides() -> None:
    wide = with_pattern(dataclasses.replace(CAUSAL, queries=512, keys=512), window=256)
    assert choose("auto", wide).form == "blockwise"
    assert choose("auto", with_pattern(wide, window=257)).form == "query_blocks"


@pytest.mark.parametrize(
    ("form", "case"), [("reference", CAUSAL), ("query_blocks", CAUSAL), ("cudnn", ON_GPU)]
)
def test_what_is_asked_for_is_taken_if_it_can_serve(form: Form, case: Case) -> None:
    assert choose(form, case) == Choice(form, "asked for")


def with_pattern(case: Case, **fields: Any) -> Case:
    return dataclasses.replace(case, pattern=dataclasses.replace(case.pattern, **fields))


QUERY_BLOCKS = {
    "attention weights are requested": dataclasses.replace(CAUSAL, weights=True),
    "it needs a causal mask over tokens in order": with_pattern(CAUSAL, causal=False),
    "a prefix is seen by earlier queries": with_pattern(CAUSAL, prefix=True),
    "3 queries are fewer than two blocks of 64": dataclasses.replace(CAUSAL, queries=3),
}


@pytest.mark.parametrize("obstacle", QUERY_BLOCKS)
def test_obstacles_to_query_blocks(obstacle: str) -> None:
    choice = choose("query_blocks", QUERY_BLOCKS[obstacle])
    assert choice == Choice("reference", f"query_blocks cannot serve: {obstacle}", fell_back=True)


@pytest.mark.parametrize(
    "case",
    [with_pattern(CAUSAL, ordered=False), dataclasses.replace(CAUSAL, own_keys=False)],
    ids=["out of order", "other keys"],
)
def test_query_blocks_need_their_own_tokens_in_order(case: Case) -> None:
    assert "a causal mask over tokens in order" in choose("query_blocks", case).why


def test_query_blocks_serve_windows_segments_dropout_and_biases() -> None:
    given: dict[str, Any] = dict(segments=True, dropout=True, products=False)
    case = dataclasses.replace(with_pattern(CAUSAL, window=7), **given)
    assert choose("query_blocks", case).form == "query_blocks"


CUDNN: dict[str, Any] = {
    "it runs on NVIDIA GPUs, not on cpu": {"hardware": CPU},
    "it runs on NVIDIA GPUs, not on tpu": {"hardware": TPU},
    "it runs on NVIDIA GPUs, not on AMD's gfx942": {
        "hardware": Hardware("gpu", "AMD Instinct MI300X", 8, "gfx942")
    },
    "it needs compute capability 8.0 (Ampere) or more, and this GPU has 7.5": {"hardware": T4},
    "it computes in 16 bits, not in float32": {"dtype": "float32"},
    "queries and values have different widths": {"value_width": 32},
    "its scores are products alone, without a bias or a cap": {"products": False},
    "the head width 36 is no multiple of 8 up to 128": {"query_width": 36, "value_width": 36},
    "the head width 136 is no multiple of 8 up to 128": {"query_width": 136, "value_width": 136},
    "causal attention to other keys than the queries' own": {"own_keys": False},
}


@pytest.mark.parametrize("obstacle", CUDNN)
def test_obstacles_to_cudnn(obstacle: str) -> None:
    case = dataclasses.replace(ON_GPU, **CUDNN[obstacle])
    choice = choose("cudnn", case)
    assert choice == Choice("reference", f"cudnn cannot serve: {obstacle}", fell_back=True)


@pytest.mark.parametrize("field", ["weights", "dropout"])
def test_cudnn_neither_shows_nor_drops_weights(field: str) -> None:
    given: Any = {field: True}
    case = dataclasses.replace(ON_GPU, **given)
    assert choose("cudnn", case).why.endswith("it neither returns attention weights nor drops them")


@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(ON_GPU, segments=True),
        with_pattern(ON_GPU, window=7),
        with_pattern(ON_GPU, prefix=True),
        with_pattern(ON_GPU, ordered=False),
    ],
    ids=["segments", "window", "prefix", "out of order"],
)
def test_cudnn_serves_causal_masks_alone(case: Case) -> None:
    assert choose("cudnn", case).why == "cudnn cannot serve: the mask is more than causal"
