"""Time to open the attention viewer's page in headless Chromium.

    python -m bench.attention_viewer [--tokens 512 --layers 12 --heads 12 --rounds 5]

The page shows random causal weights whose entropies differ between heads, like those of trained
models, so they compress no better than real ones. `ready` is the time from the start of the
navigation until all thumbnails and the first head are drawn, by the browser's own clock.
"""

import statistics
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from tests.chromium import Chromium, find_chromium
from train.visualization.attention_view import AttentionView
from transformer.attention_maps import AttentionMap

READY = "document.documentElement.dataset.ready"


def random_view(tokens: int, layers: int, heads: int) -> AttentionView:
    """Return a view of random causal attention."""
    rng = np.random.default_rng(0)
    visible = np.tri(tokens, dtype=bool)[None, None]
    maps = []
    for layer in range(layers):
        sharpness = rng.uniform(0.5, 6, size=(1, heads, 1, 1)).astype(np.float32)
        scores = sharpness * rng.normal(size=(1, heads, tokens, tokens)).astype(np.float32)
        weights = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
        shown = jnp.asarray(weights), jnp.asarray(visible)
        maps.append(AttentionMap("decoder", layer, "full", *shown))
    labels = [f"·word{index}" for index in range(tokens)]
    return AttentionView("bench", "random weights", tuple(maps), labels, [], causal=True)


def main(tokens: int = 512, layers: int = 12, heads: int = 12, rounds: int = 5) -> None:
    """Print the page's size, the time to write it and the time to open it."""
    executable = find_chromium()
    if executable is None:
        raise SystemExit("no chromium: install it (apt-get install chromium)")
    view = random_view(tokens, layers, heads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        started = time.perf_counter()
        view.save(str(path))
        seconds = time.perf_counter() - started
        ready = []
        for _ in range(rounds):  # a new browser each time, so that nothing is cached
            with Chromium(executable) as browser:
                browser.open(path, READY)
                ready.append(float(browser.evaluate(READY)) / 1000)
                if browser.messages:
                    raise SystemExit(f"messages of the page: {browser.messages}")
        table = Table("tokens", "layers × heads", "page", "write", "open, median", "slowest")
        table.add_row(
            str(tokens),
            f"{layers} × {heads}",
            f"{path.stat().st_size / 2**20:.1f} MiB",
            f"{seconds:.1f} s",
            f"{statistics.median(ready):.2f} s",
            f"{max(ready):.2f} s",
        )
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
