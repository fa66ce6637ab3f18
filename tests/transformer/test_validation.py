import dataclasses
import math
from typing import Any, ClassVar

import pytest

from transformer.attention.attention_config import AdditiveScore, AttentionConfig, MixerConfig
from transformer.attention.masks import MaskPattern
from transformer.attention.position_config import (
    LearnedPositions,
    RelativePositions,
    RoPE,
    T5RelativeBias,
)
from transformer.attention.rope_scaling import LinearScaling, Llama3Scaling, NTKScaling, YaRNScaling
from transformer.attention.variants.linear_configs import (
    LinformerConfig,
    PerformerConfig,
    PrimerConfig,
)
from transformer.attention.variants.sparse_configs import (
    BigBirdConfig,
    LongformerConfig,
    ReformerConfig,
    RoutingAttentionConfig,
    SlidingWindowConfig,
    SparseTransformerConfig,
    TopKConfig,
)
from transformer.baselines.baseline_configs import (
    BahdanauConfig,
    ChengConfig,
    ConvolutionConfig,
    ElmanConfig,
    GNMTEncoderConfig,
    LSTMConfig,
)
from transformer.config import BlockConfig, TransformerConfig
from transformer.generation.beam_search import BeamSearchConfig
from transformer.generation.sampling import SamplingConfig
from transformer.layers.layer_config import FeedForwardConfig, MoEConfig, NormConfig
from transformer.validation import check_at_least, check_choice, check_fraction


def test_check_fraction() -> None:
    check_fraction("dropout", 0)
    check_fraction("dropout", math.nextafter(1, 0))
    for value in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match=rf"^dropout {value}: give a fraction in \[0, 1\)$"):
            check_fraction("dropout", value)
    with pytest.raises(ValueError, match=r"^dropout None: is not a number; give a fraction"):
        check_fraction("dropout", None)  # type: ignore[arg-type]


def test_check_at_least() -> None:
    check_at_least("heads", 1, 1)
    with pytest.raises(ValueError, match=r"^heads 0: give 1 or more$"):
        check_at_least("heads", 0, 1)
    with pytest.raises(ValueError, match=r"^epsilon nan: give 0 or more$"):
        check_at_least("epsilon", math.nan, 0)
    with pytest.raises(ValueError, match=r"^heads '8': is not a number; give 1 or more$"):
        check_at_least("heads", "8", 1)  # type: ignore[arg-type]


def test_check_choice() -> None:
    check_choice("kind", "rms", ("layer", "rms"))
    with pytest.raises(ValueError, match=r"^kind batch: is not known; give one of layer, rms$"):
        check_choice("kind", "batch", ("layer", "rms"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precision": "bfloat16"}, "model.precision 'bfloat16': is a string"),
        ({"layer_pattern": [BlockConfig()]}, "model.layer_pattern list: is not a tuple"),
        ({"d_model": 64.0}, "model.d_model 64.0: is of type float; give int"),
        ({"final_norm": "rms"}, "model.final_norm 'rms': is of type str; give NormConfig"),
        ({"causal": "no"}, "model.causal 'no': is of type str; give bool"),
        ({"layer_loop": 3}, "model.layer_loop 3: is of type int; give one of auto"),
        (
            {"layer_pattern": (BlockConfig(mixer=AttentionConfig(position=RoPE)),)},  # type: ignore[arg-type]
            "model.layer_pattern.mixer.position .*: is a class; give an instance",
        ),
    ],
)
def test_wrong_value_types_raise(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        TransformerConfig(**fields)


BLOCK = BlockConfig(mixer=AttentionConfig(num_heads=3))

REFUSED: list[tuple[Any, dict[str, Any]]] = [
    (TransformerConfig, dict(d_model=0)),
    (TransformerConfig, dict(num_layers=0)),
    (TransformerConfig, dict(num_layers=1, layer_pattern=(BLOCK,) * 3)),
    (TransformerConfig, dict(layer_pattern=())),
    (TransformerConfig, dict(pad_vocab_to_multiple=0)),
    (TransformerConfig, dict(logit_scale=0.0)),
    (TransformerConfig, dict(remat="half")),
    (BlockConfig, dict(norm_placement="before")),
    (BlockConfig, dict(residual_dropout=1.0)),
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
    (AttentionConfig, dict(num_heads=0)),
    (AttentionConfig, dict(num_kv_heads=4, num_heads=6)),
    (AttentionConfig, dict(num_kv_heads=-1)),
    (AttentionConfig, dict(head_dim=-8)),
    (AttentionConfig, dict(value_head_dim=-8)),
    (AttentionConfig, dict(dropout=1.0)),
    (AttentionConfig, dict(backend="flash")),
    (AttentionConfig, dict(position=RoPE(), score=AdditiveScore())),
    (AttentionConfig, dict(position=RelativePositions(), score=AdditiveScore())),
    (AdditiveScore, dict(hidden_dim=-1)),
    (MaskPattern, dict(window=-1)),
    (MaskPattern, dict(dilation=0)),
    (RelativePositions, dict(max_distance=-1)),
    (RoPE, dict(fraction=0.0)),
    (RoPE, dict(fraction=1.5)),
    (RoPE, dict(theta=1.0)),
    (RoPE, dict(layout="pairs")),
    (LinearScaling, dict(factor=0.5)),
    (NTKScaling, dict(factor=0.5)),
    (YaRNScaling, dict(original_max_length=0)),
    (YaRNScaling, dict(beta_slow=32.0)),
    (Llama3Scaling, dict(low_freq_factor=0.0)),
    (T5RelativeBias, dict(num_buckets=1)),
    (T5RelativeBias, dict(num_buckets=7)),
    (T5RelativeBias, dict(num_buckets=6, bidirectional=True)),
    (T5RelativeBias, dict(max_distance=16)),
    (BigBirdConfig, dict(num_heads=0)),
    (BigBirdConfig, dict(block_size=0)),
    (BigBirdConfig, dict(num_window_blocks=2)),
    (BigBirdConfig, dict(random_block_span=16)),
    (LinformerConfig, dict(num_heads=0)),
    (LinformerConfig, dict(max_length=0)),
    (LinformerConfig, dict(rank=0)),
    (LinformerConfig, dict(max_documents=0)),
    (LinformerConfig, dict(sharing="layers")),
    (LongformerConfig, dict(num_heads=0)),
    (LongformerConfig, dict(dilations=(1, 2), num_heads=3)),
    (LongformerConfig, dict(one_sided_window=-1)),
    (PerformerConfig, dict(num_features=0)),
    (PerformerConfig, dict(num_features=7, feature_map="trigonometric")),
    (PerformerConfig, dict(feature_map="cosine")),
    (PerformerConfig, dict(redraw_index=-1)),
    (PerformerConfig, dict(num_heads=0)),
    (PrimerConfig, dict(num_heads=0)),
    (ReformerConfig, dict(num_heads=0)),
    (ReformerConfig, dict(num_buckets=3)),
    (ReformerConfig, dict(num_hashes=0)),
    (ReformerConfig, dict(num_kv_heads=1)),
    (RoutingAttentionConfig, dict(num_heads=0)),
    (RoutingAttentionConfig, dict(window=0)),
    (RoutingAttentionConfig, dict(num_clusters=0)),
    (RoutingAttentionConfig, dict(num_kv_heads=1)),
    (SlidingWindowConfig, dict(num_heads=0)),
    (SlidingWindowConfig, dict(window=0)),
    (SlidingWindowConfig, dict(dilation=0)),
    (SlidingWindowConfig, dict(dropout=1.0)),
    (SlidingWindowConfig, dict(backend="fast")),
    (SparseTransformerConfig, dict(num_heads=0)),
    (SparseTransformerConfig, dict(pattern="spiral")),
    (SparseTransformerConfig, dict(stride=0)),
    (SparseTransformerConfig, dict(num_summary_tokens=5, pattern="fixed", stride=4)),
    (SparseTransformerConfig, dict(num_heads=3, factorization="heads")),
    (TopKConfig, dict(num_heads=0)),
    (TopKConfig, dict(keys_per_query=0)),
    (TopKConfig, dict(dropout=1.0)),
    (ConvolutionConfig, dict(kernel_size=0)),
    (ElmanConfig, dict(hidden_size=-3)),
    (ElmanConfig, dict(transition_depth=0)),
    (LSTMConfig, dict(hidden_size=-1)),
    (ChengConfig, dict(score_size=-1)),
    (BahdanauConfig, dict(score_size=-1)),
    (GNMTEncoderConfig, dict(num_layers=1)),
    (GNMTEncoderConfig, dict(dropout=1.0)),
    (BeamSearchConfig, dict(num_beams=0)),
    (BeamSearchConfig, dict(length_penalty=-1.0)),
    (SamplingConfig, dict(temperature=-0.1)),
    (SamplingConfig, dict(temperature=math.nan)),
    (SamplingConfig, dict(top_k=-1)),
    (SamplingConfig, dict(top_p=0.0)),
    (SamplingConfig, dict(top_p=1.5)),
]
"""Settings that would give a wrong model, or none; the first field is what the error names."""


@pytest.mark.parametrize(("config", "fields"), REFUSED)
def test_settings_are_checked_when_they_are_built(config: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"\b{next(iter(fields))} .*: ") as caught:
        config(**fields)
    assert "\n" not in str(caught.value)


def test_parts_of_a_model_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="num_heads 3: does not divide the width 11"):
        TransformerConfig(d_model=11, layer_pattern=(BLOCK,))
    limited = BlockConfig(feed_forward=MoEConfig(capacity_factor=1.0))
    with pytest.raises(ValueError, match=r"capacity_factor .* lets later tokens"):
        TransformerConfig(layer_pattern=(limited,))
    TransformerConfig(layer_pattern=(limited,), causal=False)


@dataclasses.dataclass(frozen=True)
class OwnConfig(MixerConfig):
    """Settings whose types cannot be tested."""

    kind: ClassVar[str] = "own"
    anything: Any = ()
    names: list[str] | None = None


def test_own_settings_may_have_any_type_and_need_a_hash() -> None:
    TransformerConfig(layer_pattern=(BlockConfig(OwnConfig("text")),))
    with pytest.raises(
        ValueError,
        match=r"^model.layer_pattern: OwnConfig.names of type list has no hash; give a tuple or",
    ):
        TransformerConfig(layer_pattern=(BlockConfig(OwnConfig(names=["a"])),))


def test_values_of_the_right_types_pass() -> None:
    TransformerConfig(
        position_embedding=LearnedPositions(8), embedding_dropout=0, embedding_norm=None
    )
