"""Compare the attention patterns of the heads of a trained language model.

    python -m bench.head_patterns runs/quickstart [--windows 32]

For each layer of a run, on its held-out text: how far back each head attends, and how different two
heads of a layer are, as the total variation distance of their weights (0: equal, 1: disjoint),
averaged over all pairs and queries. The same is printed for the weights at the start of the run.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import train
from train.assembly import make_task
from train.data.batches import TextEvaluationBatches
from train.run import Run

WEIGHTS = frozenset({"weights"})


def reaches(
    weights: jax.Array,  # [L, B, N, T, S]
) -> jax.Array:  # [L, N] tokens
    """Return the mean attention distance of each head."""
    length = weights.shape[-1]
    back = jnp.arange(length)[:, None] - jnp.arange(length)[None]
    return jnp.einsum("LBNTS,TS->LN", weights, back) / (weights.shape[1] * length)


def distances(
    weights: jax.Array,  # [L, B, N, T, S]
) -> jax.Array:  # [L]
    """Return the mean total variation distance of two heads of a layer, over all pairs."""
    heads = weights.shape[2]
    pairs = [(one, other) for one in range(heads) for other in range(one)]
    total_variation = [
        jnp.abs(weights[:, :, i] - weights[:, :, j]).sum(-1).mean((1, 2)) for i, j in pairs
    ]
    return sum(total_variation, start=jnp.zeros(len(weights))) / (2 * len(pairs))


def patterns(run: Run, params: Any, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return reaches [L, N] and distances [L] over held-out windows."""
    corpus: Any = make_task(run.experiment).prepare_corpus()
    batches = TextEvaluationBatches(
        corpus.split("validation"),
        batch_size=1,
        sequence_length=run.experiment.sequence_length,
        document_masking=False,
        max_batches=windows,
    )

    @jax.jit
    def one(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = run.model.apply({"params": params}, tokens, outputs=WEIGHTS)
        weights = jnp.concatenate([each["weights"] for each in output.aux])
        return reaches(weights), distances(weights)

    results = [one(params, batches.host_batch(n, 0, 1)["tokens"]) for n in range(len(batches))]
    reach, distance = (np.mean(jax.device_get(each), axis=0) for each in zip(*results, strict=True))
    return reach, distance


def main(workdir: tyro.conf.Positional[str], windows: int = 32) -> None:
    """Print a table.

    Args:
      workdir: Folder of a language model's run with only softmax attention layers.
      windows: Number of held-out windows.
    """
    run = train.load(workdir)
    first = run.model.init_params(jax.random.key(run.experiment.seed))
    table = Table("layer", "apart", "apart at first", "tokens back, each head")
    reach, apart = patterns(run, run.params, windows)
    _, before = patterns(run, first, windows)
    for layer, (each, distance) in enumerate(zip(reach, apart, strict=True)):
        looks = ", ".join(f"{tokens:.1f}" for tokens in sorted(each))
        table.add_row(str(layer), f"{distance:.2f}", f"{before[layer]:.2f}", looks)
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
