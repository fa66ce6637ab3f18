import pytest

from tests.transformer.formulas import array
from transformer import Mask, MaskPattern
from transformer.attention.mixer import reject_mask_patterns


@pytest.mark.parametrize(
    ("mask", "unsupported"),
    [
        (Mask(MaskPattern(causal=True, window=3)), "a window"),
        (Mask(MaskPattern(prefix=True)), "a prefix"),
        (Mask(prefix_lengths=array([1])), "a prefix"),
        (Mask(global_positions=array([[1]])), "global positions"),
        (Mask(allowed=array([[[True]]])), "an array of allowed pairs"),
        (Mask(MaskPattern(ordered=False)), "tokens that are not in the order of their positions"),
    ],
    ids=["window", "prefix pattern", "prefix", "globals", "allowed", "order"],
)
def test_unsupported_masks_raise_and_are_named(mask: Mask, unsupported: str) -> None:
    with pytest.raises(ValueError, match=f"^mixer lstm: does not support {unsupported}"):
        reject_mask_patterns("lstm", mask)


def test_causal_masks_and_segments_are_accepted() -> None:
    reject_mask_patterns("lstm", Mask(MaskPattern(causal=True), segments=array([[1, 2]])))
