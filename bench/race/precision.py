"""Costs of precision policies: memory, step time, held-out loss, underflow."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.claims.small_runs import LENGTH, Trained, losses_by_position, small, trained, with_model
from bench.race.harness import print_machine, take_turns
from train.assembly import make_engine, make_task, training_options, with_task
from train.data.corpus import TextCorpus
from train.data.token_file import HostBatch
from train.experiment import Experiment
from train.runtime.local_hardware import local_hardware
from train.state import LossScaleConfig
from transformer.precision import POLICIES, Precision

MIB = 2**20
UNSCALED = LossScaleConfig(init_scale=1.0, max_scale=1.0)
SCALES = (1.0, 2.0**5, 2.0**10, 2.0**15, 2.0**20, 2.0**24)


def in_precision(experiment: Experiment, name: str) -> Experiment:
    """Return the experiment under a named precision policy."""
    return with_model(experiment, precision=Precision.parse(name))


def resolved(experiment: Experiment, corpus: TextCorpus) -> Experiment:
    """Return the experiment with the vocabulary of the corpus."""
    return with_task(experiment, make_task(experiment).resolve(corpus))


def first_rows(experiment: Experiment, corpus: TextCorpus) -> HostBatch:
    """Return the rows of the first batch."""
    batches = make_task(experiment).training_batches(corpus, training_options(experiment))
    return batches.host_batch(0, 0, 1)


def tree_bytes(tree: Any) -> int:
    """Return the bytes of a tree's arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def cost_table(base: Experiment, corpus: TextCorpus, *, rounds: int, turn: int) -> Table:
    """Return the table of memory and time; policies take turns of `turn` steps."""
    sizes: dict[str, list[str]] = {}
    sides: dict[str, Callable[[], float]] = {}

    def side(step: Any, state: Any, rows: Any) -> Callable[[], float]:
        def seconds() -> float:
            nonlocal state
            start = time.perf_counter()
            for _ in range(turn):
                state, _ = step(state, rows, None)
            jax.block_until_ready(state.params)
            return (time.perf_counter() - start) / turn

        return seconds

    for name in POLICIES:
        experiment = resolved(in_precision(base, name), corpus)
        engine = make_engine(experiment, local_hardware())
        state = engine.init()
        rows = engine.put_batch(first_rows(experiment, corpus))
        step = engine.lower_step(state, rows).compile()
        memory: Any = step.memory_analysis()
        in_bytes = tree_bytes(state.params), tree_bytes(state.optimizer), memory.temp_size_in_bytes
        sizes[name] = [f"{size / MIB:.1f} MiB" for size in in_bytes]
        sides[name] = side(step, state, rows)
    # The first round warms up.
    times = {name: each[1:] for name, each in take_turns(sides, rounds + 1).items()}
    # Temporaries are what the compiled step takes beside its arguments and results.
    heads = ("precision", "weights", "optimizer", "temporaries", "step", "times")
    table = Table(*heads, title="a training step")
    for name, each in times.items():
        middle, low, high = (1000 * seconds for seconds in (median(each), min(each), max(each)))
        ratio = f"{median(each) / median(times['float32']):.2f}"
        table.add_row(name, *sizes[name], f"{middle:.0f} ms ({low:.0f} to {high:.0f})", ratio)
    return table


def underflow_table(experiment: Experiment, params: Any, corpus: TextCorpus) -> Table:
    """Return the table of what float16 does to the gradients of one batch, for each loss scale.

    That is the fraction of the gradients' elements that are zero in float16 and not in float32, and
    whether any element overflows.
    """
    table = Table("loss scale", "rounded to zero", "overflow", title="gradients in float16")
    [in_float32] = _gradients(in_precision(experiment, "float32"), params, corpus, [1.0])
    present = sum(int((leaf != 0).sum()) for leaf in in_float32)
    in_float16 = _gradients(in_precision(experiment, "float16"), params, corpus, SCALES)
    for scale, leaves in zip(SCALES, in_float16, strict=True):
        pairs = zip(leaves, in_float32, strict=True)
        lost = sum(int(((low == 0) & (high != 0)).sum()) for low, high in pairs)
        overflows = any(not np.isfinite(leaf).all() for leaf in leaves)
        table.add_row(f"{scale:,.0f}", f"{100 * lost / present:.3f}%", "yes" if overflows else "no")
    return table


def _gradients(
    experiment: Experiment, params: Any, corpus: TextCorpus, scales: Sequence[float]
) -> Iterator[list[np.ndarray]]:
    """Yield the leaves of the first batch's gradients, times each loss scale."""
    own = resolved(experiment, corpus)
    engine = make_engine(own, local_hardware())
    state = engine.init().replace(params=params)
    rows = engine.put_batch(first_rows(own, corpus))
    gradients = jax.jit(engine.train_step.compute_gradients)
    for scale in scales:
        grads, _ = gradients(state, rows, np.float32(scale))
        yield [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]


def loss_table(base: Experiment, reference: Trained) -> Table:
    """Train under every policy but float32, which `reference` was; return held-out losses."""
    table = Table("precision", "held-out loss", title=f"after {base.steps} steps")
    runs = {name: in_precision(base, name) for name in POLICIES if name != "float32"}
    unscaled = dataclasses.replace(in_precision(base, "float16"), loss_scale=UNSCALED)
    runs["float16, no loss scale"] = unscaled
    for name, experiment in ("float32", None), *runs.items():
        run = trained(experiment) if experiment else reference
        # Evaluated in float32 for every run, so that the losses compare only the training.
        loss = losses_by_position(run, LENGTH, config=reference.model.config).mean()
        table.add_row(name, f"{loss:.3f}")
    return table


def precision(
    steps: int = 300,
    rounds: int = 7,
    turn: int = 5,
) -> None:
    """Compare precision policies with the quickstart's model, on the local device.

    1. Memory and time of a training step under each policy. Memory is from the compiler; the
       policies take turns on the device, and the time is the median over the rounds.
    2. Gradients of the trained float32 model computed in float16: the fraction of their elements
       that float16 rounds to zero, and whether any overflows, at several loss scales.
    3. The held-out loss after the same steps from the same seed, and float16 without a loss scale.

    Args:
      steps: Steps of each training.
      rounds: Turns per policy when steps are timed.
      turn: Steps in a turn.
    """
    print_machine()
    base = small(steps)
    corpus: Any = make_task(base).prepare_corpus()
    reference = trained(in_precision(base, "float32"))
    for table in (
        cost_table(base, corpus, rounds=rounds, turn=turn),
        underflow_table(base, reference.params, corpus),
        loss_table(base, reference),
    ):
        Console().print(table)
