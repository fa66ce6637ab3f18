"""`bench.attention_backends` and `bench.activation_cost` run on small sizes."""

import pytest

from bench import activation_cost, attention_backends
from transformer import Hardware
from transformer.layers.activations import ACTIVATIONS


def test_backends_agree(capsys: pytest.CaptureFixture[str]) -> None:
    cases = tuple(
        f"{mask} 2 x 128: cudnn reference {others}"
        for mask, others in (
            ("causal", "query_blocks blockwise64"),
            ("documents", "query_blocks blockwise64"),
            ("window", "blockwise64"),
            ("padding", "blockwise64"),
        )
    )
    options = attention_backends.Options(
        cases, num_heads=2, head_dim=8, precision="float32", rounds=1, seconds=0
    )
    attention_backends.main(options, Hardware("cpu"))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "128" in line]
    assert len(rows) == 10  # cuDNN is left out
    errors = [float(row[-1]) for row in rows]
    assert max(errors) < 1e-5
    assert sum(error > 0 for error in errors) >= 4  # compared with another backend


def test_every_activation_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    activation_cost.main(activation_cost.Options(rows=8, width=4, precision="float32", repeats=1))
    shown = capsys.readouterr().out
    assert all(name in shown for name in ACTIVATIONS)
    assert "gelu, on a GPU" in shown
