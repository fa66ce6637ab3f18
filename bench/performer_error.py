"""Error of Performer's attention against softmax by number of random features.

    python -m bench.performer_error [--figure docs/figures/performer_error.png]

Choromanski et al. 2021 (section 2.4 and figure 4): the error falls as 1 / sqrt(M), orthogonal
vectors make it smaller, and positive features have a smaller one than trigonometric features. The
figure
shows |y - softmax| / |softmax| over random queries, keys and values, the median over several draws
of
the vectors. The entries of queries and keys have two sizes. With small ones all weights are similar
and trigonometric features are more accurate. With entries twice as large, trigonometric features
are
far off; positive features never are, but they need more vectors than shown to become accurate.
"""

import itertools
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import tyro
from matplotlib import pyplot

from transformer import Mask
from transformer.attention.variants.feature_map_attention import attend_bidirectional
from transformer.attention.variants.performer import (
    FeatureMapKind,
    draw_random_vectors,
    make_feature_map,
)
from transformer.testing.mixer_under_test import reference_softmax_attention

LENGTH, WIDTH, SEEDS = 512, 16, 15
SIZES = (0.5, 1.0)
"""Standard deviations of the entries of queries and keys."""
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
KINDS: tuple[FeatureMapKind, ...] = get_args(FeatureMapKind)[
    :2
]  # ReLU features do not estimate softmax


def inputs(size: float) -> tuple[Any, Any, Any]:  # [1, T, 1, H] each
    """Return queries, keys and values."""
    random = np.random.default_rng(0)
    scales = (size, size, 1.0)
    q, k, v = (s * random.normal(size=(1, LENGTH, 1, WIDTH)).astype(np.float32) for s in scales)
    return q, k, v


def errors(
    kind: FeatureMapKind, orthogonal: bool, features: int, size: float
) -> np.ndarray:  # [seeds]
    """Return relative errors, one for each draw."""
    count = features // 2 if kind == "trigonometric" else features
    drawn = [
        draw_random_vectors(count, WIDTH, orthogonal=orthogonal, seed=(s,)) for s in range(SEEDS)
    ]
    q, k, v = inputs(size)

    @jax.jit
    def attend(directions: Any) -> jax.Array:
        return attend_bidirectional(q, k, v, make_feature_map(kind, directions), Mask())

    exact = reference_softmax_attention(q, k, v, np.ones((1, 1, LENGTH, LENGTH), bool))
    off = [np.asarray(attend(directions)) - exact for directions in drawn]
    return np.array([np.linalg.norm(each) for each in off]) / np.linalg.norm(exact)


def main(figure: Path = Path("docs/figures/performer_error.png")) -> None:
    """Print the errors and the exponent with which they fall, and draw them."""
    fig, axes = pyplot.subplots(
        1, len(SIZES), figsize=(9, 4), sharey=True, layout="constrained", squeeze=False
    )
    for ax, size in zip(axes[0], SIZES, strict=True):
        for kind, orthogonal in itertools.product(KINDS, (True, False)):
            name = f"{kind}, {'orthogonal' if orthogonal else 'independent'}"
            errors_of_counts = [
                float(np.median(errors(kind, orthogonal, each, size))) for each in COUNTS
            ]
            slope = np.polyfit(np.log(COUNTS[-4:]), np.log(errors_of_counts[-4:]), 1)[0]
            shown = " ".join(f"{each:.2g}" for each in errors_of_counts)
            print(f"entries of {size}: {name}: {shown} (the last four as M^{slope:.2f})")
            ax.loglog(COUNTS, errors_of_counts, ".-" if orthogonal else ".--", label=name)
        slanted = 3 * np.array(COUNTS) ** -0.5
        ax.loglog(COUNTS, slanted, color="0.7", linewidth=1, label="1 / sqrt(M)")
        ax.set(title=f"entries of q and k: N(0, {size}²)", xlabel="features M")
    axes[0, 0].set(ylabel="|y - softmax| / |softmax|")
    axes[0, 0].legend(fontsize=8)
    figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, dpi=120)
    pyplot.close(fig)


if __name__ == "__main__":
    tyro.cli(main)
