"""The attention viewer: every head of a model over one text, as a page or a figure.

view = view_attention(train.load("runs/multi30k"), "two dogs play .")
view                      # in a notebook: the page, isolated from the notebook's own
view.save("dogs.html")    # one file, without a network
view.save("dogs.png")     # a figure for a paper
"""

import base64
import dataclasses
import pathlib
import unicodedata
import zlib
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError
from train.run import Run
from train.tasks.task_registry import make_task
from train.visualization.html_page import build_page, embed_page, read_asset, write_page
from transformer.attention_maps import AttentionMap, Stage, attention_maps

FIGURE_FORMATS = (".png", ".pdf", ".svg")
"""Endings of files that hold a figure instead of a page."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AttentionView:
    """Attention of a model over one text."""

    title: str
    subtitle: str
    maps: tuple[AttentionMap, ...]
    """Maps of all layers, for a batch of one."""
    tokens: list[str]
    """[T] visible tokens of the model's own layers or its decoder."""
    sources: list[str]
    """[S] visible tokens of the source; empty without an encoder beside a decoder."""
    next_tokens: list[str]
    """[T] token that each token of a causal model comes before; empty for other models."""
    layer: int = 0
    """Layer that is open at first."""
    head: int = 0
    """Head that is open at first."""

    @property
    def stages(self) -> list[Stage]:
        """Stages of the model, in the order of the page."""
        return [stage for stage in get_args(Stage) if self.maps_of(stage)]

    def maps_of(self, stage: str) -> list[AttentionMap]:
        """Return the maps of a stage, by layer."""
        return [each for each in self.maps if each.stage == stage]

    def labels_of(self, stage: str) -> tuple[list[str], list[str]]:
        """Return the tokens of the rows and of the columns of a stage."""
        rows = self.sources if stage == "encoder" and self.sources else self.tokens
        return rows, self.sources if stage == "cross" else rows

    def html(self) -> str:
        """Return the page: one file that needs no network."""
        stages = pack_maps(self.maps)
        data: dict[str, Any] = {
            "title": self.title,
            "subtitle": self.subtitle,
            "tokens": self.tokens,
            "sources": self.sources or None,
            "causal": bool(self.next_tokens),
            "next": self.next_tokens,
            "stages": stages,
            "open": [self.layer, self.head],
            "open_stage": len(stages) - 1,  # cross-attention, where there is some
        }
        return build_page(
            self.title, read_asset("attention.html"), data, ["page.js", "attention.js"]
        )

    def save(self, output: str, *, one_head: bool = False) -> None:
        """Write the page, or a figure if the name ends with .png, .pdf or .svg.

        Args:
          output: Path of the file.
          one_head: Draw only the head that is open, with its tokens. Of figures.

        Raises:
          UserError: The name has another ending, or the file cannot be written.
        """
        if output.endswith(FIGURE_FORMATS):
            from train.visualization.attention_figure import save_figure

            save_figure(self, output, one_head=one_head)
        elif output.endswith(".html"):
            write_page(self.html(), output)
        else:
            raise bad_output(output)

    def __repr__(self) -> str:
        sizes = f"{len(self.maps)} layers, {len(self.tokens)} tokens"
        return f"<AttentionView of {self.title}: {sizes}; save('FILE.html') writes its page>"

    def _repr_html_(self) -> str:
        return embed_page(self.html())


def bad_output(output: str) -> UsageError:
    """Return the error for a file name without a known ending."""
    ending = pathlib.PurePath(output).suffix or "no ending"
    return UsageError(
        f"output {output}: has {ending}; give a name that ends with .html, .png, .pdf or .svg"
    )


def view_attention(
    run: Run, text: str, target: str | None = None, *, layer: int = 0, head: int = 0
) -> AttentionView:
    """Return the attention of a run's model over a text.

    Args:
      run: From `train.fit` or `train.load`.
      text: Text to read. For a translation model, the source.
      target: Translation that the decoder reads; None: the model's own.
      layer: Layer to open first.
      head: Head to open first.

    Raises:
      UserError: The model cannot read the text, or has no attention weights or no such head.
    """
    if run.tokenizer is None:
        raise UserError(f"{run.folder.path}: its model reads no text; give a run of a text task")
    inputs = make_task(run.experiment).model_inputs(run, text, target)
    if not inputs.tokens:
        raise UserError("text: has no tokens; give some words")
    try:
        maps = attention_maps(run.model, run.params, **inputs.arguments)
    except ValueError as error:
        raise UserError(str(error)) from error
    _check_place(maps, layer, head)
    labels = token_labels(run.tokenizer, inputs.tokens)
    causal = run.experiment.model.causal
    excerpt = text if len(text) <= 200 else f"{text[:200]}…"
    return AttentionView(
        title=f"Attention of {run.experiment.name}",
        subtitle=f"step {run.step}, {_describe_sizes(maps)}, text: {' '.join(excerpt.split())}",
        maps=maps,
        tokens=labels,
        sources=token_labels(run.tokenizer, inputs.sources),
        next_tokens=labels[1:] if causal else [],
        layer=layer,
        head=head,
    )


def _check_place(maps: tuple[AttentionMap, ...], layer: int, head: int) -> None:
    num_layers = max(sum(each.stage == stage for each in maps) for stage in STAGE_TITLES)
    num_heads = max(each.weights.shape[1] for each in maps)
    for name, value, count in (("layer", layer, num_layers), ("head", head, num_heads)):
        if not 0 <= value < count:
            raise UsageError(
                f"{name} {value}: the model has {count} with weights; give 0 to {count - 1}"
            )


def _describe_sizes(maps: tuple[AttentionMap, ...]) -> str:
    parts = []
    for stage in STAGE_TITLES:
        layers = [each for each in maps if each.stage == stage]
        if layers:
            _, heads, rows, columns = layers[0].weights.shape
            parts.append(f"{stage} {len(layers)} × {heads} heads of {rows} × {columns} tokens")
    return ", ".join(parts)


THUMBNAIL_SIZE = 64
"""Largest number of rows and columns of a thumbnail."""

MAX_CODE = 255

STAGE_TITLES = {
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention",
    "cross": "Cross-attention",
}
"""Names of the stages, for people."""


def encode_weights(
    weights: np.ndarray,  # [N, T, S]
    visible: np.ndarray,  # [N or 1, T, S] booleans
) -> np.ndarray:  # [N, T, S] uint8
    """Return the codes of weights: 0 for a hidden pair, 1 + round(254 √w) for a weight w.

    The root keeps small weights apart. A weight read back is at most 0.004 off.
    """
    roots = np.sqrt(np.clip(weights, 0, 1))
    codes = 1 + np.rint((MAX_CODE - 1) * roots).astype(np.uint8)
    return np.where(visible, codes, np.uint8(0))


def decode_weights(codes: np.ndarray) -> np.ndarray:
    """Return the weights of codes, as the page computes them; 0 where hidden."""
    roots = (np.maximum(codes, 1).astype(np.float64) - 1) / (MAX_CODE - 1)
    return np.asarray(roots**2)


def shrink(codes: np.ndarray, size: int = THUMBNAIL_SIZE) -> np.ndarray:  # [N, T, S]
    """Return thumbnails: the largest code of each cell, so that no bright pair is lost."""
    for axis in (1, 2):
        length = codes.shape[axis]
        if length > size:
            starts = np.arange(size) * length // size
            codes = np.maximum.reduceat(codes, starts, axis=axis)
    return codes


def compress(codes: np.ndarray) -> str:
    """Return bytes as base64 of a raw deflate stream, which browsers decompress themselves."""
    deflate = zlib.compressobj(6, wbits=-zlib.MAX_WBITS)
    stream = deflate.compress(np.ascontiguousarray(codes).tobytes()) + deflate.flush()
    return base64.b64encode(stream).decode()


def pack_maps(maps: Sequence[AttentionMap], example: int = 0) -> list[dict[str, Any]]:
    """Return the stages of one example as JSON: their layers, thumbnails and heads."""
    stages: list[dict[str, Any]] = []
    for name, title in STAGE_TITLES.items():
        layers = [pack_layer(each, example) for each in maps if each.stage == name]
        if layers:
            stages.append({"name": name, "title": title, "layers": layers})
    return stages


def pack_layer(attention: AttentionMap, example: int = 0) -> dict[str, Any]:
    """Return a layer of one example as JSON."""
    weights, visible = np.asarray(attention.weights)[example], np.asarray(attention.visible)
    codes = encode_weights(weights, visible[example if len(visible) > 1 else 0])
    thumbnails = shrink(codes)
    return {
        "layer": attention.layer,
        "mixer": attention.mixer,
        "shape": list(codes.shape),
        "thumbnail_shape": list(thumbnails.shape),
        "thumbnails": compress(thumbnails),
        "heads": [compress(head) for head in codes],
    }


def token_labels(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return each token as visible text: spaces, line ends and invisible characters have signs.

    Tokens without text, such as separators, have their name in the vocabulary.
    """
    names = {token: name for name, token in tokenizer.vocabulary.items()}
    return [_label(tokenizer.decode([token]), names.get(token, f"#{token}")) for token in tokens]


def _label(text: str, name: str) -> str:
    if not text or "\N{REPLACEMENT CHARACTER}" in text:  # a separator, or a part of a character
        text = name
    # Marks of a word's beginning in byte-level and SentencePiece vocabularies.
    if name[:1] in ("Ġ", "▁") and not text.startswith((" ", "Ġ", "▁")):
        text = " " + text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    """Return a character, or a sign of one that would be invisible or change its neighbors."""
    signs = {" ": "·", "\n": "↵", "\t": "→", "Ġ": "·", "▁": "·", "Ċ": "↵"}
    if character in signs:
        return signs[character]
    # Controls, formats (zero-width and bidirectional marks), separators and surrogates.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Zs"):
        return f"‹U+{ord(character):04X}›"
    return character
