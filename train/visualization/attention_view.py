"""The attention viewer: every head of a model over one text, as a page or a figure.

view = view_attention(train.load("runs/multi30k"), "two dogs play .")
view                      # in a notebook: the page, isolated from the notebook's own
view.save("dogs.html")    # one file, without a network
view.save("dogs.png")     # a figure for a paper
"""

import base64
import dataclasses
import io
import pathlib
import unicodedata
import zlib
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from train.assembly import make_task
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError, as_user_error
from train.files import expand_path
from train.run import Run
from train.visualization.html_page import build_page, embed_page, write_page
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
    causal: bool
    """True if the model predicts each next token."""
    open_place: int = 0
    """Layer of the last stage that is open at first: its place among those with weights."""
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
            "tokens": self.tokens,
            "sources": self.sources or None,
            "causal": self.causal,
            "stages": stages,
            "open": [self.open_place, self.head],
            "open_stage": len(stages) - 1,  # cross-attention, where there is some
        }
        values = {"title": self.title, "subtitle": self.subtitle}
        return build_page("attention.html", data, ["page.js", "attention.js"], values)

    def save(self, output: str, *, one_head: bool = False) -> None:
        """Write the page, or a figure if the name ends with .png, .pdf or .svg.

        Args:
          output: Path of the file.
          one_head: Draw only the head that is open, with its tokens. Of figures.

        Raises:
          UserError: The name has another ending, or the file cannot be written.
        """
        if output.endswith(FIGURE_FORMATS):
            save_figure(self, output, one_head=one_head)
        elif output.endswith(".html"):
            write_page(self.html(), output)
        else:
            raise bad_output(output)

    def _repr_html_(self) -> str:
        return embed_page(self.html())


def bad_output(output: str) -> UsageError:
    """Return the error for a file name without a known ending."""
    ending = pathlib.PurePath(output).suffix or "no ending"
    return UsageError(
        f"output {output}: has {ending}; give a name that ends with .html, .png, .pdf or .svg"
    )


def view_attention(
    run: Run, text: str, target: str | None = None, *, layer: int | None = None, head: int = 0
) -> AttentionView:
    """Return the attention of a run's model over a text.

    Args:
      run: From `train.fit` or `train.load`.
      text: Text to read. For a translation model, the source.
      target: Translation that the decoder reads; None: the model's own.
      layer: Number of the layer to open first, of the last stage: cross-attention where there is
        some. None: the first with weights.
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
    excerpt = text if len(text) <= 200 else f"{text[:200]}…"
    return AttentionView(
        title=f"Attention of {run.experiment.name}",
        subtitle=f"step {run.step}, {_describe_sizes(maps)}, text: {' '.join(excerpt.split())}",
        maps=maps,
        tokens=token_labels(run.tokenizer, inputs.tokens),
        sources=token_labels(run.tokenizer, inputs.sources),
        causal=run.experiment.model.causal,
        open_place=_find_layer(maps, layer, head),
        head=head,
    )


def _find_layer(maps: tuple[AttentionMap, ...], layer: int | None, head: int) -> int:
    """Return the place of the layer to open; raise UsageError if it or its head has no weights."""
    last = [stage for stage in get_args(Stage) if any(each.stage == stage for each in maps)][-1]
    heads = {each.layer: each.weights.shape[1] for each in maps if each.stage == last}
    layer = min(heads) if layer is None else layer
    where = STAGE_TITLES[last].lower()
    if layer not in heads:
        known = ", ".join(map(str, heads))
        raise UsageError(f"layer {layer}: has no weights of {where}; layers that have are {known}")
    count = heads[layer]
    if not 0 <= head < count:
        raise UsageError(
            f"head {head}: layer {layer} has {count} of {where}; give 0 to {count - 1}"
        )
    return list(heads).index(layer)


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


def pack_maps(maps: Sequence[AttentionMap]) -> list[dict[str, Any]]:
    """Return the stages of the first example as JSON: their layers, thumbnails and heads."""
    stages: list[dict[str, Any]] = []
    for name, title in STAGE_TITLES.items():
        layers = [pack_layer(each) for each in maps if each.stage == name]
        if layers:
            stages.append({"name": name, "title": title, "layers": layers})
    return stages


def pack_layer(attention: AttentionMap) -> dict[str, Any]:
    """Return a layer of the first example as JSON."""
    codes = encode_weights(np.asarray(attention.weights)[0], np.asarray(attention.visible)[0])
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


HIDDEN_COLOR = "#d9dde3"
MAX_NAMED_TOKENS = 80
"""Rows or columns with more tokens have no names in a figure of one head: they would overlap."""


def save_figure(view: "AttentionView", output: str, *, one_head: bool) -> None:
    """Draw a view and write it; the name's ending decides the format.

    Raises:
      UserError: The file cannot be written.
    """
    from matplotlib import rc_context

    drawing = io.BytesIO()
    # Text of a PDF stays text (Type 42), as publishers ask for.
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "text.parse_math": False}):
        figure = draw_head(view) if one_head else draw_all_heads(view)
        name = output.rpartition(".")[2]
        figure.savefig(drawing, format=name, dpi=200, bbox_inches="tight", metadata=_metadata(name))
    with as_user_error(output):
        expand_path(output).write_bytes(drawing.getvalue())


def draw_all_heads(view: "AttentionView") -> Any:
    """Return a figure with a panel for each head: layers are rows, stages are below each other."""
    from matplotlib.figure import Figure

    stages = [(stage, view.maps_of(stage)) for stage in view.stages]
    columns = max(each.weights.shape[1] for _, maps in stages for each in maps)
    rows = sum(len(maps) for _, maps in stages)
    figure = Figure(
        figsize=(0.9 + 1.1 * columns, 0.5 + 1.15 * rows + 0.35 * len(stages)), layout="constrained"
    )
    parts: Any = figure.subfigures(len(stages), 1, height_ratios=[len(m) for _, m in stages])
    for part, (stage, maps) in zip(np.atleast_1d(parts), stages, strict=True):
        part.suptitle(STAGE_TITLES[stage], fontsize=10)
        grid = part.subplots(len(maps), columns, squeeze=False)
        for row, attention in zip(grid, maps, strict=True):
            row[0].set_ylabel(f"layer {attention.layer}", fontsize=8)
            for head, axes in enumerate(row):
                if head >= attention.weights.shape[1]:
                    axes.axis("off")
                    continue
                _draw(axes, attention, head)
                axes.set(xticks=[], yticks=[])
                if attention is maps[0]:
                    axes.set_title(f"head {head}", fontsize=8)
    return figure


def draw_head(view: "AttentionView") -> Any:
    """Return a figure of the open head of the last stage, with the tokens of rows and columns."""
    from matplotlib.figure import Figure

    stage = view.stages[-1]
    attention = view.maps_of(stage)[view.open_place]
    labels = view.labels_of(stage)
    height, width = (min(14.0, 1.6 + 0.24 * len(each)) for each in labels)
    figure = Figure(figsize=(width + 0.8, height), layout="constrained")
    axes = figure.subplots()
    image = _draw(axes, attention, view.head)
    axes.set_title(f"{STAGE_TITLES[stage]}, layer {attention.layer}, head {view.head}", fontsize=10)
    rows, columns = ([_plain(text) for text in each] for each in labels)
    if len(rows) <= MAX_NAMED_TOKENS:
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
    if len(columns) <= MAX_NAMED_TOKENS:
        axes.set_xticks(range(len(columns)), columns, fontsize=8, rotation=60, ha="right")
    figure.colorbar(image, ax=axes, shrink=0.6, label="attention weight")
    return figure


def _draw(axes: Any, attention: "AttentionMap", head: int) -> Any:
    """Draw one head; hidden pairs are grey, so that they differ from a weight of 0."""
    weights = np.asarray(attention.weights)[0, head]
    visible = np.asarray(attention.visible)[0]
    visible = visible[head if len(visible) > 1 else 0]
    from matplotlib.colors import PowerNorm

    axes.set_facecolor(HIDDEN_COLOR)
    visible_weights = np.ma.masked_array(weights, mask=~visible)
    for side in axes.spines.values():
        side.set(color="#aab1bc", linewidth=0.6)
    # The root, as in the page: small weights stay visible.
    return axes.imshow(
        visible_weights,
        cmap="Blues",
        norm=PowerNorm(0.5, 0, 1),
        interpolation="nearest",
        aspect="auto",
    )


def _plain(text: str) -> str:
    """Return a token as the font of a figure can write it."""
    return text.strip("·") or text


def _metadata(name: str) -> dict[str, None]:
    # Equal inputs give equal files: no date.
    return {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(name, {})
