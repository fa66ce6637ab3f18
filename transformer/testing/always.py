"""What every mixer has to do, whatever it declares."""

import dataclasses

import jax
import numpy as np

from transformer.testing.trial import BATCH_SIZE, Trial


def check_constants(trial: Trial) -> None:
    """Constants of all layers have one shape, so that they stack."""
    mixer = trial.mixer
    made = [mixer.constants(mixer.config, layer, mixer.context.d_model) for layer in (0, 1)]
    trees = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), each) for each in made]
    trial.require(trees[0] == trees[1], "constants", "differ in shape between layers")


def check_dropout(trial: Trial) -> None:
    """What is dropped follows from each example's own key, wherever it stands in a batch."""
    config, shared = trial.mixer.config, trial.mixer.context
    drops = hasattr(config, "dropout")
    if drops:
        mixer = type(trial.mixer)(dataclasses.replace(config, dropout=0.5), shared, parent=None)
        trial = dataclasses.replace(trial, mixer=mixer)
    x = trial.inputs(10, 17 if trial.abilities.any_length else 0)
    rngs, others = jax.random.split(jax.random.key(2), (2, BATCH_SIZE))
    y = trial(x, dropout_rngs=rngs).y
    trial.require(
        np.array_equal(trial(x, dropout_rngs=rngs).y, y), "dropout", "the same keys differ"
    )
    changed = not np.array_equal(trial(x, dropout_rngs=others).y, y)
    trial.require(changed == drops, "dropout", "other keys make no difference, or ought not to")
    rows = np.array([1, 2, 2])
    moved = trial(x[rows], dropout_rngs=rngs[rows]).y
    trial.require_close(moved, y[rows], "dropout", "the rest of the batch changes the result")
