"""Figures of the explanation pages of the documentation.

    python -m bench.explanations [--folder docs/figures]

`masks` and `attention_steps` are computed by the library; `model`, `stacked_layers` and
`exact_resume` are diagrams.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from transformer import Hardware, Mask, MaskPattern
from transformer.attention.attend import attend
from transformer.attention.masks import dense_mask
from transformer.attention.reference import ScoreSpec

BLUE, ORANGE, GREEN, GREY = "#c6dbef", "#fdd0a2", "#c7e9c0", "#eeeeee"


def draw_masks() -> Figure:
    """Draw masks as `dense_mask` expands them."""
    length = 16
    causal = MaskPattern(causal=True)
    documents = jnp.array([[1] * 6 + [2] * 7 + [0] * 3])
    prefix = Mask(MaskPattern(causal=True, prefix=True), prefix_lengths=jnp.array([5]))
    cases = {
        "causal": Mask(causal),
        "bidirectional, padded": Mask(key_lengths=jnp.array([12])),
        "window of 4": Mask(MaskPattern(causal=True, window=4)),
        "window of 4, dilation 2": Mask(MaskPattern(causal=True, window=4, dilation=2)),
        "prefix of 5": prefix,
        "two documents, padding": Mask(causal, segments=documents),
    }
    figure, axes = pyplot.subplots(2, 3, figsize=(8, 5.6), layout="constrained")
    for axis, (title, mask) in zip(axes.flat, cases.items(), strict=True):
        axis.imshow(dense_mask(mask, length, length)[0], cmap="Blues", vmin=0, vmax=1.3)
        axis.set(title=title, xticks=[0, length - 1], yticks=[0, length - 1])
        axis.set_xlabel("key"), axis.set_ylabel("query")
    return figure


def draw_attention_steps() -> Figure:
    """Draw scores, masked scores and weights of one head over random vectors."""
    length, width = 10, 16
    q, k = (jax.random.normal(jax.random.key(seed), (1, length, 1, width)) for seed in (1, 4))
    scores = np.asarray(jnp.einsum("BTNH,BSNH->BNTS", q, k)[0, 0]) / np.sqrt(width)
    mask = Mask(MaskPattern(causal=True))
    visible = np.asarray(dense_mask(mask, length, length)[0])
    scores_of, outputs = ScoreSpec(1 / np.sqrt(width)), frozenset({"weights"})
    _, aux = attend(q, k, k, mask, scores_of, hardware=Hardware(), outputs=outputs)
    weights = np.asarray(aux["weights"])[0, 0]
    panels = {
        "scores q kᵀ / √H": scores,
        "scores, masked": np.where(visible, scores, np.nan),
        "weights (softmax)": np.where(visible, weights, np.nan),
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        is_weights = title.startswith("weights")
        limits = (0.0, 1.0) if is_weights else (-3.0, 3.0)
        drawn = axis.imshow(values, cmap="Blues" if is_weights else "RdBu", vmin=limits[0])
        drawn.set_clim(*limits)
        axis.set_facecolor("#d9d9d9")
        axis.set(title=title, xlabel="key", ylabel="query", xticks=[], yticks=[])
        figure.colorbar(drawn, ax=axis, shrink=0.8)
    return figure


def draw_model() -> Figure:
    """Draw the parts of a decoder with the shapes between them."""
    figure, axis = _blank(7.2, 6.6)
    stream = 1.5
    stem = {"arrowstyle": "-|>", "lw": 2.5}
    axis.annotate("", (stream, 6.2), (stream, 0.75), arrowprops=stem, zorder=0)
    _box(axis, 0.3, 0.2, 2.4, 0.5, "token ids  [B, T]", GREY)
    _box(axis, 0.3, 0.95, 2.4, 0.5, "embedding", GREEN)
    for y, text, color in (
        (2.0, "norm → attention", BLUE),
        (3.2, "norm → feed-forward", ORANGE),
    ):
        _box(axis, 3.6, y, 2.5, 0.6, text, color)
        arrow = {"arrowstyle": "-|>", "lw": 1.3, "color": "#444444"}
        axis.annotate("", (3.6, y + 0.12), (stream, y + 0.12), arrowprops=arrow)
        axis.annotate("", (stream, y + 0.5), (3.6, y + 0.5), arrowprops=arrow)
        axis.text(stream + 0.12, y + 0.57, "+", fontsize=13, weight="bold")
    axis.add_patch(
        FancyBboxPatch((1.1, 1.75), 6.5, 2.3, boxstyle="round,pad=0.05", fill=False, ls="--")
    )
    axis.text(7.5, 1.8, "one layer, L times", ha="right", fontsize=9)
    _box(axis, 0.3, 4.5, 2.4, 0.5, "final norm", GREY)
    _box(axis, 0.3, 5.3, 2.4, 0.5, "output matrix", GREEN)
    axis.text(stream, 6.3, "logits  [B, T, V]", ha="center", fontsize=10)
    notes = {1.5: "[B, T, D]", 4.15: "[B, T, D]"}
    for y, text in notes.items():
        axis.text(0.55, y + 0.05, text, fontsize=9, color="#333333")
    axis.text(6.3, 2.3, "q [B,T,N,H]\nk, v [B,S,K,H]", fontsize=8.5, va="center")
    axis.text(6.3, 3.5, "[B, T, F]", fontsize=8.5, va="center")
    axis.set(xlim=(0, 7.8), ylim=(0, 6.6))
    return figure


def draw_stacked_layers() -> Figure:
    """Draw five layers of a pattern of two places, and where their weights are stored."""
    figure, axis = _blank(7.4, 3.1)
    colors = (BLUE, ORANGE)
    for layer in range(5):
        x = 0.2 + 1.45 * layer
        text = f"layer {layer}\nplace {layer % 2}, rep. {layer // 2}"
        _box(axis, x, 2.1, 1.3, 0.7, text, colors[layer % 2], size=8.5)
    for place, (y, count) in enumerate(((1.1, 3), (0.3, 2))):
        axis.text(0.2, y + 0.25, f"place_{place}  [{count}, D, N, H]", fontsize=9.5, va="center")
        for index in range(count):
            label = f"layer {place + 2 * index}"
            _box(axis, 2.9 + 1.25 * index, y, 1.15, 0.5, label, colors[place], size=9)
    axis.set(xlim=(0, 7.5), ylim=(0.1, 3))
    return figure


def draw_exact_resume() -> Figure:
    """Draw an uninterrupted run above a killed one, and the contents of its checkpoint."""
    figure, axis = _blank(8, 3.4)
    for y, title in ((2.6, "never stopped"), (1.6, "killed at step 6")):
        axis.text(0.1, y + 0.2, title, fontsize=9.5, va="center")
        for step in range(1, 9 if y > 2 else 7):
            lost = y < 2 and step > 4
            x = 1.9 + 0.72 * (step - 1)
            _box(axis, x, y, 0.62, 0.4, str(step), GREY if lost else BLUE, size=9)
    for step in (5, 6, 7, 8):
        _box(axis, 1.9 + 0.72 * (step - 1), 1.02, 0.62, 0.4, str(step), BLUE, size=9)
    arrow = {"arrowstyle": "-|>", "lw": 1.4, "color": "#b30000"}
    axis.annotate("", (4.72, 1.22), (4.45, 1.6), arrowprops=arrow)
    axis.text(1.9, 1.2, "resumes from checkpoint 4", fontsize=9, va="center", color="#b30000")
    text = "checkpoint 4:  weights · moments · loss scale · anomaly history · seed · data cursor"
    _box(axis, 0.1, 0.15, 7.6, 0.5, text, GREEN, size=9)
    axis.set(xlim=(0, 7.8), ylim=(0, 3.2))
    return figure


def _blank(width: float, height: float) -> tuple[Figure, Axes]:
    figure, axis = pyplot.subplots(figsize=(width, height), layout="constrained")
    axis.axis("off")
    return figure, axis


def _box(
    axis: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    color: str,
    size: float = 10.0,
) -> None:
    """Draw a rounded box with a text in its middle."""
    style = "round,pad=0.02,rounding_size=0.06"
    axis.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor="#555555")
    )
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


FIGURES: dict[str, Callable[[], Figure]] = {
    "masks": draw_masks,
    "attention_steps": draw_attention_steps,
    "model": draw_model,
    "stacked_layers": draw_stacked_layers,
    "exact_resume": draw_exact_resume,
}


def main(folder: Path = Path("docs/figures")) -> None:
    """Draw all figures.

    Args:
      folder: Where to write them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        figure = draw()
        figure.savefig(folder / f"{name}.png", dpi=110)
        pyplot.close(figure)


if __name__ == "__main__":
    tyro.cli(main)
