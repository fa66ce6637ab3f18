"""Both ends of a model: embeddings of tokens, and logits over the vocabulary."""

import dataclasses
import math
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, Float, Int, Key

from transformer.layers.activations import cap_logits
from transformer.layers.basic import (
    apply_linear,
    apply_matrix,
    declare_table,
    declare_weight,
    dropout,
    fold_in,
)
from transformer.layers.norms import Norm
from transformer.layers.position_embedding import NoPosition, embed_positions, embed_token_types
from transformer.model_context import ModelContext
from transformer.models.config import TransformerConfig


def declare_embedding(
    module: nn.Module, name: str, num_rows: int, context: ModelContext
) -> Float[Array, "Vp D"]:
    """Declare a token embedding of `module`, of width `context.d_model`."""
    return declare_table(
        module,
        name,
        inputs={"vocab": num_rows},
        outputs={"embed": context.d_model},
        context=context,
    )


def embed_tokens(
    module: nn.Module,
    embedding_table: Float[Array, "Vp De"],  # De: D, or `embedding_dim`
    tokens: Int[Array, "B T"],
    positions: Int[Array, "#B T"],
    token_types: Int[Array, "#B T"] | None,  # below `num_token_types`; None: all 0
    dropout_rngs: Key[Array, "B"] | None,
    *,
    config: TransformerConfig,
    context: ModelContext,
) -> Float[Array, "B T D"]:
    """Sum token, position and token-type embeddings, then apply norm, dropout and projection."""
    narrow = dataclasses.replace(context, d_model=config.embedding_width)
    # The rows of the table may be sharded, but not D: the gather picks whole rows.
    x = context.constrain(embedding_table, ("vocab", None))[tokens]
    if config.scale_embeddings:
        x = x * math.sqrt(config.d_model)
    if config.embedding_scale != 1:
        x = x * config.embedding_scale
    if not isinstance(config.position_embedding, NoPosition):  # RoPE acts in the attention layers
        x = x + embed_positions(module, positions, config.position_embedding, narrow)
    if config.num_token_types:
        x = x + embed_token_types(module, token_types, config.num_token_types, narrow)
    x = finish_embedding(x.astype(config.precision.compute), dropout_rngs, config, context)
    if config.embedding_dim:
        widths = {"embed": config.embedding_dim}, {"embed": config.d_model}
        x = apply_linear(module, "embedding_projection", x, *widths, context, bias=True)
    return x


def finish_embedding(
    x: Float[Array, "B T D"],
    dropout_rngs: Key[Array, "B"] | None,
    config: TransformerConfig,
    context: ModelContext,
) -> Float[Array, "B T D"]:
    """Apply the norm and the dropout of summed embeddings, in the scope of the calling module."""
    if config.embedding_norm is not None:
        x = Norm(config.embedding_norm, context, name="embedding_norm")(x)
    x = dropout(x, config.embedding_dropout, embedding_rngs(dropout_rngs, context))
    return context.constrain(x, ("batch", "length", None))


# Of the random streams of a model, 0 to L - 1 belong to its layers.


def embedding_rngs(
    dropout_rngs: Key[Array, "B"] | None, context: ModelContext
) -> Key[Array, "B"] | None:
    """Return the keys of the dropout of embeddings: stream L."""
    return fold_in(dropout_rngs, context.num_layers)


def head_rngs(
    dropout_rngs: Key[Array, "B"] | None, context: ModelContext
) -> Key[Array, "B"] | None:
    """Return the keys of the dropout before a classifier's head: stream L + 1."""
    return fold_in(dropout_rngs, context.num_layers + 1)


def declare_output_matrix(
    module: nn.Module,
    embedding_table: Float[Array, "Vp D"],
    config: TransformerConfig,
    context: ModelContext,
) -> Float[Array, "D Vp"]:
    """Return the embedding table, transposed, or declare a weight `output` if they are not tied."""
    if config.tie_embeddings:
        return _scale_output(embedding_table.T, config)
    matrix = declare_table(
        module,
        "output",
        inputs={"embed": config.embedding_width},
        outputs={"vocab": config.padded_vocab_size},
        context=context,
    )
    return _scale_output(matrix, config)


def get_output_matrix(params: Any, config: TransformerConfig) -> Float[Array, "D Vp"]:
    """Return the output matrix from a model's parameters, tied or not, with `logit_scale`."""
    matrix = params["embedding"].T if config.tie_embeddings else params["output"]
    return _scale_output(matrix, config)


def declare_output_bias(module: nn.Module, config: TransformerConfig) -> Float[Array, "Vp"] | None:
    """Declare the bias of the logits, `output_bias`; None if the model has none."""
    if not config.logit_bias:
        return None
    return declare_weight(
        module,
        "output_bias",
        outputs={"vocab": config.padded_vocab_size},
        init=nn.initializers.zeros,
        dtype=config.precision.parameters,
    )


def _scale_output(matrix: jax.Array, config: TransformerConfig) -> jax.Array:
    return matrix if config.logit_scale == 1 else matrix * config.logit_scale


def compute_logits(
    hidden: Float[Array, "B T D"],
    matrix: Float[Array, "D Vp"],
    config: TransformerConfig,
    context: ModelContext,
    bias: Float[Array, "Vp"] | None,
) -> Float[Array, "B T V"]:
    """Return logits over the vocabulary, without the padding of the table."""
    logits = apply_matrix(hidden, matrix.astype(hidden.dtype), 1, context.flatten_tokens)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)[None, None]
    return cap_logits(logits[..., : config.vocab_size], config.logit_soft_cap)
