"""Evaluate a run while it trains, and at its end."""

import functools
from typing import Any

from train.assembly import make_task
from train.checkpoint.manager import CheckpointManager
from train.engines.engine import Engine
from train.evaluation.early_stopping import BestEvaluation
from train.evaluation.eval_weights import EvalWeights, eval_params, load_eval_weights
from train.experiment import Experiment
from train.parallel.sharding import num_shards
from train.reporter import Reporter
from train.state import TrainState
from train.tasks.evaluation import EvaluatedModel, EvaluationOptions
from train.tasks.task import SampleOptions, TrainedModel


class Evaluator:
    """Evaluate and sample a training run, and track its best evaluation."""

    def __init__(self, experiment: Experiment, engine: Engine, corpus: Any):
        self.experiment, self.engine, self.corpus = experiment, engine, corpus
        self.task = make_task(experiment)
        self.best = BestEvaluation()

    def restore_best(self, best: BestEvaluation, checkpoints: CheckpointManager) -> None:
        """Continue from the best evaluation that the restored checkpoint holds.

        It is dropped if its own checkpoint is gone: either keeping it was not requested, or a
        later evaluation, which the resumed run has not made yet, was better.
        """
        self.best = best if not best.step or best.step in checkpoints.steps() else BestEvaluation()
        if self.experiment.uses_best_checkpoint and self.best.step:
            checkpoints.keep_best(self.best.step)

    def is_finished(self, step: int) -> bool:
        """Return True if training ends after `step` steps."""
        patience = self.experiment.early_stopping.patience
        return step >= self.experiment.steps or self.best.patience_exhausted(patience)

    def is_best(self, step: int) -> bool:
        """Return True if the evaluation of this step is the best and its checkpoint is kept."""
        return self.experiment.uses_best_checkpoint and self.best.step == step

    def evaluates_after(self, step: int) -> bool:
        """Return True if the state after a step is evaluated, or is the last."""
        return step == self.experiment.steps or is_due(step, self.experiment.evaluation.every)

    def evaluate_and_sample(self, step: int, state: TrainState, report: Reporter) -> None:
        """Evaluate and sample the state of a step, if either is due.

        After the last step, `report_final_metrics` evaluates the whole split and samples. The last
        step is evaluated here too if the best checkpoint is selected: it may be the best.
        """
        is_last = step == self.experiment.steps
        selects = not is_last or self.experiment.uses_best_checkpoint
        if selects and is_due(step, self.experiment.evaluation.every):
            with report.pause("evaluate"):
                metrics = self.evaluate(self.model_params(state), whole=False)
                report.log_evaluation(step, "validation", metrics)
            metric = self.task.selection_metric(self.corpus)
            self.best = self.best.after_evaluation(step, metrics[metric.name], metric)
        if not is_last and is_due(step, self.experiment.sample.every):
            with report.pause("evaluate"):
                self.log_sample(step, self.model_params(state), report)

    def model_params(self, state: TrainState) -> Any:
        """Return the weights of a state to evaluate, for the model."""
        return self.engine.model_params(eval_params(state))

    def evaluate(self, params: Any, *, whole: bool) -> dict[str, float]:
        """Return the validation metrics, over the whole split or `evaluation.num_batches`."""
        return evaluate_split(
            self.experiment, self.engine, params, self.corpus, "validation", whole=whole
        )

    def log_sample(self, step: int, params: Any, report: Reporter) -> None:
        """Log a sample, or why there is none."""
        try:
            text = self.generate_sample(params)
        except Exception as error:  # noqa: BLE001
            # A sample only shows how the run is doing: no error of it may end the training.
            reason = str(error).partition("\n")[0] or type(error).__name__
            report.log_event("sample failed", step=step, reason=reason)
            report.print_message(f"step {step}: no sample ({reason}); training continues")
        else:
            report.log_sample(step, text)

    def generate_sample(self, params: Any) -> str:
        """Return `sample.prompt` with the model's continuation; for other tasks, its answer."""
        settings, corpus = self.experiment.sample, self.corpus
        [text] = self.task.sample(
            TrainedModel(self.engine.model, params, corpus.tokenizer, corpus.labels),
            [settings.prompt],
            SampleOptions(
                settings.max_new_tokens, settings.sampling_config(), seed=self.experiment.seed
            ),
        )
        return settings.prompt + text if self.task.continues_prompt else text

    def final_weights(
        self, state: TrainState, step: int, checkpoints: CheckpointManager
    ) -> EvalWeights:
        """Return the weights to evaluate at the end: the last, the best or an average."""
        averages = self.experiment.evaluation.average_checkpoints > 1
        if not self.experiment.uses_best_checkpoint and not averages:
            # Merged, as `load` returns them: `evaluate` then gives the same numbers.
            return EvalWeights(self.engine.merged_params(eval_params(state)), [step])
        checkpoints.wait()
        return load_eval_weights(checkpoints, self.engine, self.experiment)

    def report_final_metrics(
        self, weights: EvalWeights, step: int, report: Reporter
    ) -> dict[str, float]:
        """Evaluate the whole validation split, and report the metrics."""
        if step < self.experiment.steps:
            report.log_event("stopped early", step=step, best=self.best.to_json())
            name = self.task.selection_metric(self.corpus).name
            report.print_message(
                f"step {step}: the best {name} is still {self.best.value:.4g} of step "
                f"{self.best.step}; training stops early"
            )
        if weights.steps != [step]:
            report.log_event("weights", step=step, checkpoints=weights.steps)
            report.print_message(
                f"step {step}: evaluating the weights of step {', '.join(map(str, weights.steps))}"
            )
        metrics = self.evaluate(weights.params, whole=True)
        # Of the best checkpoint: its own step, or a curve would show the gain at the last one.
        evaluated = weights.steps[0] if len(weights.steps) == 1 else step
        report.log_evaluation(evaluated, "validation", metrics)
        if self.experiment.sample.every:
            self.log_sample(step, weights.params, report)
        return metrics


def is_due(step: int, every: int) -> bool:
    """Return True at multiples of `every` steps; never if it is 0."""
    return every > 0 and step % every == 0


def evaluate_split(
    experiment: Experiment, engine: Engine, params: Any, corpus: Any, split: str, *, whole: bool
) -> dict[str, float]:
    """Return the metrics of weights over a split, or over `evaluation.num_batches` of it."""
    config, shards = experiment.evaluation, num_shards(engine.mesh, "batch")
    rows = config.batch_size or experiment.batch_size
    options = EvaluationOptions(
        batch_size=-(-rows // shards) * shards,
        row_multiple=shards,
        max_batches=None if whole or not config.num_batches else config.num_batches,
        stride=config.stride,
        compression_baselines=config.compression_baselines,
        is_final=whole,
    )
    model = EvaluatedModel(
        engine.model,
        params,
        engine.put_batch,
        functools.partial(engine.evaluate, params),
        engine.frozen,
    )
    return make_task(experiment).evaluate(model, corpus, split, options)
