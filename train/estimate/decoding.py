"""Bytes and FLOPs of one decoding step, for different numbers of key-value heads.

A step reads the weights once per batch and the cache once per sequence. The arithmetic intensity of
a few FLOPs per byte is far below what any accelerator can sustain: decoding is bound by memory
bandwidth (Shazeer 2019).
"""

import dataclasses
from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.attention.mixer import mixer_class
from transformer.flops import count_decode_step_flops, decode_step_weight_bytes
from transformer.models.config import TransformerConfig
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.language_model import LanguageModel
from transformer.models.model import Model
from transformer.parameter_counts import cache_bytes

LARGE_BATCH = 64
"""Second batch size of the tables: at 64 sequences most bytes read are cache, not weights."""


@dataclasses.dataclass(frozen=True)
class DecodingCost:
    """Cost of a step that appends one token to each sequence of `context_length` tokens.

    In an encoder-decoder the sequence is the target; the source is already in the cache.
    """

    num_kv_heads: tuple[int, ...]
    """K of each attention layer in the pattern; cross attention follows the self attention of its
    block."""
    context_length: int
    """Tokens in the cache."""
    source_length: int
    """Tokens of the source: equal to `context_length`, or 0 for models without an encoder."""
    cache_bytes_per_token: int
    """Growth of the cache per generated token."""
    cache_bytes_per_source_token: int
    """Cache bytes per source token."""
    cache_bytes: int
    """Cache of one sequence and its source."""
    weight_bytes: int
    """Weights read by one step, in their storage dtype, without parameters that only the source
    uses."""
    flops: int
    """FLOPs per generated token."""

    def bytes_read_per_token(self, batch_size: int = 1) -> float:
        """Return bytes of the token's own cache and its share of the weights."""
        return self.weight_bytes / batch_size + self.cache_bytes

    def arithmetic_intensity(self, batch_size: int = 1) -> float:
        """Return FLOPs per byte read."""
        return self.flops / self.bytes_read_per_token(batch_size)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for `--json`."""
        return {
            **dataclasses.asdict(self),
            "num_kv_heads": list(self.num_kv_heads),
            "bytes_read_per_token": self.bytes_read_per_token(),
            "flops_per_byte": self.arithmetic_intensity(),
            f"flops_per_byte_batch_{LARGE_BATCH}": self.arithmetic_intensity(LARGE_BATCH),
        }


def count_decoding_variants(model: Model, context_length: int) -> tuple[DecodingCost, ...]:
    """Return decoding costs of a model: as configured first, then with other key-value heads.

    Empty for models that do not decode, or whose steps have no exact count.
    """
    if not isinstance(model, LanguageModel | EncoderDecoder) or not _is_counted(model.config):
        return ()
    own = count_decoding_cost(model, context_length)
    variants = (count_decoding_cost(each, context_length) for each in kv_head_variants(model))
    return (own, *(each for each in variants if each != own))


def _is_counted(config: TransformerConfig) -> bool:
    """Return True if every mixer decodes from a cache and its steps have an exact count.

    Cross attention of other kinds is excluded: its formula includes work that is done once for each
    source.
    """
    return all(
        mixer_class(block.mixer).abilities(block.mixer).cached
        and isinstance(block.cross_attention, AttentionConfig | None)
        for block in config.layer_pattern
    )


def count_decoding_cost(model: LanguageModel | EncoderDecoder, context_length: int) -> DecodingCost:
    """Return the cost of a step at this context; a source has the same length."""
    source = context_length if model.config.encoder is not None else 0

    def size_of_cache(tokens: int, source_tokens: int) -> int:
        # `cache_bytes` needs a token, and an empty cache has no bytes.
        return cache_bytes(model, tokens, source_tokens) if tokens else 0

    cache_size = size_of_cache(context_length, source)
    return DecodingCost(
        num_kv_heads=_kv_heads(model.config),
        context_length=context_length,
        source_length=source,
        cache_bytes_per_token=cache_size - size_of_cache(context_length - 1, source),
        cache_bytes_per_source_token=cache_size - size_of_cache(context_length, max(source - 1, 0)),
        cache_bytes=cache_size,
        weight_bytes=decode_step_weight_bytes(model),
        flops=count_decode_step_flops(model, context_length).total(causal=False),
    )


def kv_head_variants(
    model: LanguageModel | EncoderDecoder,
) -> tuple[LanguageModel | EncoderDecoder, ...]:
    """Return the model with N, N / 4 and 1 key-value heads and as configured, most heads first."""
    variants = {_kv_heads(model.config): model.config}
    for group in (1, 4, None):
        other = _grouped(model.config, group)
        variants.setdefault(_kv_heads(other), other)
    ordered = sorted(variants.items(), reverse=True)
    return tuple(dataclasses.replace(model, config=each) for _, each in ordered)


def _grouped(config: TransformerConfig, group: int | None) -> TransformerConfig:
    """Return the config with one key-value head per `group` query heads; None: one for all.

    Layers whose number of heads `group` does not divide keep their own.
    """
    pattern = []
    for block in config.layer_pattern:
        for name in ("mixer", "cross_attention"):
            mixer = getattr(block, name)
            if isinstance(mixer, AttentionConfig) and mixer.num_heads % (group or 1) == 0:
                fewer = mixer.num_heads // group if group else 1
                changed: Any = {name: dataclasses.replace(mixer, num_kv_heads=fewer)}
                block = dataclasses.replace(block, **changed)
        pattern.append(block)
    return dataclasses.replace(config, layer_pattern=tuple(pattern))


def _kv_heads(config: TransformerConfig) -> tuple[int, ...]:
    mixers = [
        mixer for block in config.layer_pattern for mixer in (block.mixer, block.cross_attention)
    ]
    return tuple(m.num_kv_heads or m.num_heads for m in mixers if isinstance(m, AttentionConfig))
