import dataclasses
import math
import re
from typing import Annotated, Any, ClassVar, Literal

import pytest

from transformer.attention.full import AttentionConfig
from transformer.attention.mixer import MixerConfig
from transformer.attention.rope import RoPE
from transformer.layers.norms import NormConfig
from transformer.layers.position_embedding import LearnedPositions
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig
from transformer.validation import (
    Bounds,
    Fraction,
    Mark,
    NonNegativeFloat,
    PositiveInt,
    Settings,
    check_seed,
    field_marks,
)


@dataclasses.dataclass(frozen=True)
class Example(Settings):
    rate: Fraction = 0.0
    heads: PositiveInt = 1
    theta: Annotated[float, Bounds(above=1)] = 2.0
    size: Annotated[int, Bounds(0, 2**16)] = 0
    any_integer: int = 0
    epsilon: NonNegativeFloat = 0.0
    kind: Literal["layer", "rms"] = "layer"
    causal: bool = True
    factors: tuple[float, ...] = ()
    inner: NormConfig | None = None


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("rate", 1.0, "give less than 1"),
        ("rate", -0.1, "give 0 or more"),
        ("rate", math.nan, "is not a finite number"),
        ("rate", None, "is of type NoneType; give float"),
        ("heads", 0, "give 1 or more"),
        ("heads", True, "is of type bool; give int"),
        ("heads", 8.0, "is of type float; give int"),
        ("heads", 2**31, "is too large; give at most 2147483647"),
        ("theta", 1.0, "give more than 1"),
        ("theta", 2.0**128, "is too large"),
        ("size", 2**16 + 1, "is too large; give at most 65536"),
        ("any_integer", 2**31, "is too large"),
        ("any_integer", -(2**31), "give -2147483647 or more"),
        ("epsilon", math.inf, "is not a finite number"),
        ("epsilon", 1e308, "is too large"),
        ("kind", "batch", "is not known; give one of layer, rms"),
        ("kind", 3, "is of type int"),
        ("causal", "no", "is of type str; give bool"),
        ("factors", [1.0], "is of type list; give tuple"),
        ("factors", (1.0, "x"), "is of type str; give float"),
        ("inner", "rms", "is of type str; give NormConfig or None"),
        ("inner", NormConfig, "is a class; give an instance, such as NormConfig()"),
    ],
)
def test_settings_are_checked_against_their_annotations(
    field: str, value: Any, problem: str
) -> None:
    with pytest.raises(ValueError, match=rf"^Example\.{field} .*: {re.escape(problem)}"):
        Example(**{field: value})


def test_the_largest_and_smallest_numbers_pass() -> None:
    with pytest.raises(ValueError, match=r"^Example.heads with more than 30 digits: is too large"):
        Example(heads=10**5000)
    Example(rate=math.nextafter(1, 0), heads=2**31 - 1, size=2**16, any_integer=-(2**31) + 1)
    assert RoPE(theta=1e10).theta == 1e10
    Example(rate=0, epsilon=2.0**127, theta=math.nextafter(1, 2), inner=NormConfig())


@dataclasses.dataclass(frozen=True)
class OwnConfig(MixerConfig):
    """Settings whose types cannot be tested."""

    kind: ClassVar[str] = "own"
    anything: Any = ()
    names: list[str] | None = None


def test_own_settings_may_have_any_type_and_need_a_hash() -> None:
    TransformerConfig(layer_pattern=(BlockConfig(OwnConfig("text")),))
    with pytest.raises(
        ValueError, match=r"^TransformerConfig.layer_pattern: OwnConfig has no hash"
    ):
        TransformerConfig(layer_pattern=(BlockConfig(OwnConfig(names=["a"])),))


def test_errors_inside_name_the_path() -> None:
    mixer = AttentionConfig()
    object.__setattr__(mixer, "soft_cap", math.inf)  # as in a class without checks
    pattern = (BlockConfig(), BlockConfig(mixer=mixer))
    with pytest.raises(ValueError, match=r"^TransformerConfig.layer_pattern.1.mixer.soft_cap inf"):
        TransformerConfig(layer_pattern=pattern)


def test_marks_stand_beside_bounds_and_parts_name_fields() -> None:
    @dataclasses.dataclass(frozen=True)
    class Part(Settings, part="outer.part"):
        size: Annotated[PositiveInt, Mark.COMMON, Mark.RESUMABLE] = 1
        rate: float = 0.0

    @dataclasses.dataclass(frozen=True)
    class Derived(Part):
        depth: Annotated[int, Mark.SWITCHES_STATE] = 0

    assert field_marks(Derived) == {
        "size": {Mark.COMMON, Mark.RESUMABLE},
        "rate": frozenset(),
        "depth": {Mark.SWITCHES_STATE},
    }
    with pytest.raises(ValueError, match=r"^outer\.part\.size 0: give 1 or more"):
        Derived(size=0)


def test_values_of_the_right_types_pass() -> None:
    TransformerConfig(
        position_embedding=LearnedPositions(8), embedding_dropout=0, embedding_norm=None
    )


def test_seeds_that_jax_would_truncate_are_refused() -> None:
    check_seed(2**32 - 1)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"^seed {seed}: give an integer from 0 to 2"):
            check_seed(seed)
