import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.train.support import LENGTH, tiny
from tests.train.support import light_compiler as light_compiler
from train.data.config import TextDataConfig, TokenizerConfig
from train.engine import JitEngine, make_engine
from train.errors import UserError
from train.estimate.batch_shapes import sharded_batch_shapes
from train.estimate.compiled_memory import trace_residual_bytes
from train.estimate.description import Description, describe, describe_model
from train.estimate.memory_tables import temporaries_differences
from train.experiment import Experiment
from train.optim.muon import Muon
from train.parallel.mesh import MeshConfig
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    EncoderDecoder,
    FeedForwardConfig,
    Hardware,
    LanguageModel,
    LearnedPositions,
    LinearAttentionConfig,
    LuongConfig,
    NoPosition,
    Precision,
    TransformerConfig,
)

# D 7, N 3, K 1, H 5 and 11, F 13, V 17 in 24 rows, 19 positions, L 3: 2,414 parameters, 2,463 with
# padding. B 5, T 11.
BLOCK = BlockConfig(
    mixer=AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=5, value_head_dim=11),
    feed_forward=FeedForwardConfig(d_ff=13),
)
TINY = TransformerConfig(
    vocab_size=17,
    pad_vocab_to_multiple=8,
    d_model=7,
    num_layers=3,
    layer_pattern=(BLOCK,),
    position_embedding=LearnedPositions(19),
)
TOKENS = 5 * 11
A_LAYER = TOKENS * (14 * 7 + 11 * 3)
A_WORKING = 12 * A_LAYER + 8 * TOKENS * 24


def of(
    config: TransformerConfig,
    hardware: Hardware | None = None,
    **options: Any,
) -> Description:
    model = LanguageModel(config, hardware or Hardware())
    return describe_model(model, batch_size=5, sequence_length=11, **options)


def test_memory_item_by_item() -> None:
    memory = of(TINY).memory
    assert memory.weights == 4 * 2463
    assert memory.compute_copy == 0
    assert memory.gradients == 4 * 2463
    assert memory.optimizer == 8 * 2463 + 4  # two moments, and the number of the step
    assert memory.activations.textbook_elements == 3 * A_LAYER
    assert memory.activations.bytes == memory.activations.textbook_bytes == 4 * 3 * A_LAYER
    assert memory.activations.sixteen_bit_bytes == 3 * TOKENS * (34 * 7 + 5 * 11 * 3)
    assert memory.logits == 2 * 4 * TOKENS * 24
    assert memory.textbook_logits == 2 * 4 * TOKENS * 17
    assert memory.total == 9852 + 9852 + 19708 + 12 * A_LAYER + 8 * TOKENS * 24


@pytest.mark.parametrize(
    ("precision", "weights", "copy", "item"),
    [("bfloat16", 4, 2, 2), ("pure_bfloat16", 2, 0, 2)],
)
def test_memory_by_precision(precision: str, weights: int, copy: int, item: int) -> None:
    memory = of(dataclasses.replace(TINY, precision=Precision.parse(precision))).memory
    assert memory.weights == weights * 2463
    assert memory.compute_copy == copy * 2463
    assert memory.gradients == 4 * 2463
    assert memory.optimizer == 8 * 2463 + 4
    assert memory.activations.bytes == item * 3 * A_LAYER


def test_every_precision_and_optimizer_of_the_textbook() -> None:
    found = {(each.precision, each.optimizer): each for each in of(TINY).memory_variants}
    sums = {key: sum(each.textbook_bytes_per_parameter) for key, each in found.items()}
    assert sums == {
        ("float32", "adamw"): 16,
        ("float32", "adamw8bit"): 10,
        ("float32", "sgd"): 12,
        ("bfloat16", "adamw"): 18,
        ("bfloat16", "adamw8bit"): 12,
        ("bfloat16", "sgd"): 14,
    }
    assert found["float32", "sgd"].state_bytes == (4 * 2463, 4 * 2463, 4 * 2463)
    assert found["bfloat16", "adamw"].state_bytes == (6 * 2463, 4 * 2463, 8 * 2463 + 4)
    # No layer of this model has 4,096 numbers of a parameter.
    assert found["float32", "adamw8bit"].state_bytes == found["float32", "adamw"].state_bytes
    halved = found["bfloat16", "sgd"].memory.activations.bytes
    assert found["float32", "sgd"].memory.activations.bytes == 2 * halved


@pytest.mark.slow
def test_eight_bits_are_two_bytes_and_scales_and_what_is_small() -> None:
    model = LanguageModel(TransformerConfig(vocab_size=128, d_model=64, num_layers=3))
    per_layer = {"large": (4 * 64 * 64 + 2 * 64 * 256), "small": 4 * 64 + 256 + 64 + 4 * 64}
    large, small = 128 * 64 + 3 * per_layer["large"], 3 * per_layer["small"] + 2 * 64
    described = describe_model(model, batch_size=5, sequence_length=11)
    assert described.parameters.allocated == large + small
    eight = described.eight_bit_state
    assert (eight.codes, eight.scales, eight.unquantized) == (
        2 * large,
        2 * 4 * large // 256,
        8 * small,
    )
    (found,) = (
        each
        for each in described.memory_variants
        if (each.precision, each.optimizer) == ("float32", "adamw8bit")
    )
    assert found.memory.optimizer == eight.codes + eight.scales + eight.unquantized + 4


def test_a_moving_average_of_the_weights_is_one_more_copy() -> None:
    plain, averaged = of(TINY).memory, of(TINY, ema=True).memory
    assert (plain.ema, averaged.ema) == (0, 4 * 2463)
    assert averaged.total == plain.total + 4 * 2463


def test_cross_attention_keeps_less_than_a_layer() -> None:
    block = dataclasses.replace(BLOCK, cross_attention=BLOCK.mixer)
    config = dataclasses.replace(TINY, layer_pattern=(block,), encoder=EncoderConfig(3, (BLOCK,)))
    model = EncoderDecoder(config)
    found = describe_model(model, batch_size=5, sequence_length=11).memory.activations
    assert found.textbook_elements == 6 * A_LAYER + 3 * TOKENS * (6 * 7 + 11 * 3)


@pytest.mark.slow
def test_what_the_compiler_says_of_the_same_step(tmp_path: Path) -> None:
    """On eight devices: it is given what is described, to the byte; the differences add up."""
    asked = tiny(tmp_path, mesh=MeshConfig(data=2, fsdp=2, tensor=2), accumulate=2)
    asked = dataclasses.replace(asked, model=dataclasses.replace(asked.model, vocab_size=30))
    described = describe(asked, Hardware(count=8), with_compiler=True)
    compiled = described.compiled_memory
    assert compiled is not None
    assert compiled.devices == 8
    text = 2 * LENGTH * 4  # a quarter of 8 windows
    assert compiled.batch == 7 * text + 2 * 4
    assert compiled.arguments == compiled.state + compiled.batch - 2 * text  # there is no source
    counters = 3 * 4 + 8  # the step, the cursor and that of the optimizer; a key
    whole = described.memory.weights + described.memory.optimizer - 4 + counters
    assert whole / 8 < compiled.state < whole
    assert compiled.donated == compiled.state
    assert 0 < compiled.results < 1024
    assert compiled.gradients == 2 * 4 * described.parameters.allocated // 8
    found = sum(temporaries_differences(compiled).values())
    assert found == compiled.temporaries - compiled.estimated_temporaries
    assert json.loads(json.dumps(described.as_dict()))["compiler_bytes"]["devices"] == 8
    text_out = io.StringIO()
    described.print(Console(file=text_out, width=80))
    assert "What the compiler says of one device of 8" in text_out.getvalue()


@pytest.mark.slow
def test_what_differentiation_keeps_grows_with_the_batch_and_shrinks_with_remat(
    tmp_path: Path,
) -> None:
    kept = {}
    for remat in ("none", "full"):
        asked = tiny(tmp_path)
        model = dataclasses.replace(asked.model, vocab_size=30, remat=remat)
        engine = make_engine(dataclasses.replace(asked, model=model), Hardware())
        assert isinstance(engine, JitEngine)
        kept[remat], _ = trace_residual_bytes(
            engine, sharded_batch_shapes(engine.experiment, engine.mesh), 1
        )
    inputs = 2 * 8 * LENGTH * 16 * 4  # of two layers, D 16
    assert inputs <= kept["full"] < inputs + 8 * LENGTH * 16 * 4 * 8
    assert kept["none"] > 4 * kept["full"]


def test_muon_keeps_one_moment_of_the_layers_matrices() -> None:
    matrices = 3 * (7 * 15 + 7 * 5 + 7 * 11 + 33 * 7 + 2 * 7 * 13)
    moments = 4 * (matrices + 2 * (2463 - matrices))
    memory = of(TINY, optimizer=Muon()).memory
    assert moments < memory.optimizer < moments + 64  # and some numbers of steps


def test_microbatches_keep_fewer_activations_and_the_gradients_twice() -> None:
    memory = of(TINY, grad_accum_steps=5).memory
    assert memory.gradients == 2 * 4 * 2463
    assert memory.activations.bytes == 4 * 3 * A_LAYER // 5
    assert memory.logits == 2 * 4 * 11 * 24


@pytest.mark.slow
def test_rematerialised_layers_keep_their_input_and_one_layer_at_a_time() -> None:
    full = of(dataclasses.replace(TINY, remat="full")).memory.activations
    assert full.bytes == 4 * (3 * TOKENS * 7 + A_LAYER)
    dots = of(dataclasses.replace(TINY, remat="dots")).memory.activations
    products = 15 + 5 + 11 + 7 + 13 + 7
    assert dots.bytes == 4 * (3 * TOKENS * (7 + products) + A_LAYER)
    assert full.textbook_bytes == dots.textbook_bytes == 4 * 3 * A_LAYER


@pytest.mark.parametrize(("segments", "scores"), [(False, 0), (True, 11 * 2)])
def test_flash_attention_keeps_no_scores(segments: bool, scores: int) -> None:
    """Documents that are kept apart are more than cuDNN's kernel can do."""
    block = dataclasses.replace(BLOCK, mixer=AttentionConfig(num_heads=2, head_dim=8))
    precision = Precision.parse("bfloat16")
    config = dataclasses.replace(TINY, layer_pattern=(block,), precision=precision)
    memory = of(config, hardware=Hardware("gpu"), segments=segments).memory
    assert memory.activations.bytes == 2 * 3 * TOKENS * (14 * 7 + scores)


def test_decoding_with_fewer_key_value_heads_reads_less() -> None:
    own, multi_head = of(TINY).decoding_costs
    assert (own.num_kv_heads, multi_head.num_kv_heads) == ((1,), (3,))
    assert own.cache_bytes_per_token == 3 * 1 * (5 + 11) * 4
    assert multi_head.cache_bytes_per_token == 3 * own.cache_bytes_per_token
    assert own.cache_bytes == 11 * own.cache_bytes_per_token
    assert own.weight_bytes == 4 * (2463 - 18 * 7)
    assert own.flops == 2688 + 3 * 2 * 3 * 16 * 11 + 1092 + 238
    assert own.bytes_read_per_token(2) == own.weight_bytes / 2 + own.cache_bytes
    assert own.arithmetic_intensity() == own.flops / (own.weight_bytes + own.cache_bytes)


def test_decoding_is_shown_for_multi_head_grouped_and_multi_query_attention() -> None:
    block = dataclasses.replace(BLOCK, mixer=AttentionConfig(num_heads=8, head_dim=5))
    shown = of(dataclasses.replace(TINY, layer_pattern=(block,))).decoding_costs
    assert [each.num_kv_heads for each in shown] == [(8,), (2,), (1,)]


# The decoder of 2 layers: D 4, N 2, K 1, H 3 and 5 in both attentions, F 6, V 10 in 16 rows; a
# source of 3 layers and 9 words.
ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=3, value_head_dim=5)
READS = BlockConfig(mixer=ATTENTION, feed_forward=FeedForwardConfig(d_ff=6))
TRANSLATES = TransformerConfig(
    vocab_size=10,
    pad_vocab_to_multiple=8,
    d_model=4,
    num_layers=2,
    layer_pattern=(dataclasses.replace(READS, cross_attention=ATTENTION),),
    position_embedding=LearnedPositions(19),
    tie_embeddings=False,
    encoder=EncoderConfig(3, (READS,), vocab_size=9),
)


def translating(config: TransformerConfig) -> Description:
    return describe_model(EncoderDecoder(config), batch_size=5, sequence_length=11)


def test_decoding_of_an_encoder_decoder_reads_the_decoder_and_two_caches() -> None:
    own, multi_head = translating(TRANSLATES).decoding_costs
    assert (own.num_kv_heads, multi_head.num_kv_heads) == ((1, 1), (2, 2))
    assert (own.context_length, own.source_length) == (11, 11)
    assert own.cache_bytes_per_token == own.cache_bytes_per_source_token == 4 * 2 * (3 + 5)
    assert own.cache_bytes == 4 * 2 * (3 + 5) * (11 + 11)
    assert multi_head.cache_bytes == 2 * own.cache_bytes

    queries, output = 4 * 6, 10 * 4  # matrices
    keys_and_values = 4 * 3 + 4 * 5
    layer = 2 * (queries + output) + keys_and_values + 2 * 4 * 6  # cross attention's are in a cache
    biases = 2 * (6 + 4) + (3 + 5) + (6 + 4)
    norms = 3 * 2 * 4
    tables = 4 * 16 + 4 + 4  # the output's; a row of the embedding and one of the positions
    assert own.weight_bytes == 4 * (2 * (layer + biases + norms) + 2 * 4 + tables)
    scores = 2 * 11 * 2 * (3 + 5)
    assert own.flops == 2 * (2 * layer + 2 * scores) + 2 * 4 * 10


def test_of_a_tied_table_the_whole_is_read() -> None:
    own, tied = (
        translating(dataclasses.replace(TRANSLATES, tie_embeddings=tied)).decoding_costs[0]
        for tied in (False, True)
    )
    assert tied.weight_bytes == own.weight_bytes - 4 * 4  # without a row of the other
    assert tied.flops == own.flops


def test_a_recurrence_that_reads_a_memory_keeps_it_and_a_state() -> None:
    block = BlockConfig(mixer=LuongConfig(), feed_forward=None, norm=None)
    config = dataclasses.replace(
        TRANSLATES,
        num_layers=1,
        layer_pattern=(block,),
        position_embedding=NoPosition(),
        final_norm=None,
    )
    (own,) = translating(config).decoding_costs
    assert own.num_kv_heads == ()
    assert own.cache_bytes_per_token == 0
    assert own.cache_bytes_per_source_token == 4 * (4 + 4)
    assert own.cache_bytes == 4 * (11 * (4 + 4) + 3 * 4)
    matrices = 4 * 4 * (4 + 4 + 4) + (4 + 4) * 4  # input, state, what is fed; of the result
    assert own.weight_bytes == 4 * (matrices + 4 * 4 + 4 * 16 + 4)
    assert own.flops == 2 * (matrices + 11 * (4 + 4) + 4 * 10)


def test_cross_attention_whose_steps_have_no_formula_is_left_out() -> None:
    block = dataclasses.replace(READS, cross_attention=LinearAttentionConfig(num_heads=2))
    described = translating(dataclasses.replace(TRANSLATES, layer_pattern=(block,)))
    assert described.decoding_costs == ()
    assert described.as_dict()["decoding"] is None


def test_decoding_of_an_encoder_decoder_is_shown_and_in_json() -> None:
    described = translating(TRANSLATES)
    text = io.StringIO()
    described.print(Console(file=text, width=80))
    assert "Decoding after 11 tokens, from a source of 11" in text.getvalue()
    assert "of the source, of which it has 64 B a token" in " ".join(text.getvalue().split())
    plain = json.loads(json.dumps(described.as_dict()))["decoding"]
    assert (plain["context_length"], plain["source_length"], plain["num_kv_heads"]) == (11, 11, [1, 1])
    assert plain["cache_bytes_per_token"] == plain["cache_bytes_per_source_token"] == 64
    assert plain["cache_bytes"] == 22 * 64
    assert plain["bytes_read_per_token"] == plain["weight_bytes"] + 22 * 64
    assert plain["variants"][0]["num_kv_heads"] == [2, 2]
    of_one = json.loads(json.dumps(of(TINY).as_dict()))["decoding"]
    assert (of_one["source_length"], of_one["cache_bytes_per_source_token"]) == (0, 0)


def test_operations_are_shown_at_lengths_that_the_model_can_take() -> None:
    table = dataclasses.replace(TINY, position_embedding=LearnedPositions(700))
    assert [flops.sequence_length for flops in of(table).flops] == [11, 128, 512]
    assert [flops.sequence_length for flops in of(TINY).flops] == [11]


def test_json_is_plain_and_has_the_totals() -> None:
    plain = json.loads(json.dumps(of(TINY).as_dict()))
    assert plain["parameters"]["total"] == 2414
    assert plain["parameters"]["parts"]["positions"] == 19 * 7
    assert plain["parameters"]["estimate"] == 12 * 3 * 49 + 17 * 7
    forward, training = (plain["flops_per_token"][kind] for kind in ("forward", "training"))
    assert forward["total"] == 2688 + 3168 + 1092 + 238
    assert forward["total_causal"] == 2688 + 1728 + 1092 + 238
    assert training == {
        name: value * 3 if isinstance(value, int) and name != "sequence_length" else value
        for name, value in forward.items()
    }
    assert plain["memory_bytes"]["total"] == of(TINY).memory.total
    assert plain["decoding"]["variants"][0]["num_kv_heads"] == [3]


def test_tables_fit_a_narrow_terminal() -> None:
    text = io.StringIO()
    of(TINY).print(Console(file=text, width=80))
    shown = text.getvalue()
    assert "…" not in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["total", "2,414"] in rows
    assert ["gradients", "(float32)", "9.62", "KiB"] in rows
    working = f"{A_WORKING / 1024:.3g}"
    assert ["AdamW", "4+4+8=16", "4+4+8=16", "38.5", "KiB", working, "KiB"] in [r[:7] for r in rows]
    assert ["AdamW", "6+4+8=18", "6+4+8=18", "43.3", "KiB"] in [row[:5] for row in rows]
    assert "--ask-compiler" in shown


def experiment(**tokenizer: Any) -> Experiment:
    data = TextDataConfig(sequence_length=11, tokenizer=TokenizerConfig(**tokenizer))
    return Experiment(model=dataclasses.replace(TINY, vocab_size=0), data=data, batch_size=5)


def test_an_experiment_whose_tokenizer_needs_no_text() -> None:
    described = describe(experiment(kind="byte"))
    assert described.config.vocab_size == 257  # the bytes, and what stands between documents
    assert (described.batch_size, described.sequence_length) == (5, 11)
    assert described.notes == ()


def test_an_experiment_whose_tokenizer_learns_its_words() -> None:
    described = describe(experiment(kind="bpe", vocab_size=509))
    assert described.config.vocab_size == 509
    assert described.as_dict()["notes"] == [
        "the bpe tokenizer is taken to learn all of its 509 tokens"
    ]


def test_an_experiment_whose_words_are_the_characters_of_its_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcab cabca bcabc\n" * 50)
    asked = experiment(kind="character")
    data = dataclasses.replace(
        asked.text_data, path=str(tmp_path / "text.txt"), cache_dir=str(tmp_path / "cache")
    )
    described = describe(dataclasses.replace(asked, data=data))
    assert described.config.vocab_size == len(set("abc \n")) + 1
    missing = dataclasses.replace(data, path=str(tmp_path / "none.txt"))
    with pytest.raises(UserError, match=r"none\.txt.*; or give --model\.vocab-size"):
        describe(dataclasses.replace(asked, data=missing))


def test_importing_it_imports_no_jax() -> None:
    command = "import sys, train.estimate.description, train.doctor.report; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
