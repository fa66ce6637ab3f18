"""The attention viewer: its data, its page, its behavior in a browser, and its figures."""

import base64
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import train
from tests.chromium import Chromium, find_chromium
from tests.train.support import tiny
from tests.train.visualization.pages import HOSTILE, check_page, needs_chromium
from train.cli.main import main
from train.errors import UserError
from train.visualization.attention_view import (
    AttentionView,
    _find_layer,
    draw_head,
    encode_weights,
    shrink,
    token_labels,
    view_attention,
)
from transformer.attention_maps import AttentionMap

SOURCES = ["die", "katze", "<|endoftext|>"]


def decode_weights(codes: np.ndarray) -> np.ndarray:
    """Return the weights of codes, as the page computes them; 0 where hidden."""
    return np.asarray(((np.maximum(codes, 1).astype(np.float64) - 1) / 254) ** 2)


def softmax_map(
    stage: Any, layer: int, shape: tuple[int, int, int], *, causal: bool = False
) -> AttentionMap:
    """Return random weights of N heads, under a causal mask or none."""
    rng = np.random.default_rng(layer + len(stage))
    visible = np.tri(*shape[1:], dtype=bool)[None, None] | (not causal)
    weights = np.where(visible, rng.exponential(size=(1, *shape)) + 0.05, 0)
    weights /= weights.sum(-1, keepdims=True)
    return AttentionMap(stage, layer, "full", jnp.asarray(weights), jnp.asarray(visible))


def translation_view(tokens: tuple[str, ...] = HOSTILE) -> AttentionView:
    """Return a view of two layers of three heads, of an encoder and a decoder."""
    rows, columns = len(tokens), len(SOURCES)
    maps = [softmax_map("encoder", layer, (3, columns, columns)) for layer in range(2)]
    for layer in range(2):
        maps.append(softmax_map("decoder", layer, (3, rows, rows), causal=True))
        maps.append(softmax_map("cross", layer, (3, rows, columns)))
    return AttentionView(
        "Attention of <b>", "</title>", tuple(maps), list(tokens), SOURCES, causal=True
    )


def test_codes_keep_two_decimals_and_mark_hidden_pairs() -> None:
    weights = np.linspace(0, 1, 4001).reshape(1, 1, -1)
    visible = np.ones_like(weights, bool)
    visible[..., 7] = False
    codes = encode_weights(weights, visible)
    assert codes.dtype == np.uint8
    assert codes[0, 0, 7] == 0
    assert (codes[visible] > 0).all()  # a weight of 0 is not hidden
    np.testing.assert_allclose(decode_weights(codes)[visible], weights[visible], atol=0.004)


def test_thumbnails_keep_the_brightest_pair_of_each_cell() -> None:
    codes = np.zeros((1, 7, 5), np.uint8)
    codes[0, 6, 4], codes[0, 0, 1] = 200, 90
    assert shrink(codes, 8) is codes
    small = shrink(codes, 2)
    assert small.shape == (1, 2, 2)
    assert small.tolist() == [[[90, 0], [0, 200]]]


def test_heads_are_read_back_from_the_page() -> None:
    view = translation_view()
    page = view.html()
    data = check_page(page)
    assert data["tokens"][:-1] == list(HOSTILE[:-1])  # the last is half a character
    assert "<h1>Attention of &lt;b&gt;</h1>" in page
    assert [stage["name"] for stage in data["stages"]] == ["encoder", "decoder", "cross"]
    layer = data["stages"][1]["layers"][1]
    assert layer["shape"] == [3, len(HOSTILE), len(HOSTILE)]
    raw = zlib.decompress(base64.b64decode(layer["heads"][2]), wbits=-15)
    codes = np.frombuffer(raw, np.uint8).reshape(layer["shape"][1:])
    expected = view.maps_of("decoder")[1]
    np.testing.assert_allclose(decode_weights(codes), expected.weights[0, 2], atol=0.004)
    assert np.array_equal(codes > 0, expected.visible[0, 0])


def test_notebook_shows_the_page_in_a_frame() -> None:
    view = translation_view()
    markup = view._repr_html_()
    assert markup.startswith('<iframe sandbox="allow-scripts" srcdoc="')
    assert markup.count("<") == 2  # only those of the frame: the page inside is escaped
    assert "allow-same-origin" not in markup


def test_invisible_characters_of_tokens_are_shown() -> None:
    tokenizer = _ByteTokenizer()
    labels = token_labels(tokenizer, [0, 1, 2, 3, 4, 9])  # type: ignore[arg-type]
    assert labels == ["<|endoftext|>", "·the", "↵", "a‹U+200B›b", "‹U+202E›x", "#9"]


class _ByteTokenizer:
    vocabulary = {"<|endoftext|>": 0, "Ġthe": 1, "Ċ": 2, "x": 3, "y": 4}  # noqa: RUF012

    def decode(self, tokens: list[int]) -> str:
        return {1: " the", 2: "\n", 3: "a\u200bb", 4: "\u202ex"}.get(tokens[0], "")


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    executable = find_chromium()
    assert executable is not None
    with Chromium(executable) as opened:
        yield opened


READY = "document.documentElement.dataset.ready"
TOKENS = "[...document.querySelectorAll('#{} .token')]"


@needs_chromium
def test_hovering_a_token_marks_what_it_attends_to(browser: Chromium, tmp_path: Path) -> None:
    view = translation_view()
    view.save(str(tmp_path / "page.html"))
    browser.open(tmp_path / "page.html", READY)
    assert browser.evaluate("document.title") == "Attention of <b>"
    for side, expected in (("queries", HOSTILE[:-1]), ("keys", SOURCES)):
        texts = browser.evaluate(TOKENS.format(side) + ".map((each) => each.textContent)")
        assert texts[: len(expected)] == list(expected)
    assert browser.evaluate("document.querySelectorAll('.thumbnail').length") == 6

    browser.click("[data-layer='1'][data-head='2']")
    browser.wait_for("document.getElementById('head-title').textContent.includes('1, head 2')")
    browser.hover("#queries .token:nth-child(3)")
    weights = view.maps_of("cross")[1].weights[0, 2]
    alpha = TOKENS.format("keys") + ".map((e) => +e.style.background.match(/[\\d.]+/g).at(-1))"
    np.testing.assert_allclose(browser.evaluate(alpha), 0.06 + 0.54 * weights[2], atol=0.003)
    status = browser.evaluate("document.getElementById('status').textContent")
    assert f"attends to {SOURCES[weights[2].argmax()]}" in status

    browser.hover("#keys .token:nth-child(2)")
    alpha = alpha.replace("#keys", "#queries")
    np.testing.assert_allclose(browser.evaluate(alpha), 0.06 + 0.54 * weights[:, 1], atol=0.003)
    assert browser.messages == []


@needs_chromium
def test_clicked_token_stays_selected_across_heads_and_stages(
    browser: Chromium, tmp_path: Path
) -> None:
    translation_view().save(str(tmp_path / "page.html"))
    browser.open(tmp_path / "page.html", READY)
    browser.click("#stages button:nth-child(2)")
    browser.wait_for("document.querySelectorAll('#keys .token').length > 3")
    browser.click("#queries .token:nth-child(2)")
    browser.hover("h1")
    active = "document.querySelector('.token.active').dataset.index"
    browser.wait_for(f"{active} === '1'")  # the head may still be decompressed
    hidden = TOKENS.format("keys") + ".filter((each) => each.style.opacity === '0.4').length"
    assert browser.evaluate(hidden) == len(HOSTILE) - 2  # all later tokens are hidden
    browser.click("#next")
    browser.wait_for("document.getElementById('head-title').textContent.includes('head 1')")
    assert browser.evaluate(active) == "1"
    browser.press("Escape")
    assert browser.evaluate("document.querySelector('.token.active')") is None
    assert browser.messages == []


@needs_chromium
def test_keyboard_reaches_every_part(browser: Chromium, tmp_path: Path) -> None:
    translation_view().save(str(tmp_path / "page.html"))
    browser.open(tmp_path / "page.html", READY)
    focused = "(document.activeElement.getAttribute('aria-label') || document.activeElement.title)"
    browser.press("Tab")  # the stages: one stop
    browser.press("Tab")
    assert browser.evaluate(focused) == "Layer 0, head 0, full"
    for key in ("ArrowDown", "ArrowRight", "Enter"):
        browser.press(key)
    browser.wait_for("document.getElementById('head-title').textContent.includes('1, head 1')")
    for _ in range(3):  # past the buttons for the previous and the next head
        browser.press("Tab")
    browser.press("ArrowDown")
    assert browser.evaluate("document.activeElement.dataset.index") == "1"
    browser.press("ArrowRight")
    assert browser.evaluate("document.activeElement.parentElement.id") == "keys"
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.ariaSelected") == "true"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert browser.evaluate(outline) == "solid"
    assert browser.messages == []


def test_layers_are_named_by_their_numbers(tmp_path: Path) -> None:
    """Layers without weights have no map: the first with some may be layer 1."""
    maps = (
        *(softmax_map("encoder", layer, (4, 2, 2)) for layer in range(3)),
        *(softmax_map("decoder", layer, (2, 3, 3), causal=True) for layer in (1, 3)),
    )
    view = AttentionView(
        "title", "", maps, ["a", "b", "c"], ["d", "e"], causal=True, open_place=1, head=1
    )
    assert check_page(view.html())["open"] == [1, 1]
    [axes, *_] = draw_head(view).axes
    assert axes.get_title() == "Decoder self-attention, layer 3, head 1"
    assert [_find_layer(maps, layer, 0) for layer in (None, 1, 3)] == [0, 0, 1]
    for layer, head, message in (
        (2, 0, "layers that have are 1, 3"),
        (1, 2, "layer 1 has 2 of .*; give 0 to 1"),
        (1, -1, "give 0 to 1"),
    ):
        with pytest.raises(UserError, match=message):
            _find_layer(maps, layer, head)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> train.Run:
    folder = tmp_path_factory.mktemp("run")
    return train.fit(tiny(folder, steps=1), str(folder / "run"), quiet=True)


@pytest.mark.full
def test_attention_verb_writes_a_page(
    run: train.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, more in (("a.html", []), ("a.png", []), ("b.png", ["--one-head", "--head", "3"])):
        output = tmp_path / name
        command = ["attention", str(run.folder.path), "--text", "the cat", "--output", str(output)]
        with pytest.raises(SystemExit) as stop:
            main([*command, *more])
        assert stop.value.code == 0, capsys.readouterr().err
    data = check_page((tmp_path / "a.html").read_text())
    assert data["tokens"][1:] == ["t", "h", "e", "·", "c", "a", "t"]
    assert [layer["shape"] for layer in data["stages"][0]["layers"]] == [[4, 8, 8]] * 2
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "b.png").read_bytes() != (tmp_path / "a.png").read_bytes()


@pytest.mark.full
def test_unsupported_inputs_raise(run: train.Run) -> None:
    cases: list[tuple[str, Any, str]] = [
        ("the cat " * 9, {}, "the model reads 16; shorten it"),
        ("the", {"head": 4}, "head 4: layer 0 has 4 of decoder self-attention"),
        ("the", {"target": "die"}, "--target: the run's model reads one text"),
    ]
    for text, options, message in cases:
        with pytest.raises(UserError, match=message):
            view_attention(run, text, **options)
    with pytest.raises(UserError, match=r"a.txt: has .txt"):
        view_attention(run, "the").save("a.txt")
