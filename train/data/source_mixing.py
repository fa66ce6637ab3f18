"""Mixing of several sources by weight: which source each training example comes from.

The schedule is a pure function of the seed and the example's index, as the order within a source
is. A mixture therefore resumes from the cursor of the state alone.
"""

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from train.data.batches import (
    TextTrainingBatches,
    TrainingBatches,
    example_ids,
    host_rows,
    seeded_permutation,
)
from train.data.token_file import HostBatch
from train.errors import UserError

BLOCK_EXAMPLES = 1024
"""Examples of a block of the schedule. Within a block the sources are in random order."""


class MixtureSchedule:
    """Source of every training example, and the example's index within its source.

    Of the first n·BLOCK_EXAMPLES examples, source k has floor(n·BLOCK_EXAMPLES·c_k + 1/2) -
    floor(n·BLOCK_EXAMPLES·c_(k-1) + 1/2), where c_k is the sum of the first k weights over the sum
    of all. So at the end of every block each source is within one example of its weight's share,
    however long the run. All windows have the same length: a share of examples is a share of
    tokens.
    """

    def __init__(self, weights: Sequence[float], *seeds: int):
        # The decimal text of a weight: 0.1 is meant as one tenth, which no float is.
        exact = [Fraction(str(weight)) for weight in weights]
        total = sum(exact)
        self._bounds = [sum(exact[:k], Fraction(0)) / total for k in range(len(exact) + 1)]
        self._seeds = seeds
        self._block = functools.lru_cache(maxsize=8)(self._make_block)

    def examples_before_block(self, block: int) -> np.ndarray:  # [sources] int64
        """Return the number of examples of each source before the start of a block."""
        half = Fraction(1, 2)
        rounded = [int(bound * block * BLOCK_EXAMPLES + half) for bound in self._bounds]
        return np.diff(np.array(rounded, np.int64))

    def examples_before(self, example: int) -> np.ndarray:  # [sources] int64
        """Return the number of examples of each source before an example."""
        block, within = divmod(example, BLOCK_EXAMPLES)
        sources, _ = self._block(block)
        counts_in_block = np.bincount(sources[:within], minlength=len(self._bounds) - 1)
        return self.examples_before_block(block) + counts_in_block

    def draw(
        self,
        examples: np.ndarray,  # [n] int64
    ) -> tuple[np.ndarray, np.ndarray]:  # [n] int64, [n] int64
        """Return the source of each example, and the example's index within that source."""
        pairs = [
            (sources[example % BLOCK_EXAMPLES], indices[example % BLOCK_EXAMPLES])
            for example in examples.tolist()
            for sources, indices in [self._block(example // BLOCK_EXAMPLES)]
        ]
        drawn = np.array(pairs, np.int64).reshape(-1, 2)
        return drawn[:, 0], drawn[:, 1]

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source, and the index within it, of each example of a block."""
        before = self.examples_before_block(block)
        counts = self.examples_before_block(block + 1) - before
        ordered = np.repeat(np.arange(len(counts)), counts)  # [BLOCK_EXAMPLES]
        order = seeded_permutation(BLOCK_EXAMPLES, *self._seeds, block)
        sources = ordered[order]
        # Number each source's examples in the order in which they are drawn.
        indices = np.empty_like(sources)
        for source in range(len(counts)):
            indices[sources == source] = before[source] + np.arange(counts[source])
        return sources, indices


def mix_rows(
    sources: np.ndarray,  # [B] int64
    read: Callable[[int, np.ndarray], HostBatch],
) -> HostBatch:
    """Return a batch whose row b is of source ``sources[b]``.

    `read` gets a source and the rows [B] bool that are its own, and returns them in order.
    """
    batch: HostBatch = {}
    for source in np.unique(sources).tolist():
        rows = sources == source
        for name, array in read(source, rows).items():
            shape = (len(sources), *array.shape[1:])
            batch.setdefault(name, np.zeros(shape, array.dtype))[rows] = array
    return batch


class MixedTrainingBatches(TrainingBatches):
    """Endless training batches of several tokenized sources: see `TextTrainingBatches`.

    Example e is example i of source k, as the schedule says: a pure function of the seed and e.
    """

    one_shape = True

    def __init__(
        self,
        sources: dict[str, TextTrainingBatches],
        schedule: MixtureSchedule,
        *,
        batch_size: int,
        max_examples: int,
        max_epochs: Sequence[int],
    ):
        """Set up the batches, of the windows of each source in the order of the schedule.

        Raises UserError if the `max_examples` of the run are more than `max_epochs` of a source
        (0: any number) have.
        """
        self.batch_size = batch_size
        self._sources, self._schedule = sources, schedule
        needed = schedule.examples_before(max_examples)
        for index, (name, windows) in enumerate(sources.items()):
            limit = max_epochs[index] * windows.windows_per_epoch
            if limit and needed[index] > limit:
                raise UserError(
                    f"data.sources.{index} {name}: is too small, the run reads {needed[index]} of "
                    f"its windows and {max_epochs[index]} epochs have {limit}; lower its weight or "
                    "steps, or raise its max_epochs"
                )

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        start, stop = host_rows(self.batch_size, host, num_hosts)
        first = cursor * self.batch_size
        examples = np.arange(first + start, first + stop)
        sources, indices = self._schedule.draw(examples)
        windows = list(self._sources.values())
        batch = mix_rows(sources, lambda source, rows: windows[source].examples(indices[rows]))
        # Of the whole mixture: dropout and masks differ where two sources have the same index.
        batch["examples"] = example_ids(examples)
        return batch

    def source_shares(self, cursor: int) -> dict[str, float]:
        counts = self._schedule.examples_before(cursor * self.batch_size)
        return dict(zip(self._sources, (counts / max(1, counts.sum())).tolist(), strict=True))
