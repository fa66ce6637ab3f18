"""Small decoders with their compiled functions, for the tests of generation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.attention.full import AttentionConfig
from transformer.attention.rope import RoPE
from transformer.attention.variants.sliding_window import SlidingWindowConfig
from transformer.baselines.convolution import ConvolutionConfig
from transformer.baselines.recurrent import ElmanConfig, LSTMConfig
from transformer.generation.generate import decode_step, prefill
from transformer.generation.sampling import SamplingConfig
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.moe import MoEConfig
from transformer.layers.norms import NormConfig
from transformer.layers.position_embedding import LearnedPositions, NoPosition
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig
from transformer.models.language_model import LanguageModel

GREEDY = SamplingConfig(temperature=0)

PROMPTS = ([7, 3, 5], [11], [2, 13, 17, 4, 19, 23, 29], [11, 3])

GPT = TransformerConfig(
    vocab_size=61,
    d_model=20,
    num_layers=2,
    layer_pattern=(BlockConfig(mixer=AttentionConfig(num_heads=5)),),
    position_embedding=LearnedPositions(41),
)

_ROTARY = AttentionConfig(num_heads=6, num_kv_heads=3, head_dim=4, bias=False, position=RoPE())

_GATED = FeedForwardConfig(d_ff=29, activation="silu", gated=True, bias=False)

LLAMA = TransformerConfig(
    vocab_size=61,
    d_model=22,
    num_layers=3,
    layer_pattern=(
        BlockConfig(
            mixer=_ROTARY,
            feed_forward=_GATED,
            norm=NormConfig("rms"),
            norm_placement="parallel_shared",
        ),
        BlockConfig(
            mixer=dataclasses.replace(_ROTARY, num_kv_heads=1, value_head_dim=3),
            feed_forward=MoEConfig(5, 2, FeedForwardConfig(d_ff=17)),
            norm=NormConfig("rms"),
        ),
    ),
    tie_embeddings=False,
    logit_bias=True,
    final_norm=NormConfig("rms"),
    layer_loop="scan",
)

OUTPUT_NORMS = dataclasses.replace(
    LLAMA,
    layer_pattern=(
        BlockConfig(
            mixer=SlidingWindowConfig(
                window=4,
                num_heads=6,
                num_kv_heads=3,
                head_dim=4,
                position=RoPE(),
                qk_norm=NormConfig("rms"),
                qk_norm_heads="joint",
            ),
            feed_forward=MoEConfig(5, 2, _GATED, shared_expert=_GATED, shared_expert_gate=True),
            norm_placement="output",
            residual_scale=0.5,
        ),
        BlockConfig(
            mixer=AttentionConfig(
                num_heads=3, head_dim=4, qk_norm=NormConfig(), qk_norm_heads="separate"
            ),
            feed_forward=_GATED,
            norm=NormConfig("layer_offset"),
        ),
    ),
    embedding_scale=3.0,
)

POST = dataclasses.replace(
    GPT,
    layer_pattern=(
        BlockConfig(mixer=AttentionConfig(num_heads=5, num_kv_heads=1), norm_placement="post"),
    ),
    final_norm=None,
    tie_embeddings=False,
    layer_loop="unroll",
)

RECURRENT = dataclasses.replace(
    GPT,
    num_layers=3,
    layer_pattern=tuple(
        BlockConfig(mixer=mixer, feed_forward=None, norm=None)
        for mixer in (LSTMConfig(), ConvolutionConfig(), ElmanConfig(hidden_size=7))
    ),
    position_embedding=NoPosition(),
)


def make_decoder(config: TransformerConfig) -> tuple[LanguageModel, Any]:
    """Return a model whose weights are large enough for its choices to differ."""
    model = LanguageModel(config)
    draw, shapes = np.random.default_rng(0), jax.eval_shape(model.init_params, jax.random.key(0))

    def drawn(leaf: Any) -> jax.Array:
        return jnp.asarray(draw.normal(0, 0.5, leaf.shape).astype(np.float32))

    return model, jax.tree.map(drawn, shapes)


read = jax.jit(prefill, static_argnums=(0, 4))

step = jax.jit(decode_step, static_argnums=0)
