import json
import pathlib

import pytest

from train.data.config import TextDataConfig
from train.data.corpus import TextSplits, choose_held_out_documents
from train.errors import UserError


def texts(splits: TextSplits, name: str) -> list[str]:
    return [document.text for document in splits.documents(name)]


def test_the_tail_is_cut_at_the_character_that_nanogpt_cuts_at(tmp_path: pathlib.Path) -> None:
    text = "".join(chr(ord("a") + n % 26) for n in range(1_115_394))  # as many as Shakespeare
    (tmp_path / "a.txt").write_text(text)
    splits = TextSplits(TextDataConfig(str(tmp_path / "a.txt"), split_method="tail"))
    (train,), (validation,) = texts(splits, "train"), texts(splits, "validation")
    assert (len(train), len(validation)) == (1_003_854, 111_540)
    assert train + validation == text


def test_the_tail_is_counted_over_all_documents(tmp_path: pathlib.Path) -> None:
    for name, text in (("a", "éééé"), ("b", "bbbb"), ("c", "cc")):
        (tmp_path / name).write_text(text)
    splits = TextSplits(TextDataConfig(str(tmp_path), split_method="tail", validation_fraction=0.4))
    assert list(splits.documents("train")) == [("a", "éééé"), ("b", "bb")]
    assert list(splits.documents("validation")) == [("b", "bb"), ("c", "cc")]


def test_one_document_is_cut_as_a_tail(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789")
    splits = TextSplits(
        TextDataConfig(str(tmp_path), split_method="documents", validation_fraction=0.2)
    )
    assert (texts(splits, "train"), texts(splits, "validation")) == (["01234567"], ["89"])


def test_too_little_to_hold_out(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"1 characters are too few to hold out 0\.1 of them"):
        texts(TextSplits(TextDataConfig(str(tmp_path))), "train")


def test_whole_documents_are_held_out(tmp_path: pathlib.Path) -> None:
    lines = [json.dumps({"text": f"{n:05}"}) for n in range(211)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    splits = TextSplits(TextDataConfig(str(tmp_path)))
    train, validation = texts(splits, "train"), texts(splits, "validation")
    assert sorted(train + validation) == [f"{n:05}" for n in range(211)]
    assert len(validation) == 21
    assert train == sorted(train)
    assert validation not in (sorted(train)[:21], sorted(train)[-21:])


def test_the_draw_goes_by_name_alone() -> None:
    sizes = [(f"document {n}", 7) for n in range(101)]
    drawn = {sizes[n][0] for n in choose_held_out_documents(sizes, 0.25)}
    assert len(drawn) == 25
    assert {sizes[::-1][n][0] for n in choose_held_out_documents(sizes[::-1], 0.25)} == drawn
    assert choose_held_out_documents(sizes, 0.25) != choose_held_out_documents(
        [(n + "!", s) for n, s in sizes], 0.25
    )


@pytest.mark.parametrize(
    ("sizes", "fraction", "drawn"),
    [
        ([("a", 90), ("b", 10)], 0.1, {1}),
        ([("a", 10), ("b", 90)], 0.1, {0}),
        ([("a", 3), ("b", 2), ("c", 3)], 0.1, {1}),  # none fits
        ([("a", 5), ("b", 5)], 0.999, None),  # never all
    ],
)
def test_at_least_one_document_in_each_part(
    sizes: list[tuple[str, int]], fraction: float, drawn: set[int] | None
) -> None:
    found = choose_held_out_documents(sizes, fraction)
    assert 0 < len(found) < len(sizes)
    assert drawn is None or found == drawn


def test_other_paths_leave_the_training_text_whole(tmp_path: pathlib.Path) -> None:
    for name in ("train", "validation", "test"):
        (tmp_path / name).write_text(name)
    path = {name: str(tmp_path / name) for name in ("train", "validation", "test")}
    splits = TextSplits(
        TextDataConfig(path["train"], validation_path=path["validation"], test_path=path["test"])
    )
    assert splits.names == ("train", "validation", "test")
    for name in splits.names:
        assert texts(splits, name) == [name]
    held_out = TextSplits(
        TextDataConfig(path["train"], test_path=path["test"], validation_fraction=0.21)
    )
    assert held_out.names == ("train", "validation", "test")
    assert (texts(held_out, "train"), texts(held_out, "validation")) == (["tra"], ["in"])
    assert "held out" in held_out.fingerprint()
    assert "held out" not in splits.fingerprint()


def test_no_path_at_all() -> None:
    with pytest.raises(UserError, match=r"data\.path: is empty; give a file"):
        TextSplits(TextDataConfig())
