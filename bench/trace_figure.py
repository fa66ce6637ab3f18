"""Figure of docs/profiling.md: traces of steps, and of steps that wait for their batches.

    python -m bench.trace_figure

trains a small model twice on this machine, the second time with a pause of four seconds in the
loading of each batch, and draws what the traces of `--profile` hold.
"""

import dataclasses
import gzip
import json
import pathlib
import tempfile
import time
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import train
from train import loop
from train.config.experiment_files import find_experiment
from train.experiment import EvaluationConfig, Experiment, SampleConfig

FIGURE = pathlib.Path(__file__).parents[1] / "docs" / "figures" / "profile.png"
STEPS = (3, 6)
PAUSE_SECONDS = 4.0
ROWS = {
    "host: dispatch of a step": lambda event: event["name"] == "train",
    "loader: load_batch": lambda event: event["name"].endswith(" load_batch"),
    "XLA: program runs": lambda event: event["name"].startswith("ThunkExecutor::Execute"),
}
"""Rows of the figure, and the events of each."""


def small_experiment() -> Experiment:
    """Return the quickstart with small batches, and nothing between the steps."""
    experiment = find_experiment("quickstart")
    return dataclasses.replace(
        experiment,
        steps=STEPS[1],
        batch_size=8,
        profile=f"{STEPS[0]}:{STEPS[1]}",
        log_every=1,
        evaluation=EvaluationConfig(every=0, num_batches=1),
        sample=SampleConfig(),
    )


def traced_events(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Train, and return the timed events of the trace."""
    train.fit(small_experiment(), str(folder), quiet=True)
    [file] = folder.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def draw(axes: Axes, events: list[dict[str, Any]], title: str) -> None:
    """Draw one line of bars for each row."""
    for row, (name, belongs) in enumerate(ROWS.items()):
        # From microseconds to seconds. Dispatch takes a millisecond, so thin bars are widened.
        bars = [(e["ts"] / 1e6, max(e["dur"] / 1e6, 0.02)) for e in events if belongs(e)]
        axes.broken_barh(bars, (row - 0.35, 0.7), color=f"C{row}", alpha=0.7, label=name)
    axes.set(yticks=range(len(ROWS)), yticklabels=list(ROWS), title=title)
    axes.invert_yaxis()


def main() -> None:
    """Measure and draw."""
    load_at_once = loop.TrainingLoop.load_batch

    def load_batch(self: Any, cursor: int) -> Any:
        time.sleep(PAUSE_SECONDS)
        return load_at_once(self, cursor)

    figure, (above, below) = plt.subplots(2, figsize=(9, 4.5), sharex=True, layout="constrained")
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        draw(above, traced_events(root / "plain"), "the device is busy: steps follow each other")
        with mock.patch.object(loop.TrainingLoop, "load_batch", load_batch):
            stalled = traced_events(root / "stalled")
        draw(below, stalled, "input stall: the device waits for load_batch")
    below.set_xlabel("seconds since the trace began")
    figure.savefig(FIGURE, dpi=110)


if __name__ == "__main__":
    main()
