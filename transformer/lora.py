"""LoRA (Hu et al. 2021): which weights of a model get a low-rank update, and how they are trained.

A `LowRankWeight`, W + s A B, takes the place of a matrix in a parameter tree.

The parameters of a model fall into three parts. *Adapted* matrices keep their values W and get two
trainable factors, A and B. Weights *trained in full* are trained like those of any model: a new
head, say. All others are *frozen*. A training step differentiates with respect to the trainable
tree alone:

    layout = LoRALayout.create(model.logical_axes(), rank=8, targets=("query", "value"))
    trainable, frozen = layout.init(rng, params), layout.freeze(params)
    model.apply({"params": layout.combine(trainable, frozen)}, tokens)

The trainable tree has the paths of the parameters, with `lora_a` and `lora_b` below an adapted one:

    trainable["layers"]["place_0"]["mixer"]["query"]["lora_a"]  [L, D, rank]
    trainable["layers"]["place_0"]["mixer"]["query"]["lora_b"]  [L, rank, N, H]
"""

import dataclasses
import fnmatch
import math
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer.layers.logical_axes import LogicalAxes
from transformer.layers.low_rank import LowRankWeight
from transformer.validation import check_at_least, check_integer

RANK_AXIS = "lora_rank"
"""Logical axis between A and B. No mesh axis splits it."""

LATENT = ("query_latent", "latent", "rope_key")
"""Maps of latent attention from its input to latents and to the key of the positions."""

TARGET_GROUPS: Mapping[str, tuple[str, ...]] = {
    "attention": ("query", "key", "value", "output", *LATENT),
    "feed_forward": ("gate", "up", "down"),
    "all": ("query", "key", "value", "output", *LATENT, "gate", "up", "down"),
}
"""Groups of targets by name. Experts of a mixture of experts belong to `feed_forward`."""

FACTOR_A, FACTOR_B = "lora_a", "lora_b"
"""Names of the two factors in the trainable tree."""

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LoRALayout:
    """Partition of a model's parameters into frozen, adapted and fully trained ones."""

    axes: Mapping[Path, LogicalAxes]
    """Axes of all parameters of the model."""
    adapted: frozenset[Path]
    """Matrices with a low-rank update."""
    trained: frozenset[Path]
    """Parameters that are trained in full."""
    rank: int
    scale: float
    """Factor s of the update: alpha / rank."""

    @classmethod
    def create(
        cls,
        logical_axes: Mapping[str, Any],
        *,
        rank: int,
        alpha: float = 16.0,
        targets: Iterable[str] = ("query", "value"),
        trained: Iterable[str] = (),
    ) -> "LoRALayout":
        """Return the layout for a model.

        Args:
          logical_axes: `model.logical_axes()`.
          rank: Columns of A and rows of B.
          alpha: Numerator of the scale alpha / rank.
          targets: Names of matrices (`query`) or groups of them (`attention`).
          trained: Patterns of the tree paths of parameters to train in full, with `*` and `?` as in
            file names. A plain name takes all below it: `head`.

        Raises:
          ValueError: The model has no such matrix or parameter.
        """
        check_integer("rank", rank, 1)
        check_at_least("alpha", alpha, 0)
        for name, names in (("targets", targets), ("trained", trained)):
            if isinstance(names, str) or not all(isinstance(x, str) for x in names):
                raise ValueError(f"{name} of type {type(names).__name__}: give a list of strings")
        axes = flatten_dict(logical_axes)
        matrices = [path for path, x in axes.items() if is_adaptable(path, x)]
        names = _expand_targets(targets, set(map(matrix_name, matrices)))
        full = _select_trained(trained, axes)
        adapted = frozenset(path for path in matrices if matrix_name(path) in names) - full
        return cls(axes, adapted, full, rank, alpha / rank)

    def init(self, rng: jax.Array, params: Any) -> Any:
        """Return the trainable tree before the first step: B is 0, so the model is unchanged.

        Entries of A are uniform within 1 / sqrt(fan-in), as in PEFT. A and B are float32 whatever
        the dtype of the parameters: updates are smaller than the resolution of 16 bits.
        """
        flat, trainable = _flatten("params", params, self.adapted | self.trained), {}
        for path in sorted(self.adapted):
            shape, stack = flat[path].shape, len(self.axes[path].stack)
            outputs = stack + len(self.axes[path].inputs)  # the first axis of the outputs
            # Keyed by name, so that A does not depend on the other targets.
            key = jax.random.fold_in(rng, zlib.crc32("/".join(path).encode()))
            bound = 1 / math.sqrt(math.prod(shape[stack:outputs]))
            trainable[*path, FACTOR_A] = jax.random.uniform(
                key, (*shape[:outputs], self.rank), minval=-bound, maxval=bound
            )
            trainable[*path, FACTOR_B] = jnp.zeros((*shape[:stack], self.rank, *shape[outputs:]))
        trainable |= {path: flat[path] for path in sorted(self.trained)}
        return unflatten_dict(trainable)

    def freeze(self, params: Any) -> Any:
        """Return the parameters that are not trained, those with an update included."""
        flat = _flatten("params", params)
        return unflatten_dict({path: x for path, x in flat.items() if path not in self.trained})

    def replace_trained(self, trainable: Any, params: Any) -> Any:
        """Return the trainable tree with the fully trained parameters of `params`."""
        flat, source = _flatten("trainable", trainable), _flatten("params", params, self.trained)
        return unflatten_dict(flat | {path: source[path] for path in self.trained})

    def combine(self, trainable: Any, frozen: Any) -> Any:
        """Return parameters for `model.apply`: adapted matrices are of class `LowRankWeight`."""
        factors = _flatten("trainable", trainable, {(*path, FACTOR_A) for path in self.adapted})
        flat = _flatten("frozen", frozen, self.adapted)
        for path in self.adapted:
            a, b = factors.pop((*path, FACTOR_A)), factors.pop((*path, FACTOR_B))
            flat[path] = LowRankWeight(flat[path], a, b, self.scale)
        return unflatten_dict(flat | factors)

    def trainable_axes(self) -> Any:
        """Return the tree of `LogicalAxes` of the trainable tree."""
        flat = {path: self.axes[path] for path in self.trained}
        for path in self.adapted:
            a, b = self._factor_axes(path)
            flat |= {(*path, FACTOR_A): a, (*path, FACTOR_B): b}
        return unflatten_dict(dict(sorted(flat.items())))

    def frozen_axes(self) -> Any:
        """Return the tree of `LogicalAxes` of `freeze`."""
        return unflatten_dict({p: axes for p, axes in self.axes.items() if p not in self.trained})

    def _factor_axes(self, path: Path) -> tuple[LogicalAxes, LogicalAxes]:
        """Return the axes of A and B of an adapted matrix."""
        axes, rank = self.axes[path], (RANK_AXIS,)
        return (
            LogicalAxes(axes.stack, axes.inputs, rank),
            LogicalAxes(axes.stack, rank, axes.outputs),
        )


def _flatten(name: str, tree: Any, needed: Collection[Path] = ()) -> dict[Path, Any]:
    """Return the leaves of nested dicts by path. ValueError: it is no dict, or lacks one."""
    flat: dict[Path, Any] = flatten_dict(tree)
    missing = sorted(path for path in needed if path not in flat)
    if missing:
        raise ValueError(
            f"{name}: has no {'/'.join(missing[0])}; give that of the model that the layout is for"
        )
    return flat


def is_adaptable(path: Path, axes: LogicalAxes) -> bool:
    """Return True for the linear maps of layers that are applied to every token.

    Others with a known name, such as the output matrix over the vocabulary, are not in a layer.
    """
    return axes.is_matrix and "layers" in axes.stack and matrix_name(path) in TARGET_GROUPS["all"]


def matrix_name(path: Path) -> str:
    """Return the name of a matrix. Longformer's `query_global` is a query too."""
    return path[-1].removesuffix("_global")


def _expand_targets(targets: Iterable[str], known: set[str]) -> set[str]:
    """Return the names of the matrices that targets and groups stand for."""
    names: set[str] = set()
    for target in targets:
        members = [name for name in TARGET_GROUPS.get(target, (target,)) if name in known]
        if not members:
            ordered = [name for name in TARGET_GROUPS["all"] if name in known]
            raise ValueError(
                f"targets {target}: this model has no such matrix; give some of "
                f"{', '.join(ordered)}, or a group: {', '.join(TARGET_GROUPS)}"
            )
        names.update(members)
    return names


def _select_trained(patterns: Iterable[str], axes: Mapping[Path, LogicalAxes]) -> frozenset[Path]:
    """Return the parameters whose tree paths match a pattern."""
    selected: set[Path] = set()
    for pattern in patterns:
        matching = {path for path in axes if matches_pattern("/".join(path), pattern)}
        if not matching:
            raise ValueError(
                f"trained {pattern}: this model has no such parameter; give tree paths such as "
                f"{', '.join('/'.join(path) for path in sorted(axes)[:3])}"
            )
        selected |= matching
    return frozenset(selected)


def matches_pattern(name: str, pattern: str) -> bool:
    """Return True if a tree path matches a pattern, or lies below a path that does."""
    patterns = (pattern, f"{pattern.rstrip('/')}/*")
    return any(fnmatch.fnmatchcase(name, glob) for glob in patterns)
