"""Warm start: begin with weights of another run or from Python, or with word vectors of a file.

The config decides the model. A weight of the source is taken if the model has one of the same tree
path, and the same shape. Of a vocabulary table (embedding or output) the rows of the tokens that
both tokenizers have are taken; of word vectors, those of the words that are tokens. All other
weights keep their initial values, and the optimizer starts anew. The depth is part of a shape:
layers are stacked along the first axis of each weight.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from train.checkpoint.tree_paths import named_leaves
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.parallel.sharding import gather_to_host, init_on_devices
from train.run import load
from train.run_folder.folder import RunFolder
from train.state import initial_keys
from train.tasks.task import TaskConfig
from train.telemetry.event_log import EventLog
from train.warm_start.word_vectors import (
    check_width,
    copy_scaled,
    is_word_vector_file,
    read_word_vectors,
    rows_of_words,
)
from transformer.layers.low_rank import merge_weight, stands_for_matrix
from transformer.lora import matches_pattern
from transformer.models.model import Model

VOCABULARY_TABLES: Mapping[str, int] = {
    "embedding": 0,
    "source_embedding": 0,
    "output": -1,
    "head_output_bias": 0,
    "output_bias": 0,
}
"""Tree path of each weight with a row for each token, and the axis of the tokens."""

HEAD_PREFIX = "head"
"""Start of the tree paths of a head's weights, which belong to a task: `head_bias`."""

PYTHON_SOURCE = "params"
"""Name of a source that is not a run."""


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Weights to begin with."""

    params: Any
    """Nested dicts of arrays, with any part of the model's weights."""
    source: str = PYTHON_SOURCE
    """Folder of a run, file of word vectors, or `params`."""
    only: str = ""
    """Pattern of the tree paths to take, with `*` and `?` as in file names: `*/mixer/*`. A plain
    name takes all below it: `layers`. Empty: all."""
    tokenizer: Tokenizer | None = None
    """Tokenizer that the rows of the source's vocabulary belong to. None: that of the run."""
    step: int = 0
    """Step of the weights."""
    adapter: str = ""
    """Folder of a PEFT LoRA adapter to start with."""
    has_other_task: bool = False
    """True if the source was trained on another task, whose head does not fit this one."""
    model_type: str = ""
    """`model_type` of the source's import, which the modules of an adapter are named after."""
    words: Mapping[str, int] | None = None
    """Rows of `embedding` by word, if it was read from a file of word vectors."""

    @property
    def place(self) -> str:
        """Source that is found from any working folder."""
        return _absolute_source(self.source)


class WarmStartSource(NamedTuple):
    """Request for a warm start: the arguments of `fit`."""

    params: Any = None
    init_from: str = ""
    init_only: str = ""
    init_adapter: str = ""

    def read(self, folder: RunFolder, task: TaskConfig | None = None) -> WarmStart | None:
        """Return the weights for a run of a task, or None if none are asked for.

        Raises:
          UserError: Two sources are given, the folder holds no run, or the file no word vectors.
        """
        if self.params is None and not self.init_from:
            for name in ("init_only", "init_adapter"):
                if value := getattr(self, name):
                    raise UserError(f"{name} {value}: give init_from or params with it")
            return None
        if self.params is not None and self.init_from:
            raise UserError(f"init_from {self.init_from}: params are given too; give one of them")
        if self.params is not None:
            return WarmStart(self.params, only=self.init_only, adapter=self.init_adapter)
        if is_word_vector_file(self.init_from):
            if self.init_adapter:
                raise UserError(
                    f"init_adapter {self.init_adapter}: is for a trained model, and "
                    f"{self.init_from} is a file of word vectors; give the folder of a run"
                )
            words, table = read_word_vectors(self.init_from)
            params = {"embedding": table}
            return WarmStart(params, self.init_from, self.init_only, words=words)
        RunFolder.open_existing(self.init_from, "init_from")
        run = load(self.init_from)
        if run.folder.path == folder.path:
            raise UserError(f"init_from {self.init_from}: is the run's own folder; give another")
        params = jax.device_get(run.params)
        return WarmStart(
            params,
            self.init_from,
            self.init_only,
            run.tokenizer,
            run.step,
            self.init_adapter,
            task is not None and type(task) is not type(run.experiment.task),
            run.folder.model_type,
        )

    @classmethod
    def of_earlier_start(cls, folder: RunFolder) -> "WarmStartSource":
        """Return the source that a run began with, from its event log, to begin it once more.

        A resumed run needs it only to roll back to before its first checkpoint.

        Raises:
          UserError: The weights were given from Python.
        """
        event = _last_warm_start(folder)
        if not event:
            return cls()
        if event["source"] == PYTHON_SOURCE:
            raise UserError(
                f"{folder.path}: began with params from Python, which a rollback to its start "
                "needs; train again in another folder"
            )
        return cls(None, event["source"], event["only"])


class WarmStartReport(NamedTuple):
    """Weights that were taken, left out or initialized, by tree path."""

    taken: tuple[str, ...]
    """Weights of the model with values of the source."""
    left: tuple[str, ...]
    """Weights of the source that the model does not have, or that were not requested."""
    new: tuple[str, ...]
    """Weights of the model that keep their initial values."""
    resized: dict[str, int]
    """Vocabulary tables of which only the rows of shared tokens were taken, with their number."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in self._asdict().items()}

    def lines(self, source: str) -> list[str]:
        """Return what to print: the numbers of weights, and the names of those not taken."""
        lines = [f"starts with {len(self.taken)} weights of {source}: {_shorten(self.taken)}"]
        for name, rows in self.resized.items():
            lines.append(f"of {name} the rows of {rows} tokens, which {source} has too")
        if self.new:
            lines.append(f"initialized from the seed: {_shorten(self.new)}")
        if self.left:
            lines.append(f"not taken of {source}: {_shorten(self.left)}")
        return lines


def check_same_weights(folder: RunFolder, warm_start: WarmStart | None) -> None:
    """Raise UserError if the source of a run has trained on since the run began with it."""
    began_with = _last_warm_start(folder).get("source_step")
    if warm_start is not None and began_with not in (None, warm_start.step):
        raise UserError(
            f"init_from {warm_start.source}: has weights of step {warm_start.step} now, and this "
            f"run began with those of step {began_with}, which a rollback to its start needs; "
            "train again in another folder"
        )


def explain_unread_source(folder: RunFolder, request: WarmStartSource) -> str:
    """Return why a run that exists does not start with other weights; empty if it began with them.

    Who starts a run again with `init_from` may think that the weights are taken from there.
    """
    if not request.init_from:
        return ""
    event = _last_warm_start(folder)
    source = str(event.get("source", ""))
    start = f"began with the weights of {source}" if source else "did not begin with another's"
    if _absolute_source(source) == _absolute_source(request.init_from):
        if (event.get("only"), event.get("adapter")) == (request.init_only, request.init_adapter):
            return ""
        start += ", but not with the same part of them"
    return f"init_from {request.init_from}: is not read; this run {start}. Give another workdir"


def _last_warm_start(folder: RunFolder) -> dict[str, Any]:
    """Return the event of the run's warm start; empty without one.

    An earlier run in this folder, whose checkpoints were deleted, may have another.
    """
    for event in reversed(EventLog(folder.event_log).read()):
        if event.get("event") == "warm start":
            return event
        if event.get("event") == "started" and event.get("new"):
            break
    return {}


def _absolute_source(source: str) -> str:
    """Return the path of a source whatever the working folder; `params` and addresses as given."""
    if source in ("", PYTHON_SOURCE) or "://" in source:
        return source
    return str(Path(source).expanduser().absolute())


def copy_files_of_source(
    warm_start: WarmStart, folder: RunFolder, tokenizer: Tokenizer | None
) -> None:
    """Copy the small files of an imported source to a new run, unless its tokenizer is another."""
    source = warm_start.tokenizer
    if tokenizer is not None and source is not None and tokenizer.digest == source.digest:
        copy_pretrained_files(RunFolder.open_existing(warm_start.source), folder)


def copy_pretrained_files(source: RunFolder, target: RunFolder) -> None:
    """Copy the small files of an imported run, if it has any, its chat template among them."""
    if source.pretrained.exists():
        for file in source.pretrained.rglob("*"):
            if file.is_file():
                copy = target.pretrained / file.relative_to(source.pretrained)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(file.read_bytes())


DrawWeights = Callable[[Mapping[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]]
"""Function from shapes by tree path to initial values, placed as the shapes say."""


PlaceWeight = Callable[[str, Any, jax.ShapeDtypeStruct], Any]
"""Function from the tree path of a weight, its value and its shape to the weight on its devices."""


def seeded_weights(model: Model, seed: int) -> DrawWeights:
    """Return a function that draws some of the weights with which a run of this seed begins."""

    def draw(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        if not wanted:
            return {}

        def init() -> dict[str, jax.Array]:
            # The compiler drops what is not returned: other weights are never drawn.
            own: Any = named_leaves(model.init_params(initial_keys(seed)[0]))
            return {name: own[name] for name in wanted}

        drawn: dict[str, jax.Array] = init_on_devices(init, dict(wanted))
        return drawn

    return draw


def merge_params(
    shapes: Any,
    draw: DrawWeights,
    warm_start: WarmStart,
    tokenizer: Tokenizer | None,
    place: PlaceWeight = lambda name, value, like: copy_as(value, like),
) -> tuple[Any, WarmStartReport]:
    """Return the parameters of a model with values of the source, and a report.

    Weights of the source go to their devices one after another, and only what it lacks is drawn:
    the devices hold the model once. `shapes` have dtypes and shardings, too.

    Raises:
      UserError: A shape differs beyond the vocabulary, or nothing is taken.
    """
    own: Any = named_leaves(shapes)
    source = _named_arrays(warm_start)
    chosen = chosen_names(warm_start, own)
    taken = [name for name in own if name in chosen]
    shared: dict[str, list[tuple[int, int]]] = {}  # rows of tokens that both vocabularies have
    for name in taken:
        leaf, value = own[name], source[name]
        if value.shape != leaf.shape or _other_tokens(name, warm_start, tokenizer):
            shared[name] = _shared_rows(name, leaf, value, warm_start, tokenizer)
    if not taken:
        pattern_text = f" that match {warm_start.only}" if warm_start.only else ""
        raise UserError(
            f"{warm_start.source}: has no weights{pattern_text} of this model; it has "
            f"{', '.join(list(source)[:3])}, ..., and the model {', '.join(list(own)[:3])}, ..."
        )
    left = tuple(name for name in source if name not in taken)
    new = tuple(name for name in own if name not in chosen)
    merged = draw({name: own[name] for name in (*new, *shared)})
    for name in taken:
        value = source[name]
        if name in shared:
            axis, table = VOCABULARY_TABLES[name], gather_to_host(merged[name])
            if warm_start.words is not None:
                value = copy_scaled(table, value, shared[name], warm_start.source)
            else:
                value = _copy_rows(table, np.asarray(value), shared[name], axis)
        merged[name] = place(name, value, own[name])
    params = jax.tree.unflatten(jax.tree.structure(shapes), [merged[name] for name in own])
    resized = {name: len(rows) for name, rows in shared.items()}
    return params, WarmStartReport(tuple(taken), left, new, resized)


def chosen_names(warm_start: WarmStart, own: Mapping[str, Any]) -> set[str]:
    """Return the tree paths of the source's weights that are asked for and suit the model.

    The head of another task, or one with another number of labels, does not: the model has a new
    one. `own` are the parameters of the model, or their shapes, by tree path.
    """
    only = warm_start.only
    return {
        name
        for name, value in _named_arrays(warm_start).items()
        if (not only or matches_pattern(name, only))
        and not _is_foreign_head(name, value, own, warm_start)
    }


def _is_foreign_head(name: str, value: Any, own: Mapping[str, Any], warm_start: WarmStart) -> bool:
    if not name.startswith(HEAD_PREFIX) or name not in own:
        return False
    resized = name not in VOCABULARY_TABLES and value.shape != own[name].shape
    return warm_start.has_other_task or resized


def _shorten(names: tuple[str, ...], all_names: int = 4) -> str:
    hidden = len(names) - all_names
    return ", ".join(names[:all_names]) + (f" and {hidden} more" if hidden > 0 else "")


def copy_as(value: Any, like: Any) -> jax.Array:
    """Return a copy of an array with the dtype and sharding of another: the step donates it.

    Of a NumPy array each device gets its shard alone. Quantized weights become arrays.
    """
    value = merge_weight(value)
    if isinstance(value, jax.Array):
        return jax.device_put(jnp.array(value, like.dtype), like.sharding)
    # Copied, because a CPU device would use NumPy's memory, which the donation gives away.
    return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: np.array(value[index], like.dtype)
    )


def _named_arrays(warm_start: WarmStart) -> dict[str, Any]:
    """Return the arrays of the source by tree path: on the host, if they are no JAX arrays."""
    arrays: dict[str, Any] = {}
    leaves = jax.tree_util.tree_leaves_with_path(warm_start.params, is_leaf=stands_for_matrix)
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if stands_for_matrix(leaf):
            arrays[name] = leaf
            continue
        array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool):
            raise UserError(
                f"{warm_start.source}: {name} is of type {type(leaf).__name__}; give nested dicts "
                "of arrays, such as run.params"
            )
        if name in arrays:
            raise UserError(f"{warm_start.source}: {name} names two arrays; rename one of them")
        arrays[name] = array
    return arrays


def _other_tokens(name: str, warm_start: WarmStart, tokenizer: Tokenizer | None) -> bool:
    """Return True for a vocabulary table whose rows belong to another tokenizer's tokens."""
    if name not in VOCABULARY_TABLES:
        return False
    if tokenizer is None or warm_start.tokenizer is None:
        return warm_start.words is not None
    return tokenizer.digest != warm_start.tokenizer.digest


def _shared_rows(
    name: str, leaf: Any, value: Any, warm_start: WarmStart, tokenizer: Tokenizer | None
) -> list[tuple[int, int]]:
    """Return (row, row of the source) of the tokens that both vocabularies have.

    Raises UserError unless the arrays are tables of tokens that differ in their rows alone.
    """
    if warm_start.words is not None:
        check_width(warm_start.source, value, leaf)
        return rows_of_words(warm_start.words, warm_start.source, tokenizer)
    axis = VOCABULARY_TABLES.get(name)
    shapes = [list(array.shape) for array in (leaf, value)]
    if axis is not None and value.ndim == leaf.ndim:
        del shapes[0][axis], shapes[1][axis]
        if shapes[0] == shapes[1]:
            if tokenizer is None or warm_start.tokenizer is None:
                # Without tokenizers rows are compared by number.
                return [(i, i) for i in range(min(leaf.shape[axis], value.shape[axis]))]
            rows, old = tokenizer.vocabulary, warm_start.tokenizer.vocabulary
            return [(row, old[token]) for token, row in rows.items() if token in old]
    raise UserError(
        f"{warm_start.source}: {name} is {value.shape} there and {leaf.shape} in this model; take "
        "that run's model with --init-model, give its sizes, or leave the weight out with "
        "--init-only PATTERN"
    )


def _copy_rows(to: Any, source: Any, rows: list[tuple[int, int]], axis: int) -> Any:
    """Return a copy of `to` with rows of `source`."""
    table = np.moveaxis(to.copy(), axis, 0)
    rows_here, source_rows = np.array(rows, int).reshape(-1, 2).T
    table[rows_here] = np.moveaxis(source, axis, 0)[source_rows]
    return np.moveaxis(table, 0, axis)
