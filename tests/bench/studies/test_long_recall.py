"""Retrieval over long sequences: equal models, windows that are short, accuracy by position."""

from bench.studies.long_recall import experiment
from bench.studies.recall import AssociativeRecall
from train.scaling.design import count_without_embeddings


def test_models_are_equally_large() -> None:
    made = {
        name: experiment(name, seed=0, short=False)
        for name in ("full", "bigbird", "linear", "gated_delta", "mamba2", "convolution", "elman")
    }
    sizes = {name: count_without_embeddings(each.model) for name, each in made.items()}
    assert max(sizes.values()) < 1.02 * min(sizes.values()), sizes
    for each in made.values():
        assert each.sequence_length == 4096
        assert isinstance(each.task, AssociativeRecall)
        assert each.task.train_examples == each.steps  # no sequence is seen twice
