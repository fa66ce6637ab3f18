"""What decoding a token moves and computes, with many key-value heads or few.

The weights are read once for a whole batch, the cache once for each sequence. A few operations a
byte are far below what any accelerator can do: decoding waits for memory (Shazeer 2019).
"""

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer.config import TransformerConfig
    from transformer.models.base import Model
    from transformer.models.encoder_decoder import EncoderDecoder
    from transformer.models.language_model import LanguageModel

LARGE_BATCH = 64
"""Beside a batch of 1: by then the cache, not the weights, is most of what is read."""


@dataclasses.dataclass(frozen=True)
class DecodingCost:
    """A step that adds a token to each of some sequences of `context` tokens.

    Of an encoder-decoder the sequence is its own; the source has been read into the cache before.
    """

    num_kv_heads: tuple[int, ...]
    """K of each attention of the pattern: in a place that has both, cross attention second."""
    context_length: int
    source_length: int
    """Tokens of the source: as many, or 0 of a model that has none."""
    cache_bytes_per_token: int
    """What the cache grows by, for each token of a sequence."""
    cache_bytes_per_source_token: int
    """What it has more for each token of the source."""
    cache_bytes: int
    """Of one sequence, and its source."""
    weight_bytes: int
    """Read once a step, as they are stored. Nothing that only the source meets."""
    flops: int
    """Of one token."""

    def bytes_read_per_token(self, batch_size: int = 1) -> float:
        """Weights, shared by the sequences of a batch, and the token's own cache."""
        return self.weight_bytes / batch_size + self.cache_bytes

    def arithmetic_intensity(self, batch_size: int = 1) -> float:
        """Operations for each byte read."""
        return self.flops / self.bytes_read_per_token(batch_size)


def count_decoding_variants(model: "Model", context_length: int) -> tuple[DecodingCost, ...]:
    """Of a model that writes token by token: as it is, then with other key-value heads."""
    from transformer.models.encoder_decoder import EncoderDecoder
    from transformer.models.language_model import LanguageModel

    if not isinstance(model, LanguageModel | EncoderDecoder) or not _is_counted(model.config):
        return ()
    own = count_decoding_cost(model, context_length)
    variants = (count_decoding_cost(each, context_length) for each in kv_head_variants(model))
    return (own, *(each for each in variants if each != own))


def _is_counted(config: "TransformerConfig") -> bool:
    """Whether all mixers decode from a cache, in steps that are counted exactly.

    Cross attention of other kinds is not: their formulas count what is done to the memory's keys.
    """
    from transformer.attention.base import mixer_class
    from transformer.attention.config import AttentionConfig

    return all(
        mixer_class(block.mixer).abilities(block.mixer).cached
        and isinstance(block.cross_attention, AttentionConfig | None)
        for block in config.layer_pattern
    )


def count_decoding_cost(
    model: "LanguageModel | EncoderDecoder", context_length: int
) -> DecodingCost:
    """The cost of a step at this context, with a source of as many tokens if it reads one."""
    from transformer.costs import count_decode_step_flops, decode_step_weight_bytes
    from transformer.parameter_counts import cache_bytes

    source = context_length if model.config.encoder is not None else 0
    whole = cache_bytes(model, context_length, source)
    return DecodingCost(
        num_kv_heads=_kv_heads(model.config),
        context_length=context_length,
        source_length=source,
        cache_bytes_per_token=whole - cache_bytes(model, context_length - 1, source),
        cache_bytes_per_source_token=whole - cache_bytes(model, context_length, max(source - 1, 0)),
        cache_bytes=whole,
        weight_bytes=decode_step_weight_bytes(model),
        flops=count_decode_step_flops(model, context_length).total(causal=False),
    )


def kv_head_variants(
    model: "LanguageModel | EncoderDecoder",
) -> tuple["LanguageModel | EncoderDecoder", ...]:
    """The model with N, N / 4 and 1 key-value heads, and as it is: the most of them first."""
    variants = {_kv_heads(model.config): model.config}
    for group in (1, 4, None):
        other = _grouped(model.config, group)
        variants.setdefault(_kv_heads(other), other)
    ordered = sorted(variants.items(), reverse=True)
    return tuple(dataclasses.replace(model, config=each) for _, each in ordered)


def _grouped(config: "TransformerConfig", group: int | None) -> "TransformerConfig":
    """With a key-value head for every `group` query heads where that divides; None: one for all."""
    from transformer.attention.config import AttentionConfig

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


def _kv_heads(config: "TransformerConfig") -> tuple[int, ...]:
    from transformer.attention.config import AttentionConfig

    mixers = [
        mixer for block in config.layer_pattern for mixer in (block.mixer, block.cross_attention)
    ]
    return tuple(m.num_kv_heads or m.num_heads for m in mixers if isinstance(m, AttentionConfig))
