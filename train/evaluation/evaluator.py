"""What a run is judged by: its evaluations and samples, on the way and at its end.

The held-out metrics of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from train.checkpoint.manager import CheckpointManager
from train.engine import Engine, make_engine
from train.evaluation.early_stopping import BestEvaluation
from train.evaluation.eval_weights import EvalWeights, eval_params, load_eval_weights
from train.experiment import Experiment
from train.run import Run, sample
from train.run_folder.folder import RunFolder
from train.runtime.oom import LARGER_DEVICES_REMEDY, explain_oom
from train.state import TrainState
from train.tasks.registry import make_task
from train.telemetry.reporter import Reporter

if TYPE_CHECKING:
    from train.run import Run


class Evaluator:
    """Looks at the weights of a run, and remembers when they were best."""

    def __init__(self, experiment: Experiment, engine: Engine, corpus: Any, folder: RunFolder):
        self.experiment, self.engine, self.corpus = experiment, engine, corpus
        self.task, self.folder = make_task(experiment), folder
        self.best = BestEvaluation()

    def restore_best(self, best: BestEvaluation, checkpoints: CheckpointManager) -> None:
        """Goes on from what a checkpoint says of the best.

        A best whose own checkpoint is not there, since nobody had asked to keep it or a better one
        has come since, is forgotten.
        """
        self.best = best if not best.step or best.step in checkpoints.steps() else BestEvaluation()
        if self.experiment.uses_best_checkpoint and self.best.step:
            checkpoints.keep_best(self.best.step)

    def is_finished(self, step: int) -> bool:
        """Whether there is nothing left to train after so many steps."""
        patience = self.experiment.early_stopping.patience
        return step >= self.experiment.steps or self.best.patience_exhausted(patience)

    def is_best(self, step: int) -> bool:
        """Whether the evaluation of this step was the best, and its checkpoint is to be kept."""
        return self.experiment.uses_best_checkpoint and self.best.step == step

    def evaluates_after(self, step: int) -> bool:
        """Whether a step is one to stop at: for an evaluation, or as the last."""
        return step == self.experiment.steps or is_due(step, self.experiment.evaluation.every)

    def evaluate_and_sample(self, step: int, state: TrainState, report: Reporter) -> None:
        """Evaluation and samples on the way; the last step has its own, but is judged as well."""
        last = step == self.experiment.steps
        judged = not last or self.experiment.uses_best_checkpoint
        if judged and is_due(step, self.experiment.evaluation.every):
            with report.pause("evaluate"):
                metrics = self.evaluate(eval_params(state), whole=False)
                report.log_evaluation(step, "validation", metrics)
            metric = self.task.selection_metric(self.corpus)
            self.best = self.best.after_evaluation(step, metrics[metric.name], metric)
        if not last and is_due(step, self.experiment.sample.every):
            with report.pause("evaluate"):
                report.log_sample(step, self.generate_sample(eval_params(state), step))

    def evaluate(self, params: Any, *, whole: bool) -> dict[str, float]:
        return self.task.evaluate(self.engine, params, self.corpus, "validation", full_split=whole)

    def generate_sample(self, params: Any, step: int) -> str:
        settings = self.experiment.sample
        [text] = sample(
            self.make_run(EvalWeights(params, [step]), {}),
            [settings.prompt],
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling_config(),
            seed=self.experiment.seed,
        )
        return text

    def final_weights(
        self, state: TrainState, step: int, checkpoints: CheckpointManager
    ) -> EvalWeights:
        """The weights that the run is judged by, now that it is at its end."""
        if (
            not self.experiment.uses_best_checkpoint
            and self.experiment.evaluation.average_checkpoints == 1
        ):
            return EvalWeights(eval_params(state), [step])
        checkpoints.wait()
        return load_eval_weights(checkpoints, self.engine, self.experiment)

    def report_final_metrics(
        self, weights: EvalWeights, step: int, report: Reporter
    ) -> dict[str, float]:
        """The metrics over the whole held-out split."""
        if step < self.experiment.steps:
            report.log_event("stopped early", step=step, best=self.best.to_json())
            name = self.task.selection_metric(self.corpus).name
            report.print_message(
                f"step {step}: the best {name} is that of step {self.best.step} still, "
                f"{self.best.value:.4g}; the run ends here"
            )
        if weights.steps != [step]:
            report.log_event("weights", step=step, checkpoints=weights.steps)
            report.print_message(
                f"step {step}: weights of step {', '.join(map(str, weights.steps))}"
            )
        metrics = self.evaluate(weights.params, whole=True)
        report.log_evaluation(step, "validation", metrics)
        if self.experiment.sample.every:
            report.log_sample(step, self.generate_sample(weights.params, step))
        report.log_event("finished", step=step, **metrics)
        return metrics

    def make_run(self, weights: EvalWeights, metrics: dict[str, float]) -> Run:
        return Run(
            self.experiment,
            self.folder,
            self.engine.model,
            weights.params,
            self.corpus.tokenizer,
            weights.steps[-1],
            metrics,
            self.corpus.labels,
        )


def is_due(step: int, every: int) -> bool:
    """Whether what happens every so many steps (0: never) happens now."""
    return every > 0 and step % every == 0


def evaluate_run(run: Run, split: str) -> dict[str, float]:
    """The metrics of a run over the whole of a split of its data.

    Raises UserError if the data have no such split, or are no longer there.
    """
    task = make_task(run.experiment)
    corpus = task.prepare_corpus(run.tokenizer, run.labels)
    engine = make_engine(run.experiment, run.model.hardware)
    with explain_oom(lambda: [LARGER_DEVICES_REMEDY]):
        return task.evaluate(engine, run.params, corpus, split, full_split=True)
