import pytest

from bench.studies.translators import BEYOND, by_length


def test_each_group_of_lengths_has_its_own_bleu() -> None:
    sources = [" ".join(["wort"] * count) for count in (5, 9, 10, 13, 14, 17, 18, 40)]
    references = [f"the {number} of them sit on a mat" for number in range(8)]
    actual = list(references)
    actual[2] = actual[3] = "nothing like it at all"
    scores = by_length(sources, actual, references)
    assert len(scores) == len(BEYOND) + 1
    assert scores[0] == scores[2] == scores[3] == pytest.approx(100)
    assert scores[1] < 10
