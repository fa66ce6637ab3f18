"""Costs of mixers: FLOPs by formula and as traced, sequential steps, path lengths, memory."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from rich.console import Console
from rich.table import Table

from transformer import (
    AttentionConfig,
    BlockConfig,
    ConvolutionConfig,
    ElmanConfig,
    FeedForwardConfig,
    Hardware,
    IdentityConfig,
    Initialization,
    LSTMConfig,
    Mask,
    MaskPattern,
    Precision,
)
from transformer.attention.mixer import MixerInputs
from transformer.model_context import ModelContext
from transformer.models.block import Block

TAPS, HEADS = 5, 8


@dataclasses.dataclass(frozen=True)
class Kind:
    """Mixer and its textbook formulas for n tokens of width d."""

    block: BlockConfig
    formula: str
    operations: Callable[[int, int], int]
    steps: str
    """Products that have to wait for one another."""
    path: str
    """Layers or steps between the first token and the last."""
    memory: str
    """Growth of the residuals of the backward pass, besides the weights."""
    cheaper: Callable[[int], float] | None = None
    """d -> the length from which it is cheaper than attention."""


def _alone(mixer: Any) -> BlockConfig:
    return BlockConfig(mixer=mixer, feed_forward=None, norm=None, residual=False)


_ATTENTION = AttentionConfig(num_heads=HEADS, backend="reference", bias=False)
_MLP = FeedForwardConfig(bias=False)

KINDS = {
    "Elman": Kind(
        _alone(ElmanConfig()),
        "4 n d²",
        lambda n, d: 4 * n * d**2,
        steps="n",
        path="n - 1",
        memory="n d",
        cheaper=lambda d: 1,
    ),
    "LSTM": Kind(
        _alone(LSTMConfig()),
        "16 n d²",
        lambda n, d: 16 * n * d**2,
        steps="n",
        path="n - 1",
        memory="n d",
        cheaper=lambda d: 2 * d,
    ),
    "convolution": Kind(
        _alone(ConvolutionConfig(kernel_size=TAPS)),
        "2 k n d²",
        lambda n, d: 2 * TAPS * n * d**2,
        steps="1",
        path="n / (k - 1)",
        memory="n d",
        cheaper=lambda d: max(1.0, (TAPS - 4) * d / 2),
    ),
    "bag": Kind(
        dataclasses.replace(_alone(IdentityConfig()), feed_forward=_MLP),
        "16 n d²",
        lambda n, d: 16 * n * d**2,
        steps="2",
        path="1, unordered",
        memory="n d",
        cheaper=lambda d: 2 * d,
    ),
    "attention": Kind(
        _alone(_ATTENTION),
        "8 n d² + 4 n² d",
        lambda n, d: 8 * n * d**2 + 4 * n**2 * d,
        steps="4",
        path="1",
        memory="n d + h n²",
    ),
    "transformer block": Kind(
        BlockConfig(mixer=_ATTENTION, feed_forward=_MLP),
        "24 n d² + 4 n² d",
        lambda n, d: 24 * n * d**2 + 4 * n**2 * d,
        steps="6",
        path="1",
        memory="n d + h n²",
    ),
}


def traced_operations(
    block: BlockConfig,
    width: int,  # d
    length: int,  # n
) -> int:
    """Return the FLOPs of all matmuls in the program for one sequence."""
    shared = ModelContext(width, 1, Precision(), Initialization(), Hardware())
    module, x = Block(block, shared, parent=None), jnp.zeros((1, length, width))
    inputs = MixerInputs(jnp.arange(length)[None, :], Mask(MaskPattern(causal=True)))
    params = jax.eval_shape(lambda: module.init(jax.random.key(0), x, inputs))

    def run(params: Any) -> Any:
        return module.apply(params, x, inputs)

    return products(jax.make_jaxpr(run)(params).jaxpr)


def products(jaxpr: Any) -> int:
    """Return the FLOPs of all matmuls in a program; loop bodies count once per iteration."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            summed = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * summed * math.prod(eqn.outvars[0].aval.shape)
        rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = jaxprs_in_params(eqn.params)
        total += rounds * sum(products(each) for each in inner)
    return total


def jaxprs_in_params(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    """Yield the programs within an equation's parameters, such as the body of a scan.

    `jax.extend.core` has a function of this name in jax 0.10, and not in 0.7.
    """
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each


def mixer_costs() -> None:
    """Count the FLOPs of mixers, by formula and in the traced program, for 512 tokens of width 512.

    FLOPs are those of matrix products, with a multiplication and an addition as two; those in a
    loop count once per iteration (the compiler's own count takes a loop's body once). For n tokens,
    width d, and a convolution of k taps. The bag is its MLP; its mean needs no product. The block
    is attention and an MLP. The cost O(n d^2) of attention excludes its scores: 4 n^2 d beside
    8 n d^2, so they are the larger part from n = 2 d on. The last column is the length from which
    a mixer is cheaper than attention.
    """
    width = length = 512
    columns = ("formula", "GFLOP", "traced", "steps", "path", "memory ~", "cheaper from n =")
    costs = Table("kind", *columns, title=f"{TAPS} taps, {HEADS} heads")
    for name, kind in KINDS.items():
        traced = traced_operations(kind.block, width, length)
        by_formula = kind.operations(length, width)
        gigaflops = (f"{each / 1e9:.3f}" for each in (by_formula, traced))
        since = "" if kind.cheaper is None else f"{math.floor(kind.cheaper(width)) + 1:,}"
        costs.add_row(name, kind.formula, *gigaflops, kind.steps, kind.path, kind.memory, since)
    Console(width=110).print(costs)
