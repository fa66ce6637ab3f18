from typing import Any

import pytest

from tests.transformer.refused import assert_refused
from transformer.attention.variants.linear_configs import (
    LinformerConfig,
    PerformerConfig,
    PrimerConfig,
)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (LinformerConfig, dict(num_heads=0)),
        (LinformerConfig, dict(max_length=0)),
        (LinformerConfig, dict(rank=0)),
        (LinformerConfig, dict(max_documents=0)),
        (LinformerConfig, dict(sharing="layers")),
        (PerformerConfig, dict(num_features=0)),
        (PerformerConfig, dict(num_features=7, feature_map="trigonometric")),
        (PerformerConfig, dict(feature_map="cosine")),
        (PerformerConfig, dict(redraw_index=-1)),
        (PerformerConfig, dict(num_heads=0)),
        (PrimerConfig, dict(num_heads=0)),
    ],
)
def test_settings_are_checked(config: Any, fields: dict[str, Any]) -> None:
    assert_refused(config, fields)
