"""Gradient norm with respect to a token against its distance, at initialization.

    python -m bench.gradient_distance [--figure docs/figures/gradient_distance.png]

The gradient of the last token's output in the input of each earlier token. In a recurrence it is
a product of as many matrices as there are steps between them, so it vanishes or explodes (Bengio et
al. 1994); the forget gate of an LSTM slows that down; attention reaches every token in one step.
Without residual connections a stack of attention loses the token itself: what remains comes mostly
from the first tokens, which are in every average under a causal mask. Inputs are random, weights
are initialized by their fan-in; the recurrences have one layer, the transformers four.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from transformer import (
    AttentionConfig,
    BlockConfig,
    ElmanConfig,
    Hardware,
    Initialization,
    LSTMConfig,
    Mask,
    MaskPattern,
    Precision,
)
from transformer.attention.mixer import MixerInputs
from transformer.model_context import ModelContext
from transformer.models.stack import Stack

WIDTH, ROWS, LENGTH, LAYERS = 64, 8, 256, 4
DISTANCES = (0, 1, 4, 16, 64, 255)

_BARE = BlockConfig(mixer=ElmanConfig(), feed_forward=None, norm=None, residual=False)
_TRANSFORMER = BlockConfig(mixer=AttentionConfig(num_heads=4))


@dataclasses.dataclass(frozen=True)
class Row:
    """A stack, and the factor of its recurrent matrices."""

    block: BlockConfig
    layers: int
    scale: float = 1.0


STACKS = {
    "Elman": Row(_BARE, 1),
    "Elman, recurrent matrix × 2": Row(_BARE, 1, 2.0),
    "LSTM": Row(dataclasses.replace(_BARE, mixer=LSTMConfig()), 1),
    "transformer": Row(_TRANSFORMER, LAYERS),
    "transformer without residuals": Row(dataclasses.replace(_TRANSFORMER, residual=False), LAYERS),
}


def gradient_norms(
    row: Row, *, length: int = LENGTH, rows: int = ROWS, seed: int = 0
) -> np.ndarray:  # [T] by distance from the last token
    """Return the root mean square, over rows, of the norm of each token's gradient."""
    start = Initialization(std=0.0, depth_scaled=False)
    shared = ModelContext(WIDTH, row.layers, Precision(), start, Hardware())
    stack = Stack((row.block,), shared, "scan")
    for_weights, for_inputs, for_result = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(for_inputs, (rows, length, WIDTH))
    direction = jax.random.normal(for_result, (WIDTH,)) / WIDTH**0.5
    positions = jnp.arange(length)[None, :]
    given = MixerInputs(positions, Mask(MaskPattern(causal=True), positions=positions))
    params = jax.jit(lambda key: stack.init(key, x, given))(for_weights)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * (row.scale if _is_recurrent(path) else 1.0), params
    )

    def last(x: jax.Array) -> jax.Array:
        output: Any = stack.apply(params, x, given)
        return jnp.sum(output.x[:, -1] @ direction)

    gradient = np.asarray(jax.jit(jax.grad(last))(x), np.float64)
    return np.sqrt(np.square(gradient).sum(-1).mean(0))[::-1]


def _is_recurrent(path: Any) -> bool:
    return getattr(path[-1], "key", None) == "recurrent"


def main(figure: Path = Path("docs/figures/gradient_distance.png")) -> None:
    """Print the gradients at some distances, and draw all."""
    fig, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    table = Table("distance", *map(str, DISTANCES), title=f"Gradient norms, width {WIDTH}")
    for name, row in STACKS.items():
        norms = gradient_norms(row)
        table.add_row(name, *(f"{norms[distance]:.2g}" for distance in DISTANCES))
        shown = np.where(norms > 1e-12, norms, np.nan)
        axes.semilogy(shown, label=name)
    axes.set(
        xlabel="distance from the last token", ylabel="norm of the gradient", ylim=(1e-12, 1e3)
    )
    axes.legend()
    Console().print(table)
    figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, dpi=120)


if __name__ == "__main__":
    tyro.cli(main)
