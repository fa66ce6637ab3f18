"""Language models of before the transformer, on the data and with the steps of `versus`.

    python -m train fit before:lstm

| experiment | what moves information between words |
| --- | --- |
| `elman` | h = tanh(W x + U h) (Elman 1990), two layers |
| `lstm` | two LSTMs (Hochreiter and Schmidhuber 1997) |
| `convolution` | six causal convolutions of five taps, with residuals (after Dauphin et al. 2017) |
"""

import dataclasses

from configs.versus import WIDTH, versus
from transformer import (
    BlockConfig,
    ConvolutionConfig,
    FeedForwardConfig,
    Initialization,
    MixerConfig,
    NormConfig,
    TransformerConfig,
)
from transformer.recurrent import ElmanConfig, LSTMConfig


def recurrent(mixer: MixerConfig) -> TransformerConfig:
    """Two layers of the recurrence and nothing else."""
    block = BlockConfig(mixer=mixer, feed_forward=None, norm=None, residual=False)
    return TransformerConfig(
        width=2 * WIDTH,
        layers=2,
        pattern=(block,),
        final_norm=None,
        initialization=Initialization(std=0, embedding_std=0.1),
    )


_CONVOLUTION = TransformerConfig(
    width=WIDTH,
    layers=6,
    pattern=(
        BlockConfig(
            mixer=ConvolutionConfig(taps=5),
            feed_forward=FeedForwardConfig(activation="relu"),
            norm=NormConfig("layer"),
        ),
    ),
)

EXPERIMENTS = {
    name: dataclasses.replace(versus(name, model), name=f"before-{name}")
    for name, model in {
        "elman": recurrent(ElmanConfig()),
        "lstm": recurrent(LSTMConfig()),
        "convolution": _CONVOLUTION,
    }.items()
}
