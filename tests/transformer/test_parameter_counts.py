import dataclasses

import pytest

from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LanguageModel,
    LearnedPositions,
    Precision,
    TransformerConfig,
)
from transformer.layers.moe import MoEConfig
from transformer.parameter_counts import cache_bytes, count_parameters, estimate_parameters

# D 7, N 3, K 1, H 5 and 11, F 13, V 17 in 24 rows, 19 positions, L 3.
MIXER = AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=5, value_head_dim=11)
TINY = TransformerConfig(
    vocab_size=17,
    pad_vocab_to_multiple=8,
    d_model=7,
    num_layers=3,
    layer_pattern=(BlockConfig(mixer=MIXER, feed_forward=FeedForwardConfig(d_ff=13)),),
    position_embedding=LearnedPositions(19),
)
UNTIED = dataclasses.replace(TINY, tie_embeddings=False)


def test_parameter_counts_by_part() -> None:
    counted = count_parameters(LanguageModel(TINY))
    attention = (7 * 15 + 15) + (7 * 5 + 5) + (7 * 11 + 11) + (33 * 7 + 7)
    feed_forward = (7 * 13 + 13) + (13 * 7 + 7)
    assert counted.by_part == {
        "embedding": 17 * 7,
        "positions": 19 * 7,
        "attention": 3 * attention,
        "feed_forward": 3 * feed_forward,
        "norms": 7 * 2 * 7,
        "output": 0,
    }
    assert (counted.total, counted.padding, counted.allocated) == (2414, 49, 2463)


def test_untied_output_matrix_is_counted() -> None:
    counted = count_parameters(LanguageModel(UNTIED))
    assert (counted.by_part["output"], counted.total, counted.padding) == (119, 2414 + 119, 98)


def test_layer_pattern_with_different_places() -> None:
    wide_block = BlockConfig(mixer=MIXER, feed_forward=FeedForwardConfig(d_ff=29, bias=False))
    mixed = dataclasses.replace(
        TINY, layer_pattern=(*TINY.layer_pattern, wide_block)
    )  # layers 0 and 2, and layer 1
    parts = count_parameters(LanguageModel(mixed)).by_part
    assert parts["feed_forward"] == 2 * (2 * 7 * 13 + 13 + 7) + 2 * 7 * 29


def test_active_parameters_of_experts() -> None:
    part = FeedForwardConfig(d_ff=13)
    mixture = MoEConfig(num_experts=5, num_experts_per_token=2, expert=part)
    block = BlockConfig(mixer=MIXER, feed_forward=mixture)
    counted = count_parameters(
        LanguageModel(dataclasses.replace(TINY, layer_pattern=(*TINY.layer_pattern, block)))
    )
    expert = 7 * 13 + 13 + 13 * 7 + 7
    assert counted.by_part["feed_forward"] == 2 * expert + 5 * expert + 7 * 5
    assert counted.active == counted.total - 3 * expert
    mixture = dataclasses.replace(mixture, shared_expert=part, shared_expert_gate=True)
    block = dataclasses.replace(block, feed_forward=mixture)
    shared = count_parameters(
        LanguageModel(dataclasses.replace(TINY, layer_pattern=(*TINY.layer_pattern, block)))
    )
    assert shared.total == counted.total + expert + 7
    assert shared.active == counted.active + expert + 7
    assert count_parameters(LanguageModel(TINY)).active == 2414


def test_estimate() -> None:
    assert estimate_parameters(TINY) == 12 * 3 * 49 + 17 * 7


def test_model_without_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size 0"):
        count_parameters(LanguageModel(TransformerConfig()))


def test_cache_bytes() -> None:
    assert cache_bytes(LanguageModel(TINY), 19) == 19 * 3 * (5 + 11) * 4
    half = dataclasses.replace(TINY, precision=Precision.parse("bfloat16"))
    assert cache_bytes(LanguageModel(half), 19) == 19 * 3 * (5 + 11) * 2


def test_offloaded_activations_change_no_counts() -> None:
    """A CPU refuses to train with them, and counts them all the same."""
    offload = dataclasses.replace(TINY, remat="offload")
    assert count_parameters(LanguageModel(offload)) == count_parameters(LanguageModel(TINY))
