"""Marian (Junczys-Dowmunt et al. 2018), as the translation models of OPUS-MT have it.

BART's layout with sinusoidal positions (all sines, then all cosines), no norm of the embeddings, a
bias of the logits, and tables that source and target share or not.
"""

import dataclasses
from typing import Any

from transformer.attention.position_config import SinusoidalPositions
from transformer.config import TransformerConfig
from transformer.interop.family import Architecture, Family
from transformer.interop.fields import Fields
from transformer.interop.seq2seq import bart_stack, read_bart, write_bart
from transformer.interop.weight_map import TABLE, AsIs, Weight


def _read_marian(fields: Fields) -> TransformerConfig:
    for name in ("normalize_before", "normalize_embedding", "add_final_layer_norm"):
        fields.expect(name, False)
    fields.expect("static_position_embeddings", True)
    fields.expect("is_decoder", False)
    vocab_size = fields.size("vocab_size")
    target_size = fields.take("decoder_vocab_size", vocab_size)
    shared = fields.take("share_encoder_decoder_embeddings", True)
    config = read_bart(fields, SinusoidalPositions("halves"))
    assert config.encoder is not None
    # Source and target may have tables of their own, of one size or of two.
    encoder = dataclasses.replace(config.encoder, vocab_size=0 if shared else vocab_size)
    return dataclasses.replace(
        config,
        vocab_size=vocab_size if shared else target_size,
        encoder=encoder,
        embedding_norm=None,
        logit_bias=True,
    )


def _write_marian(config: TransformerConfig) -> dict[str, Any]:
    source_size = 0 if config.encoder is None else config.encoder.vocab_size
    fields = write_bart(config)
    del fields["max_position_embeddings"]  # of a table that is computed
    return fields | {
        "vocab_size": source_size or config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": not source_size,
        "pad_token_id": None,  # the default, 58100, may be beyond the vocabulary
    }


MARIAN = Family(
    "marian",
    (Architecture("MarianMTModel", "encoder_decoder"),),
    _read_marian,
    _write_marian,
    (
        Weight("model.shared.weight", "embedding", TABLE, without="source_embedding"),
        Weight("model.encoder.embed_tokens.weight", "source_embedding", TABLE),
        Weight("model.decoder.embed_tokens.weight", "embedding", TABLE, beside="source_embedding"),
        *bart_stack("encoder"),
        *bart_stack("decoder"),
        Weight("lm_head.weight", "output"),
        Weight("final_logits_bias", "output_bias", AsIs(leading=1)),
    ),
    prefix="model.",
    # Copies of the shared table, and sinusoids.
    ignored=(
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "model.encoder.embed_positions.weight",
        "model.decoder.embed_positions.weight",
    ),
)
