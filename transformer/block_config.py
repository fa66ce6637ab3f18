"""Settings of a layer. Imports nothing that computes."""

import dataclasses
from typing import Literal, get_args

from transformer.attention_config import AttentionConfig
from transformer.checks import check_choice, check_fraction
from transformer.layer_configs import FeedForwardConfig, MixerConfig, MoEConfig, NormConfig

NormPlacement = Literal["pre", "post", "sandwich"]


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One place of the layer pattern."""

    mixer: MixerConfig = AttentionConfig()
    """What moves information between tokens."""
    cross_attention: MixerConfig | None = None
    """What brings information in from the memory (the encoder's output), after the mixer."""
    feed_forward: FeedForwardConfig | MoEConfig | None = FeedForwardConfig()
    norm: NormConfig | None = NormConfig()
    norm_placement: NormPlacement = "pre"
    """x + f(norm(x)); norm(x + f(x)) as in Vaswani et al. 2017; or x + norm(f(norm(x))) as in
    Ding et al. 2021."""
    residual: bool = True
    """Whether x is added to f(x). Without it deep stacks hardly learn: it is here to be shown."""
    residual_dropout: float = 0.0
    """Of what is added to the residual stream."""

    def __post_init__(self) -> None:
        check_choice("block.placement", self.norm_placement, get_args(NormPlacement))
        check_fraction("block.dropout", self.residual_dropout)

    @property
    def needs_memory(self) -> bool:
        """Whether a layer of this kind works only with the output of an encoder."""
        return self.cross_attention is not None or self.mixer.reads_memory
