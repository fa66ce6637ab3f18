"""Comparison of two configs by what they compute, for `export`: can a family express a model?"""

import dataclasses
from typing import Any

from transformer.attention.projections import MultiHeadConfig
from transformer.attention.scores import ScaledDotScore
from transformer.layers.feedforward import FeedForwardConfig, resolve_d_ff
from transformer.layers.moe import MoEConfig
from transformer.layers.norms import NormConfig
from transformer.model_context import Initialization
from transformer.models.config import TransformerConfig
from transformer.precision import Precision

NO_EFFECT = {
    "backend": "auto",
    "dispatcher": "auto",
    "dropout": 0.0,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
    "precision": Precision(),
    "initialization": Initialization(),
    "layer_loop": "auto",
    "remat": "none",
    "pad_vocab_to_multiple": 1,
    "load_balance_loss_weight": 0.0,
    "router_z_loss_weight": 0.0,
    "pooler": False,
}
"""Fields that change how a model is trained or run, but not what it computes."""


def find_difference(config: TransformerConfig, other: TransformerConfig) -> str | None:
    """Return the first field in which two models differ, with both values; None if in none."""
    return _compare("model", _normal_form(config), _normal_form(other))


def _normal_form(config: TransformerConfig) -> Any:
    """Return nested dicts with defaults filled in and one entry for each layer."""
    return _plain(config, config.d_model)


def _plain(value: Any, d_model: int) -> Any:
    if isinstance(value, MultiHeadConfig):
        resolved: dict[str, Any] = {
            "num_kv_heads": value.resolved_num_kv_heads,
            "head_dim": value.resolved_head_dim(d_model),
            "output_bias": value.has_output_bias,
        }
        score = getattr(value, "score", None)
        if isinstance(score, ScaledDotScore) and not score.divisor:
            resolved["score"] = ScaledDotScore(float(resolved["head_dim"]))
        if hasattr(value, "value_head_dim") and not value.value_head_dim:
            resolved["value_head_dim"] = resolved["head_dim"]
        value = dataclasses.replace(value, **resolved)
    if isinstance(value, FeedForwardConfig):
        value = dataclasses.replace(value, d_ff=resolve_d_ff(value, d_model))
    if isinstance(value, NormConfig) and value.kind != "layer":  # it has no bias
        value = dataclasses.replace(value, bias=True)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    fields |= {name: each for name, each in NO_EFFECT.items() if name in fields}
    if isinstance(value, MoEConfig) and value.num_experts == 1:
        fields["num_experts_per_token"] = 1
    plain = {name: _plain(each, d_model) for name, each in fields.items()}
    if "layer_pattern" in fields:
        pattern = fields["layer_pattern"]
        depth = fields["num_layers"]
        plain["layer_pattern"] = {
            str(layer): _plain(pattern[layer % len(pattern)], d_model) for layer in range(depth)
        }
    return {"": type(value).__name__} | plain


def _compare(path: str, ours: Any, theirs: Any) -> str | None:
    both = isinstance(ours, dict) and isinstance(theirs, dict)
    if both and ours.get("") == theirs.get(""):  # dicts of one class, or of layers
        for name in ours:
            if name and (difference := _compare(f"{path}.{name}", ours[name], theirs.get(name))):
                return difference
        return None
    if ours == theirs:
        return None
    values = [each.get("", "other") if isinstance(each, dict) else each for each in (ours, theirs)]
    return f"{path} {values[0]!r} (it has {values[1]!r})"
