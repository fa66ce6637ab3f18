"""The code of docs/inspection.md runs unchanged, and its table lists all names."""

import re
from pathlib import Path
from typing import Any

import chex
import jax

from tests.transformer.mixers import BUILTIN_MIXERS
from transformer.attention.mixer import MIXERS
from transformer.taps import ATTENTION_VALUES, BLOCK_VALUES, HEAD_OUTPUTS
from transformer.testing.mixer_under_test import default_config

PAGE = (Path(__file__).parents[2] / "docs" / "inspection.md").read_text()


def test_code_runs() -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    with jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(block, names)
    assert names["hidden_states"].shape == (4, 2, 6, 64)
    assert names["weights"].shape == (4, 2, 8, 6, 6)
    chex.assert_trees_all_close(names["lens"][-1], names["output"].logits, atol=1e-5)
    for edited in ("without_heads", "steered", "patched", "damped"):
        assert not jax.numpy.array_equal(names[edited].logits, names["output"].logits)


def test_table_lists_every_value() -> None:
    table = PAGE.partition("Which mixers")[0]
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `[^|]*\|", table, re.MULTILINE))))
    assert listed == BLOCK_VALUES.keys() | ATTENTION_VALUES.keys()


def test_table_lists_what_mixers_have() -> None:
    rows = re.findall(r"^\| (`.*)\| (.*) \|$", PAGE.partition("Which mixers")[2], re.MULTILINE)
    listed = [set(re.findall(r"`(\w+)`", mixers)) for mixers, _ in rows]
    all_values, heads_alone, weights_alone = listed
    values = {kind: MIXERS[kind].values for kind in BUILTIN_MIXERS}
    assert all_values == {kind for kind in values if values[kind] == ATTENTION_VALUES}
    assert heads_alone - all_values == {k for k in values if values[k] == HEAD_OUTPUTS}
    with_weights = {
        kind for kind in BUILTIN_MIXERS if MIXERS[kind].abilities(default_config(kind)).weights
    }
    assert weights_alone == with_weights - all_values
