"""What decoding a token moves and computes, with many key-value heads or few.

The weights are read once for a whole batch, the cache once for each sequence. A few operations a
byte are far below what any accelerator can do: decoding waits for memory (Shazeer 2019).
"""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer.config import TransformerConfig
    from transformer.hardware import Hardware
    from transformer.language_model import LanguageModel

LARGE_BATCH = 64
"""Beside a batch of 1: by then the cache, not the weights, is most of what is read."""


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A step that adds a token to each of some sequences of `context` tokens."""

    kv_heads: tuple[int, ...]
    """K of each place of the pattern that has attention."""
    context: int
    cache_bytes_per_token: int
    """What the cache grows by, for each token of a sequence."""
    cache_bytes: int
    """Of one sequence."""
    weight_bytes: int
    """Read once a step, as they are stored."""
    flops: int
    """Of one token."""

    def bytes_read_per_token(self, batch: int = 1) -> float:
        """Weights, shared by the sequences of a batch, and the token's own cache."""
        return self.weight_bytes / batch + self.cache_bytes

    def intensity(self, batch: int = 1) -> float:
        """Operations for each byte read."""
        return self.flops / self.bytes_read_per_token(batch)


def decoding(model: "LanguageModel", context: int) -> Decoding:
    """The cost of a step at this context."""
    from transformer.costs import count_flops, decode_weight_bytes
    from transformer.sizes import cache_bytes

    return Decoding(
        kv_heads=_kv_heads(model.config),
        context=context,
        cache_bytes_per_token=cache_bytes(model, context) - cache_bytes(model, context - 1),
        cache_bytes=cache_bytes(model, context),
        weight_bytes=decode_weight_bytes(model),
        flops=count_flops(model, context).total(causal=False),
    )


def kv_variants(config: "TransformerConfig", hardware: "Hardware") -> tuple["LanguageModel", ...]:
    """The model with N, N / 4 and 1 key-value heads, and as it is: the most of them first."""
    from transformer.language_model import LanguageModel

    variants = {_kv_heads(config): config}
    for group in (1, 4, None):
        other = _grouped(config, group)
        variants.setdefault(_kv_heads(other), other)
    ordered = sorted(variants.items(), reverse=True)
    return tuple(LanguageModel(each, hardware) for _, each in ordered)


def _grouped(config: "TransformerConfig", group: int | None) -> "TransformerConfig":
    """With a key-value head for every `group` query heads where that divides; None: one for all."""
    from transformer.attention import AttentionConfig

    pattern = []
    for block in config.pattern:
        mixer = block.mixer
        if isinstance(mixer, AttentionConfig) and mixer.heads % (group or 1) == 0:
            mixer = dataclasses.replace(mixer, kv_heads=mixer.heads // group if group else 1)
        pattern.append(dataclasses.replace(block, mixer=mixer))
    return dataclasses.replace(config, pattern=tuple(pattern))


def _kv_heads(config: "TransformerConfig") -> tuple[int, ...]:
    from transformer.attention import AttentionConfig

    mixers = [block.mixer for block in config.pattern]
    return tuple(m.kv_heads or m.heads for m in mixers if isinstance(m, AttentionConfig))
