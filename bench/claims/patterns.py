"""Sparse and linear attention: which query sees which key, and the error of random features."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, get_args

import jax
import numpy as np
from matplotlib import colors
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from bench.results import FIGURES, save_figure
from train.figures import COLORS, GREY
from transformer import (
    AttentionConfig,
    BigBirdConfig,
    Hardware,
    LongformerConfig,
    Mask,
    MaskPattern,
    MixerConfig,
    ReformerConfig,
    RoutingAttentionConfig,
    SlidingWindowConfig,
    SparseTransformerConfig,
    TopKConfig,
)
from transformer.attention.masks import dense_mask
from transformer.attention.variants.feature_map_attention import attend_bidirectional
from transformer.attention.variants.performer import (
    FeatureMapKind,
    draw_random_vectors,
    make_feature_map,
)
from transformer.testing.mixer_under_test import (
    Trial,
    make_trial,
    projections,
    reference_softmax_attention,
)

LENGTH, WIDTH = 64, 32

# ---- Panels: every mixer with a pattern, at sizes small enough to see it ----

HIDDEN, UNSEEN, ALL, NEAR, FAR, RANDOM, CHOSEN = range(7)
"""Reasons why a query sees a key or not."""

LOOKS = {
    HIDDEN: ("hidden by the mask", "#ffffff"),
    UNSEEN: ("left out", "#e6e9ee"),
    ALL: ("all of them", "#4a5568"),
    NEAR: ("near: a window, a block", "#2f6db3"),
    FAR: ("global, or the pattern's far part", "#e08a1e"),
    RANDOM: ("drawn at random", "#2f9468"),
    CHOSEN: ("chosen by the tokens", "#9c3d8f"),
}


@dataclasses.dataclass(frozen=True)
class Panel:
    """A mixer and the parts of its pattern."""

    kind: str
    name: str
    """Paper's name of the pattern."""
    parts: Mapping[int, MixerConfig]
    """For each part, in order, a mixer with this part and the earlier ones only."""
    packed: bool = False
    """True if the row holds two documents."""
    can_be_causal: bool = True


def panels() -> list[Panel]:
    """Return every panel, with sizes at which its pattern is visible."""
    window = LongformerConfig(one_sided_window=4, num_global_tokens=0, num_heads=1, head_dim=16)
    dilated = dataclasses.replace(window, dilations=(3,))
    with_global = {NEAR: window, FAR: dataclasses.replace(window, num_global_tokens=2)}
    bigbird = BigBirdConfig(
        block_size=4, num_random_blocks=2, random_block_span=LENGTH, num_heads=1, head_dim=16
    )
    first = dataclasses.replace(bigbird, num_random_blocks=0)
    blocks = dataclasses.replace(first, num_global_blocks=0, last_block_is_global=False)
    strided = SparseTransformerConfig(stride=8, num_heads=1, head_dim=16)
    fixed = dataclasses.replace(strided, pattern="fixed", num_summary_tokens=2)
    routing = RoutingAttentionConfig(num_clusters=6, window=8, num_heads=1, head_dim=16)
    balanced = dataclasses.replace(routing, window=11, balanced=True)
    hashed = ReformerConfig(num_buckets=8, num_hashes=2, window=6, num_heads=1, head_dim=16)
    sliding = SlidingWindowConfig(window=6, num_heads=1, head_dim=16)
    spaced = SlidingWindowConfig(window=5, dilation=4, num_heads=1, head_dim=16)

    def near_part(config: SparseTransformerConfig) -> SparseTransformerConfig:
        return dataclasses.replace(config, factorization="local")

    return [
        Panel("full", "full attention", {ALL: AttentionConfig(num_heads=1, head_dim=16)}),
        Panel("sliding_window", "sliding window", {NEAR: sliding}),
        Panel("sliding_window", "dilated sliding window", {NEAR: spaced}),
        Panel("longformer", "sliding window", {NEAR: window}),
        Panel("longformer", "dilated sliding window", {NEAR: dilated}),
        Panel("longformer", "global + sliding window", with_global),
        Panel("longformer", "the same, two documents", with_global, packed=True),
        Panel("bigbird", "random + window + global", {NEAR: blocks, FAR: first, RANDOM: bigbird}),
        Panel("sparse", "strided", {NEAR: near_part(strided), FAR: strided}),
        Panel("sparse", "fixed", {NEAR: near_part(fixed), FAR: fixed}),
        Panel("top_k", "top-k", {CHOSEN: TopKConfig(keys_per_query=8, num_heads=1, head_dim=16)}),
        Panel("reformer", "LSH, 2 rounds", {CHOSEN: hashed}),
        Panel("routing", "clusters, last members", {CHOSEN: routing}),
        Panel("routing", "k-means clusters, balanced", {CHOSEN: balanced}, can_be_causal=False),
    ]


# ---- Patterns ----


def text() -> np.ndarray:  # [1, T, D]
    """Return noisy repetitions of a few random vectors."""
    random = np.random.default_rng(3)
    words = random.normal(size=(9, WIDTH))[random.integers(9, size=LENGTH)]
    return (words + 0.5 * random.normal(size=words.shape)).astype(np.float32)[None]


def mask_of(*, causal: bool, packed: bool) -> Mask:
    """Return the mask of a row with one document or two."""
    sizes = (40, 24) if packed else (LENGTH,)
    return Mask(
        MaskPattern(causal=causal),
        positions=np.concatenate([np.arange(size) for size in sizes])[None],
        segments=np.repeat(np.arange(len(sizes)) + 1, sizes)[None] if packed else None,
    )


@functools.cache
def trial_of(config: MixerConfig) -> Trial:
    """Return the mixer with random weights."""
    return make_trial(config, WIDTH, LENGTH, (LENGTH,), Hardware())


@functools.cache
def seen(config: MixerConfig, *, causal: bool, packed: bool = False) -> np.ndarray:
    """Return booleans [T, S]: the keys that each query of the first head sees.

    Mixers with a sparse pattern report it (`select`). For the others (Longformer, whose global
    tokens have their own weights, and full attention) a key is visible to the tokens whose outputs
    change when it changes; a token's own output always does.
    """
    trial, mask = trial_of(config), mask_of(causal=causal, packed=packed)
    mixer: Any = trial.mixer
    x = text()
    if hasattr(mixer, "select"):
        inputs = trial.mixer_inputs(LENGTH, positions=np.asarray(mask.positions), mask=mask)
        selected = mixer.select(projections(mixer, trial.params, x, inputs), inputs)
        return np.asarray(selected)[0, 0] & np.asarray(dense_mask(mask, LENGTH, LENGTH))[0]
    many = np.repeat(x, LENGTH, axis=0)  # one example per changed token
    many[np.arange(LENGTH), np.arange(LENGTH)] += 1
    changed = trial(many, positions=np.asarray(mask.positions), mask=mask).y
    original = trial(x, positions=np.asarray(mask.positions), mask=mask).y
    differs = np.abs(changed - original).max(-1)  # [S, T]
    return (differs > 1e-6).T


def reasons(panel: Panel, *, causal: bool) -> np.ndarray:  # [T, S] ints
    """Return the first part of the pattern that shows a key to a query."""
    mask = mask_of(causal=causal, packed=panel.packed)
    first_part = np.where(np.asarray(dense_mask(mask, LENGTH, LENGTH))[0], UNSEEN, HIDDEN)
    for part, config in panel.parts.items():
        visible = seen(config, causal=causal, packed=panel.packed)
        first_part[(first_part == UNSEEN) & visible] = part
    return first_part


def patterns() -> None:
    """Draw which query sees which key, and print the fraction of token pairs that is kept.

    Only the first head is drawn. Performer and linear attention see all keys, and Linformer
    projections of all: they have no pattern.
    """
    columns, shown = 5, panels()
    bands = -(-len(shown) // columns)
    space = ConstrainedLayoutEngine(h_pad=0.08)
    drawn = Figure(figsize=(9.5, 4.1 * bands + 0.8), layout=space)
    colours = colors.ListedColormap([colour for _, colour in LOOKS.values()])
    parts: Any = drawn.subfigures(bands, 1)
    for number, part in enumerate(parts):
        grid = part.subplots(2, columns)
        of_band = shown[number * columns : (number + 1) * columns]
        for axes in grid.flat:
            axes.axis("off")
        for pair, panel in zip(grid.T, of_band, strict=False):
            pair[0].set_title(f"{panel.kind}\n", fontweight="bold")
            name = dict(ha="center", fontsize=9, transform=pair[0].transAxes)
            pair[0].text(0.5, 1.03, panel.name, **name)
            for axes, causal in zip(pair, (False, True), strict=True):
                if causal and not panel.can_be_causal:
                    continue
                found = reasons(panel, causal=causal)
                axes.axis("on")
                axes.imshow(found, cmap=colours, vmin=0, vmax=len(LOOKS) - 1, interpolation="none")
                axes.set(xticks=[], yticks=[])
                axes.grid(visible=False)
                axes.spines[:].set(visible=True, color="#aab1bc", linewidth=0.8)
                share = (found > UNSEEN).mean()
                print(f"{panel.kind}, {panel.name}{', causal' * causal}: {share:.1%} of all pairs")
        for axes, label in zip(grid[:, 0], ("queries", "queries, causal"), strict=True):
            axes.set_ylabel(label)
        grid[1, 0].set_xlabel("keys")
    handles = [
        Patch(facecolor=colour, edgecolor="#aab1bc", label=label)
        for label, colour in LOOKS.values()
    ]
    drawn.legend(handles=handles, loc="outside lower center", ncols=4)
    save_figure(drawn, FIGURES / "attention_patterns.png")


# ---- Performer ----

# ReLU features do not estimate softmax.
FEATURE_MAPS: tuple[FeatureMapKind, ...] = get_args(FeatureMapKind)[:2]


def random_feature_errors(
    kind: FeatureMapKind, orthogonal: bool, features: int, size: float
) -> np.ndarray:  # [draws]
    """Return |y - softmax| / |softmax| for several draws of the random vectors.

    Args:
      kind: Positive or trigonometric features.
      orthogonal: Whether the vectors are orthogonal.
      features: Number of features, M.
      size: Standard deviation of the entries of queries and keys.
    """
    length, width, draws = 512, 16, 15
    random = np.random.default_rng(0)
    shape, scales = (1, length, 1, width), (size, size, 1.0)
    inputs: Any = [scale * random.normal(size=shape).astype(np.float32) for scale in scales]
    q, k, v = inputs
    count = features // 2 if kind == "trigonometric" else features

    @jax.jit
    def attend(directions: Any) -> jax.Array:
        return attend_bidirectional(q, k, v, make_feature_map(kind, directions), Mask())

    exact = reference_softmax_attention(q, k, v, np.ones((1, 1, length, length), bool))
    drawn = [
        draw_random_vectors(count, width, orthogonal=orthogonal, seed=(s,)) for s in range(draws)
    ]
    off = [np.linalg.norm(np.asarray(attend(directions)) - exact) for directions in drawn]
    return np.array(off) / np.linalg.norm(exact)


def performer_error() -> None:
    """Print the error of Performer against softmax by number of features, and draw it.

    It falls as 1 / sqrt(M), orthogonal vectors make it smaller, and positive features have a
    smaller one than trigonometric features (Choromanski et al. 2021, section 2.4 and figure 4).
    With small queries and keys all weights are similar and trigonometric features are more
    accurate; with larger ones they are far off. The median of 15 draws.
    """
    counts, sizes = (8, 16, 32, 64, 128, 256, 512, 1024), (0.5, 1.0)
    drawn = Figure(figsize=(9, 4.8))
    panels = drawn.subplots(1, len(sizes), sharey=True)
    for axes, size in zip(panels, sizes, strict=True):
        for kind, orthogonal in itertools.product(FEATURE_MAPS, (True, False)):
            name = f"{kind}, {'orthogonal' if orthogonal else 'independent'}"
            found = [
                float(np.median(random_feature_errors(kind, orthogonal, each, size)))
                for each in counts
            ]
            slope = np.polyfit(np.log(counts[-4:]), np.log(found[-4:]), 1)[0]
            shown = " ".join(f"{each:.2g}" for each in found)
            print(f"entries of {size}: {name}: {shown} (the last four as M^{slope:.2f})")
            color = COLORS[FEATURE_MAPS.index(kind)]
            axes.loglog(counts, found, "o-" if orthogonal else "o--", color=color, label=name)
        axes.loglog(counts, 3 * np.array(counts) ** -0.5, ":", color=GREY, label="1 / sqrt(M)")
        axes.set(title=f"entries of q and k: N(0, {size}²)", xlabel="random features M")
    panels[0].set_ylabel("relative error, |y - softmax| / |softmax|")
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save_figure(drawn, FIGURES / "performer_error.png")
