"""Report of one run, or of several side by side, as one HTML page.

Its data are read from the files of the run folders. No model is loaded, so a report is written in a
second, also of a run whose code or hardware is elsewhere, and of one that is training.
"""

import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from train.config.io import flatten_fields
from train.errors import UsageError
from train.run_folder.folder import RunFolder, read_json
from train.telemetry.event_log import EventLog, JsonRecord
from train.telemetry.goodput import (
    ACTIVITY_DESCRIPTIONS,
    compute_goodput,
    format_duration,
    read_time_records,
)
from train.telemetry.metrics_log import read_metrics
from train.visualization.html_page import ASSETS, build_page, embed_page, write_page

MAX_POINTS = 1200
"""Largest number of points of a curve; of more, the extremes of equal stretches are kept."""

MAX_SAMPLES = 40
MAX_SAMPLE_CHARACTERS = 4000
"""A report has the last samples, each up to this length."""

MAX_EVENTS = 500

ACTIVITY_COLORS = {
    "step": "var(--series-3)",
    "replay": "var(--series-6)",
    "start": "var(--faint)",
    "restore": "var(--series-5)",
    "compile": "var(--series-1)",
    "evaluate": "var(--series-4)",
    "save": "var(--key)",
    "recover": "var(--bad)",
    "lost": "var(--rule)",
}
"""Color of each activity in the page's stylesheet."""

Point = tuple[float, float]
"""Step and value."""

_SAMPLE_START = re.compile(r"^--- step (\d+)\n", re.MULTILINE)


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
        names = [run["name"] for run in self.runs]
        for run, workdir in zip(self.runs, workdirs, strict=True):
            run["label"] = workdir if names.count(run["name"]) > 1 else run["name"]
        labels = ", ".join(run["label"] for run in self.runs)
        self.title = f"Run{'s' if len(self.runs) > 1 else ''} {labels}"

    def html(self) -> str:
        """Return the page: one file that needs no network."""
        settings = self._rows("settings")
        used = [
            name for name in ACTIVITY_DESCRIPTIONS if any(run["seconds"][name] for run in self.runs)
        ]
        values = {
            "title": self.title,
            "runs": self.runs,
            "summary_rows": self._summary_rows(),
            "differences": [row for row in settings if any(value != row[1] for value in row[1:])],
            "activities": used,
            "descriptions": ACTIVITY_DESCRIPTIONS,
            "colors": ACTIVITY_COLORS,
            "event_rows": self._event_rows(),
            "samples": sorted(
                [
                    {"label": run["label"], "is_last": each is run["samples"][-1], **each}
                    for run in self.runs
                    for each in run["samples"]
                ],
                key=lambda sample: sample["step"],
            ),
            "environment_rows": self._rows("environment"),
            "setting_rows": settings,
            "chosen_rows": self._rows("chosen"),
        }
        drawn = [{name: run[name] for name in ("label", "curves", "events")} for run in self.runs]
        return build_page("report.html", {"runs": drawn}, REPORT_SCRIPTS, values)

    def save(self, output: str) -> None:
        """Write the page. Raises UserError if it cannot be written."""
        if not output.endswith(".html"):
            raise UsageError(f"output {output}: does not end with .html; give a name that does")
        write_page(self.html(), output)

    def _repr_html_(self) -> str:
        return embed_page(self.html())

    def _rows(self, part: str) -> list[list[Any]]:
        """Return a row for each name in a part of the runs, with a value for each run."""
        names = dict.fromkeys(name for run in self.runs for name in run[part])
        return [[name, *(run[part].get(name) for run in self.runs)] for name in names]

    def _summary_rows(self) -> list[list[Any]]:
        """Return the first table of the page, as text."""
        rows = []
        for name, *values in self._rows("summary"):
            show = {"goodput": "{:.1%}".format, "seconds": format_duration}.get(name, show_number)
            cells = [None if value is None else show(value) for value in values]
            rows.append(["time" if name == "seconds" else name, *cells])
        for place, *peaks in self._rows("memory"):
            cells = [None if peak is None else f"{peak / 2**20:,.0f} MiB" for peak in peaks]
            rows.append([f"peak memory, {place}", *cells])
        return [*rows, ["starts", *(run["starts"] for run in self.runs)]]

    def _event_rows(self) -> list[list[Any]]:
        events = [(run["label"], each) for run in self.runs for each in run["events"]]
        return [
            [
                each["time"].replace("T", " ")[:19],
                *([label] if len(self.runs) > 1 else []),
                *(each[name] for name in ("step", "event", "details")),
            ]
            for label, each in sorted(events, key=lambda event: str(event[1]["time"]))
        ]


REPORT_SCRIPTS = ("page.js", "chart.js", "report.js")


def show_value(value: Any) -> str:
    """Return a setting or another value of a table as text."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value)


def show_number(value: float) -> str:
    """Return a number with the digits that matter."""
    if isinstance(value, int) or 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.4g}"


ASSETS.filters |= {"shown": show_value, "duration": format_duration}


def read_run(workdir: str) -> dict[str, Any]:
    """Return a run as plain data: settings, curves, events, samples, time and environment.

    Raises:
      UserError: There is no run, or its config.json is damaged.
    """
    folder = RunFolder.open_existing(workdir)
    config = read_json(folder.config_json)
    events = EventLog(folder.event_log).read()
    times = read_time_records(folder.time_log)
    goodput = compute_goodput(times)
    curves = collect_curves(read_metrics(folder.metrics))
    return {
        "name": folder.path.name,
        "path": str(folder.path),
        "settings": _flatten(config.get("experiment")),
        "chosen": _flatten(config.get("chosen")),
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


def _flatten(value: Any) -> dict[str, Any]:
    """Return plain data by dotted path; none of None."""
    return dict(flatten_fields(value)) if value else {}


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
    for step, each in zip(map(int, parts[::2]), parts[1::2], strict=True):
        while samples and samples[-1]["step"] >= step:
            samples.pop()
        samples.append({"step": step, "text": each.removesuffix("\n")[:MAX_SAMPLE_CHARACTERS]})
    return samples[-MAX_SAMPLES:]


def environment(config: Mapping[str, Any], events: Sequence[JsonRecord]) -> dict[str, Any]:
    """Return the hardware, the mesh and the versions that the run had last."""
    parts = {"hardware": config.get("hardware")}
    for event in events:
        if event["event"] in ("started", "resumed"):
            names = ("hardware", "mesh", "versions")
            parts |= {name: event[name] for name in names if name in event}
    return {name: value for name, value in _flatten(parts).items() if value not in (None, "", [])}


def summarize(
    curves: Mapping[str, Mapping[str, Sequence[Point]]], times: Sequence[JsonRecord]
) -> dict[str, Any]:
    """Return the numbers of the report's first table by name. NaN and infinity are never best."""
    summary: dict[str, Any] = {}
    steps = [int(curve[-1][0]) for splits in curves.values() for curve in splits.values()]
    summary["steps"] = max([*steps, *(each["step"] for each in times[-1:])], default=0)
    for split, curve in curves.get("loss", {}).items():
        finite = [value for _, value in curve if math.isfinite(value)]
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


def peak_memory(times: Sequence[JsonRecord]) -> dict[str, int]:
    """Return the largest memory that any process of the run recorded, in bytes, by place."""
    peaks: dict[str, int] = {}
    for record in times:
        for place, value in record.get("peak_memory_bytes", {}).items():
            peaks[place] = max(peaks.get(place, 0), value)
    return peaks


def _plain_event(event: JsonRecord) -> dict[str, Any]:
    """Return an event with its details as one line of text."""
    hidden = ("time", "event", "step", "hardware", "mesh", "versions")
    details = [
        f"{name.replace('_', ' ')} {_short(value)}".removesuffix(" ")
        for name, value in event.items()
        if name not in hidden and value
    ]
    return {
        "time": event["time"],
        "event": event["event"],
        "step": event.get("step"),
        "details": textwrap.shorten(", ".join(details), 400, placeholder=" …"),
    }


def _short(value: Any) -> str:
    """Return a value of an event; what has many parts as their number, True as nothing."""
    match value:
        case True:
            return ""
        case float():
            return f"{value:.4g}"
        case list() if len(value) > 3:
            return f"({len(value)})"
        case list():
            return ", ".join(map(str, value))
        case dict():
            return f"({len(value)})"
    return str(value)
