from typing import Any

import pytest

from tests.transformer.refused import assert_refused
from transformer.baselines.bahdanau import BahdanauConfig
from transformer.baselines.cheng import ChengConfig
from transformer.baselines.convolution import ConvolutionConfig
from transformer.baselines.gnmt import GNMTDecoderConfig, GNMTEncoderConfig
from transformer.baselines.recurrent import ElmanConfig, LSTMConfig


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (ConvolutionConfig, dict(kernel_size=0)),
        (ElmanConfig, dict(hidden_size=-3)),
        (ElmanConfig, dict(transition_depth=0)),
        (LSTMConfig, dict(hidden_size=-1)),
        (ChengConfig, dict(score_size=-1)),
        (BahdanauConfig, dict(score_size=-1)),
        (GNMTEncoderConfig, dict(num_layers=1)),
        (GNMTEncoderConfig, dict(dropout=1.0)),
        (GNMTDecoderConfig, dict(num_layers=0)),
        (GNMTDecoderConfig, dict(score_size=-1)),
        (GNMTDecoderConfig, dict(dropout=1.0)),
    ],
)
def test_settings_are_checked(config: Any, fields: dict[str, Any]) -> None:
    assert_refused(config, fields)


def test_a_size_of_0_is_the_width() -> None:
    assert GNMTDecoderConfig().resolved_sizes(5) == (5, 5)
    assert GNMTDecoderConfig(num_layers=1, score_size=3).resolved_sizes(5) == (5, 3)
