import dataclasses
import io
import json

from rich.console import Console

from tests.train.estimate.tiny_models import (
    BLOCK,
    ENCODER_BLOCK,
    TINY,
    TRANSLATOR,
    describe_tiny,
    describe_translator,
)
from tests.train.support import light_compiler as light_compiler
from transformer import (
    AttentionConfig,
    BlockConfig,
    LinearAttentionConfig,
    LuongConfig,
    NoPosition,
)


def test_fewer_key_value_heads_read_less_cache() -> None:
    own, multi_head = describe_tiny(TINY).decoding_costs
    assert (own.num_kv_heads, multi_head.num_kv_heads) == ((1,), (3,))
    assert own.cache_bytes_per_token == 3 * 1 * (5 + 11) * 4
    assert multi_head.cache_bytes_per_token == 3 * own.cache_bytes_per_token
    assert own.cache_bytes == 11 * own.cache_bytes_per_token
    assert own.weight_bytes == 4 * (2463 - 18 * 7)
    assert own.flops == 2688 + 3 * 2 * 3 * 16 * 11 + 1092 + 238
    assert own.bytes_read_per_token(2) == own.weight_bytes / 2 + own.cache_bytes
    assert own.arithmetic_intensity() == own.flops / (own.weight_bytes + own.cache_bytes)


def test_decoding_variants_are_multi_head_grouped_and_multi_query() -> None:
    block = dataclasses.replace(BLOCK, mixer=AttentionConfig(num_heads=8, head_dim=5))
    shown = describe_tiny(dataclasses.replace(TINY, layer_pattern=(block,))).decoding_costs
    assert [each.num_kv_heads for each in shown] == [(8,), (2,), (1,)]


def test_decoding_of_an_encoder_decoder_reads_decoder_weights_and_both_caches() -> None:
    own, multi_head = describe_translator(TRANSLATOR).decoding_costs
    assert (own.num_kv_heads, multi_head.num_kv_heads) == ((1, 1), (2, 2))
    assert (own.context_length, own.source_length) == (11, 11)
    assert own.cache_bytes_per_token == own.cache_bytes_per_source_token == 4 * 2 * (3 + 5)
    assert own.cache_bytes == 4 * 2 * (3 + 5) * (11 + 11)
    assert multi_head.cache_bytes == 2 * own.cache_bytes

    queries, output = 4 * 6, 10 * 4  # matrices
    keys_and_values = 4 * 3 + 4 * 5
    layer = (
        2 * (queries + output) + keys_and_values + 2 * 4 * 6
    )  # those of cross attention are cached
    biases = 2 * (6 + 4) + (3 + 5) + (6 + 4)
    norms = 3 * 2 * 4
    tables = 4 * 16 + 4 + 4  # the output matrix, one row of the embedding and one of the positions
    assert own.weight_bytes == 4 * (2 * (layer + biases + norms) + 2 * 4 + tables)
    scores = 2 * 11 * 2 * (3 + 5)
    assert own.flops == 2 * (2 * layer + 2 * scores) + 2 * 4 * 10


def test_tied_output_table_is_read_whole() -> None:
    own, tied = (
        describe_translator(dataclasses.replace(TRANSLATOR, tie_embeddings=tied)).decoding_costs[0]
        for tied in (False, True)
    )
    assert tied.weight_bytes == own.weight_bytes - 4 * 4  # without a separate embedding row
    assert tied.flops == own.flops


def test_recurrent_decoder_caches_memory_and_state() -> None:
    block = BlockConfig(mixer=LuongConfig(), feed_forward=None, norm=None)
    config = dataclasses.replace(
        TRANSLATOR,
        num_layers=1,
        layer_pattern=(block,),
        position_embedding=NoPosition(),
        final_norm=None,
    )
    (own,) = describe_translator(config).decoding_costs
    assert own.num_kv_heads == ()
    assert own.cache_bytes_per_token == 0
    assert own.cache_bytes_per_source_token == 4 * (4 + 4)
    assert own.cache_bytes == 4 * (11 * (4 + 4) + 3 * 4)
    matrices = 4 * 4 * (4 + 4 + 4) + (4 + 4) * 4  # input, state and fed-back context; output
    assert own.weight_bytes == 4 * (matrices + 4 * 4 + 4 * 16 + 4)
    assert own.flops == 2 * (matrices + 11 * (4 + 4) + 4 * 10)


def test_cross_attention_without_cost_formula_has_no_decoding_cost() -> None:
    block = dataclasses.replace(ENCODER_BLOCK, cross_attention=LinearAttentionConfig(num_heads=2))
    described = describe_translator(dataclasses.replace(TRANSLATOR, layer_pattern=(block,)))
    assert described.decoding_costs == ()
    assert described.as_dict()["decoding"] is None


def test_decoding_of_an_encoder_decoder_in_tables_and_json() -> None:
    described = describe_translator(TRANSLATOR)
    text = io.StringIO()
    described.print(Console(file=text, width=80))
    assert "Decoding after 11 tokens, from a source of 11" in text.getvalue()
    assert "the source, which takes 64 B per source token" in " ".join(text.getvalue().split())
    plain = json.loads(json.dumps(described.as_dict()))["decoding"]
    assert (plain["context_length"], plain["source_length"]) == (11, 11)
    assert plain["num_kv_heads"] == [1, 1]
    assert plain["cache_bytes_per_token"] == plain["cache_bytes_per_source_token"] == 64
    assert plain["cache_bytes"] == 22 * 64
    assert plain["bytes_read_per_token"] == plain["weight_bytes"] + 22 * 64
    assert plain["variants"][0]["num_kv_heads"] == [2, 2]
    of_one = json.loads(json.dumps(describe_tiny(TINY).as_dict()))["decoding"]
    assert (of_one["source_length"], of_one["cache_bytes_per_source_token"]) == (0, 0)
