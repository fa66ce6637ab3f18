from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from transformer import Initialization
from transformer.layers.basic import declare_weight
from transformer.layers.logical_axes import (
    UNNAMED_AXIS,
    BoxedWeight,
    LogicalAxes,
    abstract_weights,
    box_weights,
    unbox_axes,
)

MATRIX = LogicalAxes(inputs=("heads", "head"), outputs=("embed",))


class Declares(nn.Module):
    @nn.compact
    def __call__(self) -> jax.Array:
        init = nn.initializers.constant(3)
        outputs = {"embed": 5, "mlp": 7}
        return declare_weight(
            self, "w", inputs={"heads": 2}, outputs=outputs, init=init, dtype="bfloat16"
        )


def test_weight_has_shape_axes_and_dtype() -> None:
    shapes, axes = abstract_weights(Declares().init, jax.random.key(0))
    assert (shapes["w"].shape, shapes["w"].dtype) == ((2, 5, 7), jnp.bfloat16)
    assert axes["w"] == LogicalAxes(inputs=("heads",), outputs=("embed", "mlp"))


@pytest.mark.parametrize(
    ("axes", "names", "is_matrix"),
    [
        (MATRIX, ("heads", "head", "embed"), True),
        (LogicalAxes(outputs=("embed",)), ("embed",), False),
        (LogicalAxes(stack=("layers",), outputs=("embed",)), ("layers", "embed"), False),
        (LogicalAxes(stack=("layers",), inputs=("embed",), outputs=("mlp",)), None, True),
    ],
    ids=["matrix", "bias", "stacked bias", "stacked matrix"],
)
def test_axis_names_and_is_matrix(
    axes: LogicalAxes, names: tuple[str, ...] | None, is_matrix: bool
) -> None:
    assert axes.is_matrix == is_matrix
    assert axes.names == (names or ("layers", "embed", "mlp"))


def test_flax_transforms_stack_and_unstack() -> None:
    params: dict[Any, Any] = {nn.PARTITION_NAME: "layers"}
    expert = LogicalAxes(("experts",), ("embed",), ("mlp",))
    box = BoxedWeight(np.zeros((2, 3, 5)), expert).add_axis(0, params)
    assert box.axes.stack == ("layers", "experts")
    assert box.remove_axis(0, params).axes == expert
    with pytest.raises(ValueError, match=r"first axis, not axis 1$"):
        box.add_axis(1, params)


@pytest.mark.parametrize(
    ("start", "residual_layers", "expected"),
    [
        (Initialization(), 0, 0.02),
        (Initialization(), 8, 0.02 / 4),
        (Initialization(depth_scaled=False), 8, 0.02),
        (Initialization(std=0.5), 0, 0.5),
        (Initialization(std=0.0), 0, 1 / 8),  # the fan-in is 4 * 16
        (Initialization(std=0.0), 2, 1 / 16),
    ],
)
def test_initial_standard_deviation_of_matrices(
    start: Initialization, residual_layers: int, expected: float
) -> None:
    init = start.matrix_initializer({"heads": 4, "head": 16}, num_residual_layers=residual_layers)
    drawn = np.asarray(init(jax.random.key(0), (4, 16, 513), jnp.float32))
    # The standard errors of 32,832 draws: 0.4% for the deviation, 0.6% of it for the mean.
    assert drawn.std() == pytest.approx(expected, rel=0.02)
    assert abs(drawn.mean()) < 0.02 * expected


def test_initial_standard_deviation_of_tables() -> None:
    init = Initialization(std=0.5, embedding_std=0.25).embedding_initializer()
    drawn = np.asarray(init(jax.random.key(0), (64, 513), jnp.float32))
    assert drawn.std() == pytest.approx(0.25, rel=0.02)


def test_unnamed_weights_get_default_axes() -> None:
    """For weights of Flax's own layers, the last axis is the output."""
    tree = {
        "kernel": np.zeros((2, 3, 5)),
        "bias": np.zeros(5),
        "scale": np.zeros(()),
        "other": nn.Partitioned(np.zeros((2, 5)), ("x", None)),
        "ours": BoxedWeight(np.zeros((2, 3, 5)), MATRIX),
    }
    name = UNNAMED_AXIS
    assert unbox_axes(tree) == {
        "kernel": LogicalAxes(inputs=(name, name), outputs=(name,)),
        "bias": LogicalAxes(outputs=(name,)),
        "scale": LogicalAxes(),
        "other": LogicalAxes(inputs=(name,), outputs=(name,)),
        "ours": MATRIX,
    }
    boxed = box_weights(tree)
    assert boxed["ours"] is tree["ours"]
    assert boxed["other"].value.shape == (2, 5)
