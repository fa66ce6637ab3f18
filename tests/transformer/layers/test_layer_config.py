from typing import Any

import pytest

from tests.transformer.refused import assert_refused
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.moe import MoEConfig
from transformer.layers.norms import NormConfig


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (NormConfig, dict(kind="batch")),
        (NormConfig, dict(epsilon=-1e-5)),
        (FeedForwardConfig, dict(d_ff=-1)),
        (FeedForwardConfig, dict(dropout=1.0)),
        (FeedForwardConfig, dict(activation="tanh")),
        (FeedForwardConfig, dict(swish_beta=2.0)),  # the activation has none
        (MoEConfig, dict(num_experts=0)),
        (MoEConfig, dict(num_experts_per_token=0)),
        (MoEConfig, dict(num_experts_per_token=9)),
        (MoEConfig, dict(capacity_factor=-1.0)),
        (MoEConfig, dict(load_balance_loss_weight=-1.0)),
        (MoEConfig, dict(router_z_loss_weight=-1.0)),
        (MoEConfig, dict(dispatcher="ragged")),
        (MoEConfig, dict(dispatcher="dense", capacity_factor=1.0)),
        (MoEConfig, dict(normalize_gates=True, num_experts_per_token=1)),
        (MoEConfig, dict(shared_expert_gate=True)),  # of no expert
        (MoEConfig, dict(router_score="tanh")),
        (MoEConfig, dict(num_groups=3)),
        (MoEConfig, dict(num_groups=2, num_groups_per_token=3)),
        (
            MoEConfig,
            dict(num_groups_per_token=1, num_groups=8),
        ),  # of one expert each
        (MoEConfig, dict(num_groups_per_token=4, num_groups=8, selection_bias=True)),
    ],
)
def test_settings_are_checked(config: Any, fields: dict[str, Any]) -> None:
    assert_refused(config, fields)
