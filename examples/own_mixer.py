"""Write your own mixer: a moving average of the past, with weights from plain Flax.

python examples/own_mixer.py        # checks it, trains it on this file, and samples
python -m train fit examples/own_mixer.py --workdir runs/average
python -m train sample runs/average --import examples/own_mixer.py --prompt "def "
"""

import dataclasses
from typing import ClassVar

import jax
from flax import linen as nn

import train
from train.data.data_config import TextDataConfig, TokenizerConfig
from transformer import Abilities, BlockConfig, Mixer, MixerConfig, MixerOutput, TransformerConfig
from transformer.attention.mixer import (
    register_mixer,
    reject_mask_patterns,
)
from transformer.testing import check_mixer


@dataclasses.dataclass(frozen=True)
class MovingAverageConfig(MixerConfig):
    """Settings of `MovingAverage`."""

    kind: ClassVar[str] = "moving_average"

    spread: float = 2.0
    """Standard deviation of the logits of the initial decays: some channels forget slowly."""


@register_mixer
class MovingAverage(Mixer):
    """Exponential moving average with a learned decay for each channel, between linear maps."""

    config: MovingAverageConfig

    @staticmethod
    def abilities(config):
        return Abilities(cached=False, segments=False, cross=False, weights=False)

    @nn.nowrap
    def init_cache(self, batch, length):
        raise ValueError("mixer moving_average: has no cache; sample by the full pass")

    @nn.compact
    def __call__(self, x, inputs):  # x: [B, T, D]
        kind, width = self.config.kind, x.shape[-1]
        reject_mask_patterns(kind, inputs.mask)
        if inputs.cache is not None:
            self.init_cache(*x.shape[:2])
        start = nn.initializers.normal(self.config.spread)
        decay = nn.sigmoid(self.param("decay", start, (1, 1, width))).astype(x.dtype)
        new = (1 - decay) * nn.Dense(width, dtype=x.dtype)(x)
        # y_t = decay * y_{t-1} + new_t for all t at once: pairs (product of decays, sum).
        combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
        _, y = jax.lax.associative_scan(combine, (decay * jax.numpy.ones_like(x), new), axis=1)
        return MixerOutput(nn.Dense(width, dtype=x.dtype)(y), None, {})


block = BlockConfig(mixer=MovingAverageConfig())
model = TransformerConfig(d_model=64, num_layers=2, layer_pattern=(block,))
data = TextDataConfig(
    __file__, sequence_length=64, document_masking=False, tokenizer=TokenizerConfig("character")
)
EXPERIMENTS = {"average": train.Experiment("average", model=model, data=data, steps=300)}

if __name__ == "__main__":
    check_mixer("moving_average")
    print(train.fit(EXPERIMENTS["average"]).generate("def ", max_new_tokens=60))
