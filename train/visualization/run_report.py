"""Report of one run, or of several side by side, as one HTML page."""

from collections.abc import Sequence

from train.errors import UsageError
from train.telemetry.goodput import ACTIVITY_DESCRIPTIONS
from train.visualization.html_page import build_page, embed_page, read_asset, write_page
from train.visualization.run_data import differing_settings, read_run


class RunReport:
    """Report of runs: settings, curves, events, samples, time, memory and environment.

        RunReport(["runs/books"])                       # in a notebook
        RunReport(["runs/a", "runs/b"]).save("ab.html")

    Raises UserError if a folder holds no run.
    """

    def __init__(self, workdirs: Sequence[str]):
        if not workdirs:
            raise UsageError("report: names no run; give one or more folders of runs")
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
            raise UsageError(f"output {output}: is no .html; give a name that ends with .html")
        write_page(self.html(), output)

    def _repr_html_(self) -> str:
        return embed_page(self.html())


REPORT_SCRIPTS = ("page.js", "chart.js", "report.js")
