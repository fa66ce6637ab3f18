"""Report of one run, or of several side by side, as one HTML page.

Its data are read from the files of the run folders. Nothing is loaded that computes, so a report is
written in a second, also of a run whose code or hardware is elsewhere, and of one that is training.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from train.errors import UsageError
from train.run_folder.folder import RunFolder, read_json
from train.telemetry.event_log import EventLog, JsonRecord
from train.telemetry.goodput import ACTIVITY_DESCRIPTIONS, compute_goodput, read_time_records
from train.telemetry.metrics_log import is_step_number, read_metrics
from train.visualization.html_page import build_page, embed_page, read_asset, write_page


class RunReport:
    """Report of runs: settings, curves, events, samples, time, memory and environment.

        RunReport(["runs/books"])                       # in a notebook
        RunReport(["runs/a", "runs/b"]).save("ab.html")

    Raises UserError if a folder holds no run.
    """

    def __init__(self, workdirs: Sequence[str]):
        if not workdirs:
            raise UsageError("report: no run is given; give the folders of one or more runs")
        self.runs = [read_run(workdir) for workdir in workdirs]
        for run, workdir in zip(self.runs, workdirs, strict=True):
            if sum(each["name"] == run["name"] for each in self.runs) > 1:
                run["label"] = workdir
        names = [run.setdefault("label", run["name"]) for run in self.runs]
        self.title = f"Run {names[0]}" if len(names) == 1 else f"Runs {', '.join(names)}"

    def html(self) -> str:
        """Return the page: one file that needs no network."""
        data = {
            "title": self.title,
            "runs": self.runs,
            "differences": differing_settings(self.runs),
            "activities": ACTIVITY_DESCRIPTIONS,
        }
        return build_page(self.title, read_asset("report.html"), data, REPORT_SCRIPTS)

    def save(self, output: str) -> None:
        """Write the page. Raises UserError if it cannot be written."""
        if not output.endswith(".html"):
            raise UsageError(f"output {output}: does not end with .html; give a name that does")
        write_page(self.html(), output)

    def _repr_html_(self) -> str:
        return embed_page(self.html())


REPORT_SCRIPTS = ("page.js", "chart.js", "report.js")


MAX_POINTS = 1200
"""Largest number of points of a curve; of more, the extremes of equal stretches are kept."""

MAX_SAMPLES = 40
MAX_SAMPLE_CHARACTERS = 4000
"""A report has the last samples, each up to this length."""

MAX_EVENTS = 500

Point = tuple[float, float]
"""Step and value."""

_SAMPLE_START = re.compile(r"^--- step (\d+)\n", re.MULTILINE)


def read_run(workdir: str) -> dict[str, Any]:
    """Return a run as JSON: its settings, curves, events, samples, time, memory and environment.

    Raises:
      UserError: There is no run, or its config.json is damaged.
    """
    folder = RunFolder.open_existing(workdir)
    config = read_json(folder.config_json)
    config = config if isinstance(config, dict) else {}
    events = [each for each in EventLog(folder.event_log).read() if "event" in each]
    times = read_time_records(folder.time_log)
    goodput = compute_goodput(times)
    curves = collect_curves(read_metrics(folder.metrics))
    return {
        "name": folder.path.name,
        "path": str(folder.path),
        "settings": dict(flatten(config.get("experiment"))),
        "chosen": dict(flatten(config.get("chosen"))),
        "curves": {
            name: {split: thin(curve) for split, curve in splits.items()}
            for name, splits in curves.items()
        },
        "events": [_plain_event(each) for each in events[-MAX_EVENTS:]],
        "samples": read_samples(folder),
        "seconds": goodput.seconds,
        "starts": goodput.starts,
        "memory": peak_memory(times),
        "environment": environment(config, events),
        "summary": summarize(curves, times),
    }


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested JSON with their dotted names, as in config.txt."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from flatten(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        for index, each in enumerate(value):
            yield from flatten(each, f"{name}.{index}")
    elif name:
        yield name, value


def collect_curves(records: Sequence[JsonRecord]) -> dict[str, dict[str, list[Point]]]:
    """Return curves by metric and split. A step that was written again has its last value."""
    curves: dict[str, dict[str, dict[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("step", "split"):
                curve = curves.setdefault(name, {}).setdefault(record["split"], {})
                # By step: a resumed or rolled-back run writes some steps again.
                curve[record["step"]] = float(value)
    return {
        name: {split: sorted(curve.items()) for split, curve in splits.items()}
        for name, splits in curves.items()
    }


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return at most about `limit` points: the least and the largest value of each stretch.

    A single spike stays visible, which it would not in a mean or in every n-th point.
    """
    if len(points) <= limit:
        return list(points)
    stretches = limit // 2
    kept_points: list[Point] = [points[0]]
    for index in range(stretches):
        start, end = (len(points) * each // stretches for each in (index, index + 1))
        part = points[start:end]
        # NaN compares False with everything, and would be both extremes of its stretch.
        compared = [point for point in part if not math.isnan(point[1])] or part[:1]
        extremes = {pick(compared, key=lambda point: point[1]) for pick in (min, max)}
        kept_points += sorted(extremes)
    return list(dict.fromkeys([*kept_points, points[-1]]))


def read_samples(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the last samples of samples.txt with their steps.

    A run that went back to an earlier step has other samples from there on: those before are left
    out.
    """
    if not folder.samples.exists():
        return []
    text = folder.samples.read_bytes().decode(errors="replace")
    parts = _SAMPLE_START.split(text)[1:]
    samples: list[dict[str, Any]] = []
    for step, each in zip(map(int, parts[::2]), parts[1::2], strict=False):
        while samples and samples[-1]["step"] >= step:
            samples.pop()
        samples.append({"step": step, "text": each.removesuffix("\n")[:MAX_SAMPLE_CHARACTERS]})
    return samples[-MAX_SAMPLES:]


def peak_memory(times: Sequence[JsonRecord]) -> dict[str, float]:
    """Return the largest memory that any process of the run recorded, in bytes, by place."""
    peaks: dict[str, float] = {}
    for record in times:
        peak = record.get("peak_memory_bytes")
        for place, value in peak.items() if isinstance(peak, dict) else ():
            if isinstance(value, int | float):
                peaks[str(place)] = max(peaks.get(str(place), 0), value)
    return peaks


def environment(config: Mapping[str, Any], events: Sequence[JsonRecord]) -> dict[str, Any]:
    """Return the hardware, the mesh and the versions that the run had last."""
    parts = {"hardware": config.get("hardware")}
    for event in events:
        if event["event"] in ("started", "resumed"):
            names = ("hardware", "mesh", "versions")
            parts |= {name: event[name] for name in names if name in event}
    return dict(flatten(parts))


def summarize(
    curves: Mapping[str, Mapping[str, Sequence[Point]]], times: Sequence[JsonRecord]
) -> dict[str, Any]:
    """Return the numbers of the report's first table by name. NaN and infinity are never best."""
    summary: dict[str, Any] = {}
    steps = [int(curve[-1][0]) for splits in curves.values() for curve in splits.values()]
    summary["steps"] = max([*steps, *(each["step"] for each in times[-1:])], default=0)
    for split, curve in curves.get("loss", {}).items():
        finite = [value for _, value in curve if abs(value) < float("inf")]
        summary[f"{split} loss, last"] = curve[-1][1]
        if finite and split != "train":
            summary[f"{split} loss, best"] = min(finite)
    for name, splits in curves.items():
        for split, curve in splits.items():
            if split != "train" and name != "loss":
                summary[f"{split} {name.replace('_', ' ')}, last"] = curve[-1][1]
    speeds = sorted(value for _, value in curves.get("tokens_per_second", {}).get("train", ()))
    if speeds:
        summary["tokens per second, median"] = speeds[len(speeds) // 2]
    goodput = compute_goodput(times)
    if goodput.total:
        summary["goodput"] = goodput.productive_fraction
        summary["seconds"] = goodput.total
    return summary


def _plain_event(event: JsonRecord) -> dict[str, Any]:
    """Return an event with its details as one line of text."""
    step = event.get("step")
    hidden = ("time", "event", "step", "hardware", "mesh", "versions")
    fields_shown = {name: value for name, value in event.items() if name not in hidden and value}
    details = [f"{name.replace('_', ' ')} {_format(value)}" for name, value in fields_shown.items()]
    return {
        "time": str(event.get("time", "")),
        "event": str(event["event"]),
        "step": step if is_step_number(step) else None,
        "details": ", ".join(details)[:400],
    }


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings that are not equal in all runs, with a value for each; None: absent."""
    names = sorted({name for run in runs for name in run["settings"]})
    rows = [(name, [run["settings"].get(name) for run in runs]) for name in names]
    return [
        {"name": name, "values": values}
        for name, values in rows
        if any(value != values[0] for value in values)
    ]
