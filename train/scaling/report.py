"""Files of an analysis: the runs as CSV, the fits as JSON, and the figure."""

import json

from train.data.files import AnyPath, expand_path
from train.run_folder.writing import explain_write_errors, write_atomically
from train.scaling.analysis import Analysis, format_csv
from train.scaling.figure import plot_scaling


def write_report(analysis: Analysis, workdir: str) -> AnyPath:
    """Write `runs.csv`, `scaling.json` and `scaling.png`; return the path of the figure.

    Raises:
      UserError: A file cannot be written.
    """
    folder = expand_path(workdir)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "runs.csv", format_csv(analysis.runs))
    write_atomically(folder / "scaling.json", json.dumps(analysis.as_dict(), indent=1) + "\n")
    figure = folder / "scaling.png"
    plot_scaling(analysis, figure)
    return figure
