from typing import Any

import pytest

from tests.transformer.refused import assert_refused
from transformer.attention.position_config import RelativePositions, RoPE, T5RelativeBias


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (RelativePositions, dict(max_distance=-1)),
        (RoPE, dict(fraction=0.0)),
        (RoPE, dict(fraction=1.5)),
        (RoPE, dict(theta=1.0)),
        (RoPE, dict(layout="pairs")),
        (T5RelativeBias, dict(num_buckets=1)),
        (T5RelativeBias, dict(num_buckets=7)),
        (T5RelativeBias, dict(num_buckets=6, bidirectional=True)),
        (T5RelativeBias, dict(max_distance=16)),
    ],
)
def test_settings_are_checked(config: Any, fields: dict[str, Any]) -> None:
    assert_refused(config, fields)
