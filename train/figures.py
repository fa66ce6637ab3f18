"""One look for all figures: readable at a width of 700 pixels, and in any colour vision."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The palette of Okabe and Ito with a darker purple; yellow and sky blue come last, faint on white.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#AA4499"
YELLOW, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#666666"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, BLACK)
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))


@contextlib.contextmanager
def figure_style() -> Iterator[None]:
    """Draw figures in the project's look; also a decorator, `@figure_style()`."""
    from matplotlib import rc_context  # importing it takes half a second
    from matplotlib.rcsetup import cycler

    lines = cycler(color=COLORS) + cycler(linestyle=DASHES)
    settings: Any = {
        "figure.dpi": 144,
        "savefig.dpi": 144,
        "figure.constrained_layout.use": True,
        "figure.facecolor": "white",  # on the dark pages of GitHub too
        "savefig.facecolor": "white",
        "font.size": 11,
        "axes.titlesize": 11,
        "legend.fontsize": 9.5,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.3,
        "lines.linewidth": 1.6,
        "lines.markersize": 4,
        "image.cmap": "Blues",
        # A line is known by its dashes too; of more than seven, the others have a marker.
        "axes.prop_cycle": cycler(marker=("none", "o", "s")) * lines,
    }
    with rc_context(settings):
        yield


def shades(count: int) -> list[Any]:
    """Return colours for values in an order, from dark to light."""
    from matplotlib import colormaps

    last = max(1, count - 1)
    return [colormaps["viridis"](0.85 * index / last) for index in range(count)]


def png(figure: Figure) -> bytes:
    """Return a figure as the content of a PNG file."""
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
