import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.race.mixer_costs import products
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    EncoderDecoder,
    FeedForwardConfig,
    LanguageModel,
    LearnedPositions,
    TransformerConfig,
)
from transformer.attention.full import Attention
from transformer.attention.mixer import Mixer
from transformer.attention.position_bias import RelativePositions
from transformer.attention.scores import AdditiveScore, BilinearScore
from transformer.flops import (
    attention_traffic,
    count_decode_step_flops,
    count_token_flops,
    decode_step_weight_bytes,
    estimate_training_flops,
)
from transformer.layers.moe import MoEConfig

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


@pytest.mark.parametrize("config", [TINY, UNTIED], ids=["tied", "untied"])
def test_token_flops(config: TransformerConfig) -> None:
    flops = count_token_flops(LanguageModel(config), 23)
    assert flops.projections == 3 * 2 * (7 * 15 + 7 * 5 + 7 * 11 + 33 * 7)
    assert flops.scores == 3 * 2 * 3 * (5 + 11) * 23
    assert flops.scores_causal == 3 * 2 * 3 * (5 + 11) * sum(range(1, 24)) // 23
    assert flops.feed_forward == 3 * 2 * 2 * 7 * 13
    assert flops.vocabulary == 2 * 7 * 17
    assert flops.total(causal=False) == 2688 + 6624 + 1092 + 238
    assert flops.total(causal=True) == 2688 + 3456 + 1092 + 238


def test_feed_forward_fraction_of_flops() -> None:
    config = TransformerConfig(vocab_size=17, d_model=512, num_layers=1)
    flops = count_token_flops(LanguageModel(config), 512)
    assert flops.feed_forward_fraction() == pytest.approx(16 / (16 + 8 + 4))


def test_only_active_experts_are_counted() -> None:
    mixture = MoEConfig(num_experts=5, num_experts_per_token=2, expert=FeedForwardConfig(d_ff=13))
    block = BlockConfig(mixer=MIXER, feed_forward=mixture)
    flops = count_token_flops(LanguageModel(dataclasses.replace(TINY, layer_pattern=(block,))), 23)
    assert flops.feed_forward == 3 * 2 * (2 * 2 * 7 * 13 + 7 * 5)  # and the router


def test_mixer_without_formula_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "score_flops", Mixer.score_flops)
    flops = count_token_flops(LanguageModel(TINY), 23)
    assert (flops.scores, flops.scores_causal, flops.uncounted) == (0, 0, ("full",))


def for_counting(config: TransformerConfig) -> TransformerConfig:
    """Return the config as the formulas count: every score computed, no padding, layers
    unrolled.
    """
    block = config.layer_pattern[0]
    mixer: Any = dataclasses.replace(block.mixer, backend="reference")  # type: ignore[call-arg]
    pattern = (dataclasses.replace(block, mixer=mixer),)
    return dataclasses.replace(
        config, layer_pattern=pattern, pad_vocab_to_multiple=1, layer_loop="unroll"
    )


def scored(**fields: Any) -> TransformerConfig:
    block = dataclasses.replace(TINY.layer_pattern[0], mixer=dataclasses.replace(MIXER, **fields))
    return dataclasses.replace(TINY, layer_pattern=(block,))


BILINEAR = scored(score=BilinearScore())
RELATIVE = scored(position=RelativePositions(max_distance=2))


def test_score_flops_of_other_scores() -> None:
    """W is a projection, as are those of the MLP, whose hidden layer of 29 has one output."""
    plain = count_token_flops(LanguageModel(TINY), 23)
    bilinear = count_token_flops(LanguageModel(BILINEAR), 23)
    assert bilinear.projections == plain.projections + 3 * 2 * 3 * 5 * 5
    assert bilinear.scores == plain.scores
    additive = count_token_flops(LanguageModel(scored(score=AdditiveScore(29))), 23)
    assert additive.projections == plain.projections + 3 * 2 * (3 + 1) * 5 * 29
    assert additive.scores == 3 * 2 * 3 * (29 + 11) * 23
    assert additive.scores_causal == 3 * 2 * 3 * (29 + 11) * 12


@pytest.mark.parametrize(
    "config",
    [TINY, UNTIED, BILINEAR, RELATIVE],
    ids=["tied", "untied", "bilinear", "relative"],
)
def test_flops_match_matmuls_of_the_program(config: TransformerConfig) -> None:
    model = LanguageModel(for_counting(config))
    tokens = jnp.zeros((2, 13), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    program = jax.make_jaxpr(functools.partial(logits, model))(params, tokens)
    assert products(program.jaxpr) == 2 * 13 * count_token_flops(model, 13).total(causal=False)


def test_decode_step_flops_match_matmuls_of_the_program() -> None:
    """An encoder-decoder with 13 cached tokens and a source of 13 tokens."""
    block = for_counting(BILINEAR).layer_pattern[0]
    config = dataclasses.replace(
        for_counting(BILINEAR),
        layer_pattern=(dataclasses.replace(block, cross_attention=block.mixer),),
        encoder=EncoderConfig(2, TINY.layer_pattern, vocab_size=9),
    )
    model, token = EncoderDecoder(config), jnp.zeros((1, 1), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), token, token)
    cache = model.init_cache(1, 13, 13)

    def step(params: Any, token: jax.Array, positions: jax.Array) -> Any:
        return model.apply(params, None, token, positions=positions, cache=cache).logits

    program = jax.make_jaxpr(step)(params, token, token)
    assert products(program.jaxpr) == count_decode_step_flops(model, 13).total(causal=False)


def test_decode_step_of_a_language_model_uses_all_weights() -> None:
    model = LanguageModel(TINY)
    assert count_decode_step_flops(model, 13) == count_token_flops(model, 13)


def test_encoder_decoder_decode_step_reads_decoder_weights() -> None:
    """A decoder is a language model with other layers, plus cross attention without keys and
    values.
    """
    block = dataclasses.replace(TINY.layer_pattern[0], cross_attention=MIXER)
    config = dataclasses.replace(
        TINY, layer_pattern=(block,), encoder=EncoderConfig(2, TINY.layer_pattern, vocab_size=9)
    )
    cross = 7 * 15 + 15 + 33 * 7 + 7 + 2 * 7  # query and output projections, and a norm
    alone = decode_step_weight_bytes(LanguageModel(TINY))
    assert decode_step_weight_bytes(EncoderDecoder(config)) == alone + 4 * 3 * cross
    biased = dataclasses.replace(config, logit_bias=True)  # as in Marian; no matrix product
    step = count_decode_step_flops(EncoderDecoder(biased), 13)
    assert step == count_decode_step_flops(EncoderDecoder(config), 13)


def logits(model: LanguageModel, params: Any, tokens: jax.Array) -> Any:
    output: Any = model.apply(params, tokens)
    return output.logits


def test_flops_match_the_compiler() -> None:
    """It also counts norms, softmax and GELU: 1% more at this size."""
    block = BlockConfig(mixer=AttentionConfig(num_heads=2, backend="reference"))
    config = TransformerConfig(
        vocab_size=97,
        pad_vocab_to_multiple=1,
        d_model=256,
        num_layers=2,
        layer_pattern=(block,),
        layer_loop="unroll",
    )
    model = LanguageModel(config)
    tokens = jnp.zeros((2, 64), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    forward = jax.jit(functools.partial(logits, model))
    analysis: Any = forward.lower(params, tokens).compile().cost_analysis()
    counted = 2 * 64 * count_token_flops(model, 64).total(causal=False)
    assert 1 < analysis["flops"] / counted < 1.03


def test_decode_step_reads_one_embedding_row() -> None:
    positions, embedding = 18 * 7, 23 * 7
    assert decode_step_weight_bytes(LanguageModel(TINY)) == 4 * (2463 - positions)
    allocated = 2463 + 24 * 7
    assert decode_step_weight_bytes(LanguageModel(UNTIED)) == 4 * (
        allocated - positions - embedding
    )


def test_attention_traffic_of_scores() -> None:
    traffic = attention_traffic(LanguageModel(TINY), 23)
    assert traffic.flash == 3 * 4 * (3 * 5 + 5 + 11 + 3 * 11)
    assert traffic.plain - traffic.flash == 3 * 4 * (4 * 3 * 23)


def test_estimate() -> None:
    assert estimate_training_flops(TINY, parameters=2414, length=23) == 6 * 2414 + 12 * 3 * 7 * 23
