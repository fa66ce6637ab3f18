"""Figures of attention for papers: a grid of all heads, or one head with its tokens."""

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from train.data.files import expand_path
from train.errors import as_user_error
from train.visualization.attention_view import STAGE_TITLES

if TYPE_CHECKING:
    from train.visualization.attention_view import AttentionView
    from transformer.attention_maps import AttentionMap

HIDDEN_COLOR = "#d9dde3"
MAX_NAMED_TOKENS = 80
"""Rows or columns with more tokens have no names in a figure of one head: they would overlap."""


def save_figure(view: "AttentionView", output: str, *, one_head: bool) -> None:
    """Draw a view and write it; the name's ending decides the format.

    Raises:
      UserError: The file cannot be written.
    """
    from matplotlib import rc_context

    drawing = io.BytesIO()
    # Text of a PDF stays text (Type 42), as publishers ask for.
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "text.parse_math": False}):
        figure = draw_head(view) if one_head else draw_all_heads(view)
        name = output.rpartition(".")[2]
        figure.savefig(drawing, format=name, dpi=200, bbox_inches="tight", metadata=_metadata(name))
    with as_user_error(output):
        expand_path(output).write_bytes(drawing.getvalue())


def draw_all_heads(view: "AttentionView") -> Any:
    """Return a figure with a panel for each head: layers are rows, stages are below each other."""
    from matplotlib.figure import Figure

    stages = [(stage, view.maps_of(stage)) for stage in view.stages]
    columns = max(each.weights.shape[1] for _, maps in stages for each in maps)
    rows = sum(len(maps) for _, maps in stages)
    figure = Figure(
        figsize=(0.9 + 1.1 * columns, 0.5 + 1.15 * rows + 0.35 * len(stages)), layout="constrained"
    )
    parts: Any = figure.subfigures(len(stages), 1, height_ratios=[len(m) for _, m in stages])
    for part, (stage, maps) in zip(np.atleast_1d(parts), stages, strict=True):
        part.suptitle(STAGE_TITLES[stage], fontsize=10)
        grid = part.subplots(len(maps), columns, squeeze=False)
        for row, attention in zip(grid, maps, strict=True):
            row[0].set_ylabel(f"layer {attention.layer}", fontsize=8)
            for head, axes in enumerate(row):
                if head >= attention.weights.shape[1]:
                    axes.axis("off")
                    continue
                _draw(axes, attention, head)
                axes.set(xticks=[], yticks=[])
                if attention is maps[0]:
                    axes.set_title(f"head {head}", fontsize=8)
    return figure


def draw_head(view: "AttentionView") -> Any:
    """Return a figure of the open head of the last stage, with the tokens of rows and columns."""
    from matplotlib.figure import Figure

    stage = view.stages[-1]
    attention = view.maps_of(stage)[view.layer]
    labels = view.labels_of(stage)
    height, width = (min(14.0, 1.6 + 0.24 * len(each)) for each in labels)
    figure = Figure(figsize=(width + 0.8, height), layout="constrained")
    axes = figure.subplots()
    image = _draw(axes, attention, view.head)
    axes.set_title(f"{STAGE_TITLES[stage]}, layer {attention.layer}, head {view.head}", fontsize=10)
    rows, columns = ([_plain(text) for text in each] for each in labels)
    if len(rows) <= MAX_NAMED_TOKENS:
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
    if len(columns) <= MAX_NAMED_TOKENS:
        axes.set_xticks(range(len(columns)), columns, fontsize=8, rotation=60, ha="right")
    figure.colorbar(image, ax=axes, shrink=0.6, label="attention weight")
    return figure


def _draw(axes: Any, attention: "AttentionMap", head: int) -> Any:
    """Draw one head; hidden pairs are grey, so that they differ from a weight of 0."""
    weights = np.asarray(attention.weights)[0, head]
    visible = np.asarray(attention.visible)[0]
    visible = visible[head if len(visible) > 1 else 0]
    from matplotlib.colors import PowerNorm

    axes.set_facecolor(HIDDEN_COLOR)
    visible_weights = np.ma.masked_array(weights, mask=~visible)
    for side in axes.spines.values():
        side.set(color="#aab1bc", linewidth=0.6)
    # The root, as in the page: small weights stay visible.
    return axes.imshow(
        visible_weights,
        cmap="Blues",
        norm=PowerNorm(0.5, 0, 1),
        interpolation="nearest",
        aspect="auto",
    )


def _plain(text: str) -> str:
    """Return a token as the font of a figure can write it."""
    return text.strip("·") or text


def _metadata(name: str) -> dict[str, None]:
    # Equal inputs give equal files: no date.
    return {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(name, {})
