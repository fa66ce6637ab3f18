import pytest

from train.evaluation.metrics import moses_tokenize, sacre_bleu, tokenized_bleu

TRANSLATIONS = [
    "Ein Mann mit Hut fährt auf der Straße.",
    "Zwei Hunde, die „spielen“, laufen durch den Schnee!",
    "Ein Kind isst z.B. Eis.",
    "Die U-Bahn ist leer.",
    'Eine Frau sagt: "Hallo!"',
]
REFERENCES = [
    "Ein Mann mit einem Hut fährt auf der Straße.",
    "Zwei Hunde, die „spielen“, rennen durch den Schnee.",
    "Ein Kind isst z.B. ein Eis.",
    "Die U-Bahn ist heute leer.",
    'Eine alte Frau sagt: "Hallo!"',
]


def test_moses_tokens() -> None:
    assert list(moses_tokenize(TRANSLATIONS[1:3], "de")) == [
        "zwei hunde , die &quot; spielen &quot; , laufen durch den schnee !",
        "ein kind isst z.b. eis .",
    ]


def test_tokenised_bleu_is_that_of_multi_bleu() -> None:
    """multi-bleu.perl -lc says BLEU = 63.96 (BP=0.907, hyp_len=41, ref_len=45) of these tokens."""
    bleu = tokenized_bleu(TRANSLATIONS, REFERENCES, "de")
    assert round(bleu.score, 2) == 63.96
    assert "case:lc" in bleu.signature
    assert "tok:none|smooth:none" in bleu.signature


def test_sacre_bleu_has_its_own_tokens_and_signature() -> None:
    bleu = sacre_bleu(TRANSLATIONS, REFERENCES)
    assert round(bleu.score, 2) == 65.09
    assert bleu.signature.startswith("nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:")


def test_case_does_not_count() -> None:
    shouted = [text.upper().replace("STRASSE", "Straße") for text in REFERENCES]
    for score in (sacre_bleu, tokenized_bleu):
        assert score(shouted, REFERENCES).score == pytest.approx(100)
        assert score(REFERENCES, REFERENCES).score == pytest.approx(100)


def test_one_pair_of_one_word_in_four() -> None:
    """BP · (p1 · p2 · p3 · p4)^¼ with p = 3/4, 2/3, 1/2 and, of the only 4-gram, 0 or half of 1."""
    assert tokenized_bleu(["a b c x"], ["a b c d"]).score == 0
    expected = 100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25
    assert sacre_bleu(["a b c x"], ["a b c d"]).score == pytest.approx(expected)


def test_each_translation_has_its_reference() -> None:
    with pytest.raises(ValueError, match="1 translations for 2 references"):
        sacre_bleu(["a"], ["a", "b"])
