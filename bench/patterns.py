"""Pictures of the attention patterns: which query sees which key.

    python -m bench.patterns [--figure docs/figures/attention_patterns.png]

Mixers with a sparse pattern report it (`select`). For the others (Longformer, whose global
tokens have their own weights, and full attention) a key counts as visible to the tokens whose
outputs change when it changes. If a pattern has several parts, the mixer is also run with fewer of
them, and a key gets the color of the first part that shows it. Only the first head is drawn.
Performer and linear attention see all keys, and Linformer projections of all: they have no pattern.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib import colors, pyplot
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from bench.pattern_panels import (
    ALL,
    CHOSEN,
    FAR,
    HIDDEN,
    LENGTH,
    NEAR,
    RANDOM,
    UNSEEN,
    Panel,
    panels,
)
from transformer import Hardware, Mask, MaskPattern, MixerConfig
from transformer.attention.masks import dense_mask
from transformer.testing.mixer_under_test import Trial, make_trial, projections

WIDTH, WORDS = 32, 9
DOCUMENTS = (40, 24)

LOOKS = {
    HIDDEN: ("hidden by the mask", "#ffffff"),
    UNSEEN: ("left out", "#e6e9ee"),
    ALL: ("all of them", "#4a5568"),
    NEAR: ("near: a window, a block", "#2f6db3"),
    FAR: ("global, or the pattern's far part", "#e08a1e"),
    RANDOM: ("drawn at random", "#2f9468"),
    CHOSEN: ("chosen by the tokens", "#9c3d8f"),
}


def text() -> np.ndarray:  # [1, T, D]
    """Return noisy repetitions of a few random vectors."""
    random = np.random.default_rng(3)
    words = random.normal(size=(WORDS, WIDTH))[random.integers(WORDS, size=LENGTH)]
    return (words + 0.5 * random.normal(size=words.shape)).astype(np.float32)[None]


def mask_of(*, causal: bool, packed: bool) -> Mask:
    """Return the mask of a row with one document or two."""
    sizes = DOCUMENTS if packed else (LENGTH,)
    arrays: Any = dict(positions=np.concatenate([np.arange(size) for size in sizes])[None])
    if packed:
        arrays["segments"] = np.repeat(np.arange(len(sizes)) + 1, sizes)[None]
    return Mask(MaskPattern(causal=causal), **arrays)


@functools.cache
def trial_of(config: MixerConfig) -> Trial:
    """Return the mixer with random weights."""
    return make_trial(config, WIDTH, LENGTH, (LENGTH,), Hardware())


@functools.cache
def seen(config: MixerConfig, *, causal: bool, packed: bool = False) -> np.ndarray:
    """Return booleans [T, S]: the keys that each query of the first head sees."""
    trial, mask = trial_of(config), mask_of(causal=causal, packed=packed)
    mixer: Any = trial.mixer
    if not hasattr(mixer, "select"):
        return changed(trial, mask)
    inputs = trial.mixer_inputs(LENGTH, positions=np.asarray(mask.positions), mask=mask)
    selected = mixer.select(projections(mixer, trial.params, text(), inputs), inputs)
    return np.asarray(selected)[0, 0] & np.asarray(dense_mask(mask, LENGTH, LENGTH))[0]


def changed(trial: Trial, mask: Mask) -> np.ndarray:  # [T, S] booleans
    """Return which outputs change when a token changes, with one example per changed token.

    A token's own output always changes, whether or not the pattern shows the token to itself.
    """
    x = text()
    many = np.repeat(x, LENGTH, axis=0)
    many[np.arange(LENGTH), np.arange(LENGTH)] += 1
    given: Any = dict(positions=mask.positions, mask=mask)
    differs = np.abs(trial(many, **given).y - trial(x, **given).y).max(-1)  # [S, T]
    return (differs > 1e-6).T


def reasons(panel: Panel, *, causal: bool) -> np.ndarray:  # [T, S] ints
    """Return the first part of the pattern that shows a key to a query."""
    mask = mask_of(causal=causal, packed=panel.packed)
    first_part = np.where(np.asarray(dense_mask(mask, LENGTH, LENGTH))[0], UNSEEN, HIDDEN)
    for part, config in panel.parts.items():
        visible = seen(config, causal=causal, packed=panel.packed)
        first_part[(first_part == UNSEEN) & visible] = part
    return first_part


def draw(axes: Any, parts_shown: np.ndarray) -> None:
    """Draw queries as rows and keys as columns."""
    colours = colors.ListedColormap([colour for _, colour in LOOKS.values()])
    axes.imshow(parts_shown, cmap=colours, vmin=0, vmax=len(LOOKS) - 1, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set(color="#aab1bc", linewidth=0.8)


def main(figure: Path = Path("docs/figures/attention_patterns.png")) -> None:
    """Draw all patterns and print the fraction of token pairs that each keeps."""
    shown = panels()
    columns = len(shown) // 2
    space = ConstrainedLayoutEngine(h_pad=0.1)
    fig = pyplot.figure(figsize=(2.2 * columns, 10.8), layout=space)
    halves: Any = fig.subfigures(2, 1)
    for half, part in enumerate(halves):
        grid = part.subplots(2, columns)
        for pair, panel in zip(grid.T, shown[half * columns :], strict=False):
            pair[0].set_title(f"{panel.kind}\n", fontsize=11, fontweight="bold")
            pair[0].text(0.5, 1.03, panel.name, ha="center", transform=pair[0].transAxes)
            for axes, causal in zip(pair, (False, True), strict=True):
                if causal and not panel.can_be_causal:
                    axes.axis("off")
                    continue
                parts_shown = reasons(panel, causal=causal)
                draw(axes, parts_shown)
                share = (parts_shown > UNSEEN).mean()
                print(f"{panel.kind}, {panel.name}{', causal' * causal}: {share:.1%} of all pairs")
        for axes, label in zip(grid[:, 0], ("queries", "queries, causal"), strict=True):
            axes.set_ylabel(label)
        grid[1, 0].set_xlabel("keys")
    handles = [
        Patch(facecolor=colour, edgecolor="#aab1bc", label=label)
        for label, colour in LOOKS.values()
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, dpi=100)
    pyplot.close(fig)


if __name__ == "__main__":
    tyro.cli(main)
