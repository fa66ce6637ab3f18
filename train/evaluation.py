"""The held-out metrics of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.engines import make_engine
from train.memory import ELSEWHERE, explain_exhaustion
from train.tasks.registry import make_task

if TYPE_CHECKING:
    from train.run import Run


def evaluate_run(run: Run, split: str) -> dict[str, float]:
    """The metrics of a run over the whole of a split of its data.

    Raises UserError if the data have no such split, or are no longer there.
    """
    task = make_task(run.experiment)
    corpus = task.prepare_corpus(run.tokenizer, run.labels)
    engine = make_engine(run.experiment, run.model.hardware)
    with explain_exhaustion(lambda: [ELSEWHERE]):
        return task.evaluate(engine, run.params, corpus, split, full_split=True)
