"""How results are shown: figures as files, values over seeds as text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from train.figures import png
from train.runtime.writing import write_atomically

FIGURES = Path("docs/figures")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, png(figure))


def over_seeds(values: Sequence[float] | np.ndarray, digits: int) -> str:
    """Return the mean, and of several seeds the standard deviation: `4.21 ± 0.03`."""
    found = np.asarray(values, float)
    spread = f" ± {found.std(ddof=1):.{digits}f}" if len(found) > 1 else ""
    return f"{found.mean():.{digits}f}{spread}"
