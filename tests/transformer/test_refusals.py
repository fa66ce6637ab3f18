import pytest

from tests.transformer.formulas import array
from transformer import Mask, Pattern
from transformer.refusals import refuse_patterns


@pytest.mark.parametrize(
    ("mask", "what"),
    [
        (Mask(Pattern(causal=True, window=3)), "a window"),
        (Mask(Pattern(prefix=True)), "a prefix"),
        (Mask(prefix=array([1])), "a prefix"),
        (Mask(globals=array([[1]])), "global positions"),
        (Mask(allowed=array([[[True]]])), "an array of what is allowed"),
        (Mask(Pattern(ordered=False)), "an order of tokens other than their positions'"),
    ],
    ids=["window", "prefix pattern", "prefix", "globals", "allowed", "order"],
)
def test_masks_that_only_attention_obeys_are_refused_by_name(mask: Mask, what: str) -> None:
    message = f"^mixer lstm: cannot obey {what}; use a mixer of attention$"
    with pytest.raises(ValueError, match=message):
        refuse_patterns("lstm", mask)


def test_causal_masks_and_segments_are_obeyed() -> None:
    refuse_patterns("lstm", Mask(Pattern(causal=True), segments=array([[1, 2]])))
