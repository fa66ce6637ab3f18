"""The attention viewer: every head of a model over one text, as a page or a figure.

view = view_attention(train.load("runs/multi30k"), "two dogs play .")
view                      # in a notebook: the page, isolated from the notebook's own
view.save("dogs.html")    # one file, without a network
view.save("dogs.png")     # a figure for a paper
"""

import dataclasses
import pathlib
from typing import Any, get_args

from train.errors import UsageError, UserError
from train.run import Run
from train.tasks.registry import make_task
from train.visualization.attention_packing import STAGE_TITLES, pack_maps, token_labels
from train.visualization.html_page import build_page, embed_page, read_asset, write_page
from transformer.attention_maps import AttentionMap, Stage, attention_maps

FIGURE_FORMATS = (".png", ".pdf", ".svg")
"""Endings of files that hold a figure instead of a page."""


@dataclasses.dataclass(frozen=True, eq=False)
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
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    return AttentionView(
        title=f"Attention of {run.experiment.name}",
        subtitle=f"step {run.step}, {_describe_sizes(maps)}, text: {' '.join(shown.split())}",
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
