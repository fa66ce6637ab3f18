"""An experiment as a command: its settings from the command line, its errors as one line."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

from train.errors import UserError
from train.figures import figure_style, png
from train.runtime.signals import PREEMPTED_EXIT_STATUS, PreemptedError
from train.runtime.writing import write_atomically

FIGURES = Path("docs/figures")


def command(experiment: Callable[..., None]) -> Callable[..., int]:
    """Return a function of the command line's arguments (None: those of this process).

    It returns the exit status. 75: the experiment was stopped, and the same command resumes it.
    """

    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            with figure_style():
                tyro.cli(experiment, args=arguments)
        except PreemptedError as stop:
            print(stop, file=sys.stderr)
            return PREEMPTED_EXIT_STATUS
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0

    return run


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, png(figure))


def over_seeds(values: Sequence[float] | np.ndarray, digits: int) -> str:
    """Return the mean, and of several seeds the standard deviation: `4.21 ± 0.03`."""
    found = np.asarray(values, float)
    spread = f" ± {found.std(ddof=1):.{digits}f}" if len(found) > 1 else ""
    return f"{found.mean():.{digits}f}{spread}"
