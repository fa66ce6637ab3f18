"""Language models that preceded the transformer, with the data and the steps of `versus`.

    python -m train fit pre_transformer:lstm

| experiment | how information moves between tokens |
| --- | --- |
| `elman` | h = tanh(W x + U h) (Elman 1990), two layers |
| `lstm` | two LSTMs (Hochreiter and Schmidhuber 1997) |
| `convolution` | six causal convolutions of five taps, with residuals (after Dauphin et al. 2017) |
"""

import dataclasses

from configs.versus import WIDTH, comparison_experiment
from transformer import (
    BlockConfig,
    ConvolutionConfig,
    FeedForwardConfig,
    Initialization,
    MixerConfig,
    NormConfig,
    TransformerConfig,
)
from transformer.baselines.recurrent import ElmanConfig, LSTMConfig


def recurrent_model(mixer: MixerConfig) -> TransformerConfig:
    """Return two layers of the recurrence, without feed-forward, norm or residual."""
    block = BlockConfig(mixer=mixer, feed_forward=None, norm=None, residual=False)
    return TransformerConfig(
        d_model=2 * WIDTH,
        num_layers=2,
        layer_pattern=(block,),
        final_norm=None,
        initialization=Initialization(std=0, embedding_std=0.1),
    )


_CONVOLUTION = TransformerConfig(
    d_model=WIDTH,
    num_layers=6,
    layer_pattern=(
        BlockConfig(
            mixer=ConvolutionConfig(kernel_size=5),
            feed_forward=FeedForwardConfig(activation="relu"),
            norm=NormConfig("layer"),
        ),
    ),
)

EXPERIMENTS = {
    name: dataclasses.replace(comparison_experiment(name, model), name=f"pre_transformer-{name}")
    for name, model in {
        "elman": recurrent_model(ElmanConfig()),
        "lstm": recurrent_model(LSTMConfig()),
        "convolution": _CONVOLUTION,
    }.items()
}

# As `python -m train configs` lists them, without running this file.
NAMES = ("elman", "lstm", "convolution")
