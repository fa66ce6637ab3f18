"""Universal Dependencies, English Web Treebank (Silveira et al. 2014): part-of-speech tagging.

    python -m train fit ud_ewt --data.path ud_ewt/en_ewt-ud-train.conllu \
        --data.validation-path ud_ewt/en_ewt-ud-dev.conllu \
        --data.test-path ud_ewt/en_ewt-ud-test.conllu
    python -m train evaluate runs/ud_ewt --split test

12,544 sentences, 204,577 words, 17 tags. A small subword encoder, trained from scratch: a
bidirectional LSTM, then two layers of attention. On so little text recurrence learns the order of
nearby words sooner than attention does; `ud_ewt:attention` has three layers of attention.
"""

import dataclasses

from train.data.data_config import TokenizerConfig
from train.data.token_labels import TokenLabelDataConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.muon import Muon
from train.optim.schedules import ScheduleConfig
from train.tasks.classification import Tagging
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Initialization,
    NormConfig,
    RoPE,
    TransformerConfig,
)
from transformer.baselines.recurrent import LSTMConfig

_ATTENTION = BlockConfig(
    mixer=AttentionConfig(num_heads=4, position=RoPE()),
    feed_forward=FeedForwardConfig(384, activation="gelu"),
    norm=NormConfig("layer"),
    residual_dropout=0.2,
)

_RECURRENT = dataclasses.replace(_ATTENTION, mixer=LSTMConfig(bidirectional=True))


def make_experiment(name: str, *layers: BlockConfig) -> Experiment:
    """Return the recipe with an encoder of these layers."""
    return Experiment(
        name=name,
        task=Tagging(classifier_dropout=0.2),
        model=TransformerConfig(
            d_model=128,
            num_layers=len(layers),
            layer_pattern=layers,
            causal=False,
            embedding_dropout=0.3,
            initialization=Initialization(std=0),
        ),
        data=TokenLabelDataConfig(
            path="ud_ewt/en_ewt-ud-train.conllu",
            validation_path="ud_ewt/en_ewt-ud-dev.conllu",
            test_path="ud_ewt/en_ewt-ud-test.conllu",
            max_length=128,
            tokenizer=TokenizerConfig("bpe", vocab_size=4000),
        ),
        optimizer=Muon(beta2=0.98, weight_decay=0.1),
        schedule=ScheduleConfig("cosine", learning_rate=3e-3, warmup_steps=100, min_lr_ratio=0.0),
        steps=2000,
        batch_size=64,
        evaluation=EvaluationConfig(every=400, num_batches=0),
        sample=SampleConfig(every=1000, prompt="The quick brown fox jumps over the lazy dog ."),
        checkpoint=CheckpointConfig(every=500),
    )


EXPERIMENTS = {
    "ud_ewt": make_experiment("ud_ewt", _RECURRENT, _ATTENTION, _ATTENTION),
    "attention": make_experiment("ud_ewt-attention", _ATTENTION, _ATTENTION, _ATTENTION),
}
