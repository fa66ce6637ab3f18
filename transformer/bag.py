"""A bag of embeddings: the least that can tell what a text is about."""

from typing import Any

from transformer.block_config import BlockConfig
from transformer.config import TransformerConfig
from transformer.layer_configs import FeedForwardConfig, IdentityConfig


def bag_of_embeddings_config(
    width: int,  # D
    hidden: int,  # F
    *,
    num_layers: int = 1,
    dropout: float = 0.0,  # of the hidden activations
    embedding_dropout: float = 0.0,
    **model_fields: Any,  # other fields of the configuration
) -> TransformerConfig:
    """Embed, MLP, mean, logistic regression, for `Classifier(config, pooling="mean")`.

    Words in another order give the same answer (compare the deep averaging network of Iyyer et al.
    2015, which takes the mean first).
    """
    mlp = FeedForwardConfig(d_ff=hidden, activation="relu", dropout=dropout)
    block = BlockConfig(mixer=IdentityConfig(), feed_forward=mlp, norm=None, residual=False)
    given: dict[str, Any] = (
        dict(final_norm=None, causal=False, dropout=embedding_dropout) | model_fields
    )
    return TransformerConfig(d_model=width, num_layers=num_layers, layer_pattern=(block,), **given)
