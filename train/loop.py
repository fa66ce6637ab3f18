"""Training a run from its first step, or from where it stopped, to its last."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import jax
import numpy as np

from train.checkpoints import Checkpoints
from train.data import Tokenizer
from train.data.prefetch import prefetch
from train.engine import Metrics, check_rows, make_engine
from train.errors import UserError
from train.experiment import Experiment
from train.hardware import keep_compiled_programs, local_hardware
from train.judge import Judge
from train.logbook import Logbook
from train.memory import explain_exhaustion, smaller
from train.preemption import PreemptedError, StopRequest
from train.progress import Progress
from train.report import Report
from train.run import Run, saved_experiment, saved_labels
from train.runfolder import RunFolder, write_atomically
from train.settings import as_text, changes, forbidden, to_plain
from train.state import TrainState
from train.step import Batch
from train.stopping import Best
from train.tasks.registry import make_task
from train.tasks.task import Rows, Task
from transformer.hardware import Hardware


def fit(experiment: Experiment, workdir: str = "", *, quiet: bool = False) -> Run:
    """Trains; in a folder that has checkpoints it goes on from the newest, bit for bit.

    Args:
      experiment: What to train.
      workdir: The run's folder, local or remote; `runs/<name>` if empty.
      quiet: Show nothing.

    Raises:
      UserError: something the user can put right; what was written before is still there.
      PreemptedError: the process was told to stop, and has saved a checkpoint.
    """
    hardware = local_hardware()
    keep_compiled_programs()
    folder = RunFolder.create(workdir or f"runs/{experiment.name}")
    with explain_exhaustion(smaller(experiment)):
        return _Fit(experiment, folder, hardware, quiet).run()


class _Fit:
    """What the parts of one `fit` share. Making it writes nothing."""

    def __init__(self, experiment: Experiment, folder: RunFolder, hardware: Hardware, quiet: bool):
        self.folder, self.quiet = folder, quiet
        # A run without a checkpoint has nothing to be true to: it begins anew, as it is asked for.
        with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
            begun = checkpoints.latest_step() is not None
        saved = saved_experiment(folder) if begun else None
        tokenizer = Tokenizer.load(folder.tokenizer) if begun else None
        task = make_task(experiment)
        self.corpus = task.prepare(tokenizer, saved_labels(folder) if begun else None)
        self.experiment = task.resolved(self.corpus)
        self.task = make_task(self.experiment)
        self.differences = changes(saved, self.experiment) if saved else {}
        self.check_saved()
        self.batches = self.task.batches(self.corpus)
        if self.experiment.sample.every:
            check_prompt(self.task, self.experiment.sample.prompt, self.corpus.tokenizer)
        self.engine = make_engine(self.experiment, hardware)
        check_rows(self.experiment, self.engine.mesh)
        self.judge = Judge(self.experiment, self.engine, self.corpus, folder)

    def check_saved(self) -> None:
        """Refuses to resume a run with other settings or other data, before anything is written."""
        refused = forbidden(self.differences)
        if refused:
            name, (old, new) = next(iter(refused.items()))
            raise UserError(
                f"{self.folder.path}: its run was trained with {name} = {old}, not {new}"
                f"{f' (and {len(refused) - 1} more differ)' if len(refused) > 1 else ''}; "
                "give another --workdir, or the settings of its config.txt"
            )

    def run(self) -> Run:
        settings, path = self.experiment.checkpoint, self.folder.checkpoints
        with Checkpoints(
            path,
            every=settings.every,
            keep=settings.keep,
            keep_every=settings.keep_every,
            average=self.experiment.evaluation.average,
        ) as checkpoints:
            state, done = self.start(checkpoints)
            speaks = jax.process_index() == 0
            metrics = self.finished_before(done)
            if metrics is not None:
                quiet = self.quiet or not speaks
                early = done < self.experiment.steps
                Progress(done, quiet=quiet).print(
                    f"{self.experiment.name} is finished: {done} steps are done, and "
                    f"{'evaluations got no better' if early else 'as many were asked for'}; "
                    f"in {self.folder.path}"
                )
                return self.judge.result(self.judge.served(state, done, checkpoints), metrics)
            if speaks:
                self.write_settings()
            report = Report(
                self.folder, self.experiment, done=done, speaks=speaks, quiet=self.quiet
            )
            with report, StopRequest() as stop:
                self.announce(report, done)
                if not self.judge.ended(done):
                    state = self.train(state, done, checkpoints, report, stop)
                served = self.judge.served(state, int(state.step), checkpoints)
                metrics = self.judge.finish(served, int(state.step), report)
        return self.judge.result(served, metrics)

    def start(self, checkpoints: Checkpoints) -> tuple[TrainState, int]:
        """The state to go on from, and its step."""
        latest = checkpoints.latest_step()
        if latest is None:
            return self.engine.init(), 0
        if latest > self.experiment.steps:
            raise UserError(
                f"{self.folder.path}: its run is at step {latest} already; "
                f"give --steps {latest} or more, or another --workdir"
            )
        state, extra = checkpoints.restore(latest, self.engine.shapes())
        if extra.get("corpus") != self.corpus.digest:
            raise UserError(
                f"data.path {self.experiment.data.path}: is not the text that "
                f"{self.folder.path} was trained on; give that text, or another --workdir"
            )
        self.judge.remember(Best.from_plain(extra.get("best", {})), checkpoints)
        return state, latest

    def finished_before(self, done: int) -> dict[str, float] | None:
        """The metrics at the end of a run that has nothing left to do; None if it has."""
        if not self.judge.ended(done):
            return None
        for line in reversed(Logbook(self.folder.logbook).read()):
            if line.get("event") == "finished" and line.get("step") == done:
                known = {name: line[name] for name in line if name not in ("time", "event", "step")}
                return {name: float(value) for name, value in known.items()}
        return None

    def write_settings(self) -> None:
        """config.json comes last: a folder that has it holds a run."""
        chosen = self.engine.choices()
        plain = {"experiment": to_plain(self.experiment), "chosen": chosen}
        lines = "".join(f"# auto: {name} = {choice}\n" for name, choice in chosen.items())
        write_atomically(self.folder.tokenizer, self.corpus.tokenizer.to_json())
        if labels := self.corpus.labels:
            write_atomically(self.folder.labels, json.dumps(labels, ensure_ascii=False) + "\n")
        write_atomically(self.folder.config_text, as_text(self.experiment) + lines)
        write_atomically(self.folder.config_json, json.dumps(plain, indent=1) + "\n")

    def announce(self, report: Report, done: int) -> None:
        count = sum(leaf.size for leaf in jax.tree.leaves(self.engine.shapes().params))
        hardware = self.engine.model.hardware
        report.event(
            "resumed" if done else "started",
            step=done,
            hardware=dataclasses.asdict(hardware),
            mesh=dict(self.engine.mesh.shape),
            changed={name: new for name, (_, new) in self.differences.items()},
        )
        amount = self.task.amount(self.corpus)
        verb = f"goes on from step {done}" if done else "begins"
        report.say(
            f"{self.experiment.name} {verb}: {count:,} parameters, {amount}, "
            f"{hardware.count} {hardware.kind or hardware.platform}; in {self.folder.path}"
        )
        for note in self.corpus.notes:
            report.say(note)

    def train(
        self,
        state: TrainState,
        done: int,
        checkpoints: Checkpoints,
        report: Report,
        stop: StopRequest,
    ) -> TrainState:
        experiment, engine = self.experiment, self.engine
        cursor = int(state.cursor)
        with contextlib.closing(prefetch(self.load, cursor)) as batches:
            for step in range(done + 1, experiment.steps + 1):
                _, (tokens, batch) = next(batches)
                state, metrics = engine.step(state, batch)
                report.step(tokens)
                if step == done + 1:
                    jax.block_until_ready(metrics)
                    report.compiled(step)
                if step % experiment.log_every == 0 or step == experiment.steps:
                    report.train(step, fetched(metrics))
                self.judge.look(step, state, report)
                last = self.judge.ended(step)
                asked = stop.signal  # read once: it may come at any moment
                if last or asked or checkpoints.due(step) or self.judge.is_best(step):
                    with report.pause():
                        self.save(step, state, checkpoints)
                if last:
                    break
                if asked:
                    checkpoints.wait()
                    report.event("preempted", step=step, why=asked)
                    raise PreemptedError(
                        f"{self.folder.path}: stopped by {asked} at step {step}, "
                        "checkpoint saved; the same command goes on from there"
                    )
        return state

    def save(self, step: int, state: TrainState, checkpoints: Checkpoints) -> None:
        if self.judge.is_best(step):
            checkpoints.keep_best(step)
        extra = {"corpus": self.corpus.digest, "best": self.judge.best.as_plain()}
        checkpoints.save(step, state, extra)

    def load(self, cursor: int) -> tuple[int, Batch]:
        """How many tokens a batch has, and the batch on the devices."""
        rows = self.batches.host(cursor, jax.process_index(), jax.process_count())
        return tokens_in(rows) * jax.process_count(), self.engine.put(rows)


def check_prompt(task: Task, prompt: str, tokenizer: Tokenizer) -> None:
    """Raises UserError now, and not after the steps before the first sample."""
    try:
        task.check_prompt(prompt, tokenizer)
    except UserError as error:
        problem = str(error).removeprefix("the text: ").removeprefix(f"prompt {prompt!r}: ")
        raise UserError(f"sample.prompt {prompt!r}: {problem}") from error


def tokens_in(rows: Rows) -> int:
    """The tokens of a batch that are no padding: of a translation, those of the source too."""
    segments = [array for name, array in rows.items() if name.endswith("segments")]
    return sum(int(np.count_nonzero(each)) for each in segments)


def fetched(metrics: Metrics) -> dict[str, float]:
    """Metrics as numbers: this waits for the step to end."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}
