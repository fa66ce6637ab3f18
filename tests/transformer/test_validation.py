import dataclasses
import math
from typing import Any, ClassVar

import pytest

from transformer.attention.attention_config import AttentionConfig, MixerConfig
from transformer.attention.position_config import (
    LearnedPositions,
    RoPE,
)
from transformer.config import BlockConfig, TransformerConfig
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
