"""What a run is judged by: its evaluations and samples, on the way and at its end.

The held-out metrics of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from train.checkpoint.manager import Checkpoints
from train.engine import Engine, make_engine
from train.evaluation.early_stopping import Best
from train.evaluation.eval_weights import Served, serve, weights_of
from train.experiment import Experiment
from train.run import Run
from train.run_folder.folder import RunFolder
from train.runtime.oom import ELSEWHERE, explain_exhaustion
from train.state import TrainState
from train.tasks.registry import make_task
from train.tasks.text_completion import sample
from train.telemetry.reporter import Report

if TYPE_CHECKING:
    from train.run import Run


class Judge:
    """Looks at the weights of a run, and remembers when they were best."""

    def __init__(self, experiment: Experiment, engine: Engine, corpus: Any, folder: RunFolder):
        self.experiment, self.engine, self.corpus = experiment, engine, corpus
        self.task, self.folder = make_task(experiment), folder
        self.best = Best()

    def remember(self, best: Best, checkpoints: Checkpoints) -> None:
        """Goes on from what a checkpoint says of the best.

        A best whose own checkpoint is not there, since nobody had asked to keep it or a better one
        has come since, is forgotten.
        """
        self.best = best if not best.step or best.step in checkpoints.steps() else Best()
        if self.experiment.uses_best_checkpoint and self.best.step:
            checkpoints.keep_best(self.best.step)

    def ended(self, step: int) -> bool:
        """Whether there is nothing left to train after so many steps."""
        patience = self.experiment.early_stopping.patience
        return step >= self.experiment.steps or self.best.exhausted(patience)

    def is_best(self, step: int) -> bool:
        """Whether the evaluation of this step was the best, and its checkpoint is to be kept."""
        return self.experiment.uses_best_checkpoint and self.best.step == step

    def looks(self, step: int) -> bool:
        """Whether a step is one to stop at: for an evaluation, or as the last."""
        return step == self.experiment.steps or due(step, self.experiment.evaluation.every)

    def look(self, step: int, state: TrainState, report: Report) -> None:
        """Evaluation and samples on the way; the last step has its own, but is judged as well."""
        last = step == self.experiment.steps
        judged = not last or self.experiment.uses_best_checkpoint
        if judged and due(step, self.experiment.evaluation.every):
            with report.pause("evaluate"):
                metrics = self.evaluate(weights_of(state), whole=False)
                report.evaluation(step, "validation", metrics)
            metric = self.task.selection_metric(self.corpus)
            self.best = self.best.after(step, metrics[metric.name], metric)
        if not last and due(step, self.experiment.sample.every):
            with report.pause("evaluate"):
                report.sample(step, self.write(weights_of(state), step))

    def evaluate(self, params: Any, *, whole: bool) -> dict[str, float]:
        return self.task.evaluate(self.engine, params, self.corpus, "validation", full_split=whole)

    def write(self, params: Any, step: int) -> str:
        settings = self.experiment.sample
        [text] = sample(
            self.result(Served(params, [step]), {}),
            [settings.prompt],
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling_config(),
            seed=self.experiment.seed,
        )
        return text

    def served(self, state: TrainState, step: int, checkpoints: Checkpoints) -> Served:
        """The weights that the run is judged by, now that it is at its end."""
        if (
            not self.experiment.uses_best_checkpoint
            and self.experiment.evaluation.average_checkpoints == 1
        ):
            return Served(weights_of(state), [step])
        checkpoints.wait()
        return serve(checkpoints, self.engine, self.experiment)

    def finish(self, served: Served, step: int, report: Report) -> dict[str, float]:
        """The metrics over the whole held-out split."""
        if step < self.experiment.steps:
            report.event("stopped early", step=step, best=self.best.as_plain())
            name = self.task.selection_metric(self.corpus).name
            report.say(
                f"step {step}: the best {name} is that of step {self.best.step} still, "
                f"{self.best.value:.4g}; the run ends here"
            )
        if served.steps != [step]:
            report.event("weights", step=step, checkpoints=served.steps)
            report.say(f"step {step}: weights of step {', '.join(map(str, served.steps))}")
        metrics = self.evaluate(served.params, whole=True)
        report.evaluation(step, "validation", metrics)
        if self.experiment.sample.every:
            report.sample(step, self.write(served.params, step))
        report.event("finished", step=step, **metrics)
        return metrics

    def result(self, served: Served, metrics: dict[str, float]) -> Run:
        return Run(
            self.experiment,
            self.folder,
            self.engine.model,
            served.params,
            self.corpus.tokenizer,
            served.steps[-1],
            metrics,
            self.corpus.labels,
        )


def due(step: int, every: int) -> bool:
    """Whether what happens every so many steps (0: never) happens now."""
    return every > 0 and step % every == 0


def evaluate_run(run: Run, split: str) -> dict[str, float]:
    """The metrics of a run over the whole of a split of its data.

    Raises UserError if the data have no such split, or are no longer there.
    """
    task = make_task(run.experiment)
    corpus = task.prepare_corpus(run.tokenizer, run.labels)
    engine = make_engine(run.experiment, run.model.hardware)
    with explain_exhaustion(lambda: [ELSEWHERE]):
        return task.evaluate(engine, run.params, corpus, split, full_split=True)
