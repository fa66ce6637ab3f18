from collections.abc import Sequence

import jax
import numpy as np

from tests.train.optim.support import Array, assert_like, by_layers, drawn, updated
from tests.train.optim.test_quantization import blocks
from tests.train.support import light_compiler as light_compiler
from train.optim.adamw_8bit import AdamW8bit
from train.optim.elementwise import AdamW
from transformer.layers.logical_axes import LogicalAxes

AXES = {
    "large": LogicalAxes(inputs=("vocab",), outputs=("embed",)),
    "stacked": LogicalAxes(("layers",), ("embed",), ("mlp",)),
    "odd": LogicalAxes(("layers",), ("embed",), ("heads", "head")),
    "small": LogicalAxes(("layers",), ("embed",), ("mlp",)),
    "gain": LogicalAxes(("layers",), (), ("embed",)),
}
SHAPES = {
    "large": (17, 256),
    "stacked": (2, 16, 256),  # 4,096 in a layer
    "odd": (2, 67, 3, 23),
    "small": (3, 31, 132),  # 4,092 in a layer
    "gain": (3, 31),
}
EIGHT = {"large", "stacked", "odd"}
CONFIG = AdamW8bit(beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.3)


def adamw(name: str, w: Array, grads: list[Array], rates: Sequence[float]) -> Array:
    """Compute Dettmers et al. 2022, section 2: a 32-bit step between 8-bit moments."""
    m = v = np.zeros(w.shape)
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        direction = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
        w = w - rate * (direction + (0 if name == "gain" else 0.3 * w))
        if name in EIGHT:
            m, v = blocks(m, 0, signed=True), blocks(v, 0, signed=False)
    return w


def test_adamw_8bit_matches_formula() -> None:
    params = drawn(0, SHAPES)
    actual = updated(CONFIG, params, AXES)
    assert_like(actual, by_layers(params, adamw, AXES))
    plain = updated(AdamW(beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.3), params, AXES)
    for name in SHAPES:
        difference = np.abs(np.asarray(actual[name]) - np.asarray(plain[name])).max()
        assert (difference > 1e-4) == (name in EIGHT), name


def test_state_size_is_two_bytes_per_parameter() -> None:
    state = jax.eval_shape(CONFIG.make(AXES).init, drawn(0, SHAPES))
    large, stacked, odd = 17 * 256, 2 * 16 * 256, 2 * 67 * 69
    scales = 17 + 2 * 16 + 2 * -(-67 * 69 // 256)
    small = 3 * 31 * 132 + 3 * 31
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) == (
        2 * (large + stacked + odd) + 2 * 4 * scales + 2 * 4 * small + 4
    )
