"""Underflow and overflow in float16 on gradients with known values."""

import dataclasses
from pathlib import Path

import pytest

from bench import precision
from bench.precision import Measured, in_precision, underflow
from bench.small_runs import small
from tests.train.support import light_compiler as light_compiler
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.engine import make_engine
from train.experiment import Experiment
from train.runtime.local_hardware import local_hardware
from train.tasks.language_modeling import LanguageModelTask
from transformer.precision import POLICIES


def tiny(folder: Path) -> Experiment:
    """Return the quickstart's model with two narrow layers, on a few lines of text."""
    (folder / "text.txt").write_text("\n".join(f"line {n} of some text" for n in range(200)))
    base = small(2)
    data = TextDataConfig(
        path=str(folder / "text.txt"),
        sequence_length=16,
        document_masking=False,
        tokenizer=TokenizerConfig("byte"),
        cache_dir=str(folder / "cache"),
    )
    model = dataclasses.replace(base.model, d_model=12, num_layers=2)
    return dataclasses.replace(base, data=data, model=model, batch_size=2)


@pytest.mark.nightly
def test_larger_loss_scales_underflow_less_until_overflow(tmp_path: Path) -> None:
    base = tiny(tmp_path)
    corpus = LanguageModelTask(base).prepare_corpus()
    engine = make_engine(LanguageModelTask(base).resolve_experiment(corpus), local_hardware())
    params = engine.init().params
    actual = underflow(base, params, corpus, (2.0**-20, 2.0**-10, 1.0, 2.0**40))
    lost = [fraction for fraction, _ in actual[:3]]
    assert lost[0] > 0.5
    assert lost[0] > lost[1] > lost[2]
    assert [overflows for _, overflows in actual] == [False, False, False, True]


def test_each_named_policy_is_measured() -> None:
    base = small(2)
    for name in POLICIES:
        assert in_precision(base, name).model.precision.name == name


def test_table_has_medians_and_ratios() -> None:
    actual = {
        "float32": Measured(2**20, 2**21, 2**22, [0.1, 0.3, 0.2]),
        "bfloat16": Measured(2**20, 2**21, 2**21, [0.4, 0.1, 0.5]),
    }
    cells = [list(column.cells) for column in precision.cost_table(actual, "a step").columns]
    assert cells[-2] == ["200 ms (100 to 300)", "400 ms (100 to 500)"]
    assert cells[-1] == ["1.00", "2.00"]
    assert cells[3] == ["4.0 MiB", "2.0 MiB"]
