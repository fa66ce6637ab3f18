"""Picture of sinusoidal position embeddings.

    python -m bench.sinusoids [--figure docs/figures/sinusoids.png]

Vaswani et al. 2017 (section 3.5), as `sinusoid` computes them: even dimensions are sines, odd ones
cosines of the same wavelength. Each row is what is added to the embedding of one token.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib import pyplot

from transformer.layers.position_embedding import sinusoidal_embedding

LENGTH, WIDTH = 128, 64


def vectors() -> np.ndarray:  # [T, D]
    """Return the embeddings of the first positions."""
    return np.asarray(sinusoidal_embedding(jnp.arange(LENGTH)[None], WIDTH))[0]


def main(figure: Path = Path("docs/figures/sinusoids.png")) -> None:
    """Draw positions as rows and dimensions as columns."""
    fig, axes = pyplot.subplots(figsize=(6, 7), layout="constrained")
    drawn = axes.imshow(
        vectors(), cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="nearest"
    )
    axes.set(xlabel="dimension (even: sine, odd: cosine)", ylabel="position (tokens)")
    axes.set(xticks=range(0, WIDTH, 8), yticks=range(0, LENGTH, 16))
    fig.colorbar(drawn, label="value")
    figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, dpi=100)
    pyplot.close(fig)


if __name__ == "__main__":
    tyro.cli(main)
