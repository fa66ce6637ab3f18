import math

import pytest

from transformer.validation import check_at_least, check_choice, check_fraction


@pytest.mark.parametrize("value", [0, 0.0, 0.5, math.nextafter(1, 0)])
def test_a_share_is_at_least_zero_and_below_one(value: float) -> None:
    check_fraction("dropout", value)


@pytest.mark.parametrize("value", [1.0, -0.1, math.nan, math.inf])
def test_what_is_no_share(value: float) -> None:
    with pytest.raises(ValueError, match=rf"^dropout {value}: give a share in \[0, 1\)$"):
        check_fraction("dropout", value)


def test_the_least() -> None:
    check_at_least("heads", 1, 1)
    with pytest.raises(ValueError, match=r"^heads 0: give 1 or more$"):
        check_at_least("heads", 0, 1)
    with pytest.raises(ValueError, match=r"^epsilon nan: give 0 or more$"):
        check_at_least("epsilon", math.nan, 0)


def test_a_choice() -> None:
    check_choice("kind", "rms", ("layer", "rms"))
    with pytest.raises(ValueError, match=r"^kind batch: is not known; give one of layer, rms$"):
        check_choice("kind", "batch", ("layer", "rms"))
