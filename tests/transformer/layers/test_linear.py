from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

from tests.transformer.formulas import assert_close, normal, random_params_like
from transformer import Hardware, Initialization, Precision
from transformer.layers.basic import apply_linear, apply_matrix
from transformer.layers.logical_axes import LogicalAxes, abstract_weights
from transformer.model_context import ModelContext


@pytest.mark.parametrize("flatten", [True, False])
def test_contraction_over_one_or_more_axes(flatten: bool) -> None:
    x, matrix = normal(0, 2, 3, 5, 7), normal(1, 7, 11, 13)
    expected = np.einsum("BTNH,HXY->BTNXY", x, matrix)
    assert_close(apply_matrix(x, matrix, 1, flatten), expected)
    x, matrix = normal(0, 2, 3, 5, 7), normal(1, 5, 7, 11)
    assert_close(apply_matrix(x, matrix, 2, flatten), np.einsum("BTNH,NHX->BTX", x, matrix))


class Map(nn.Module):
    shared: ModelContext
    bias: bool
    residual: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, 5] -> [B, T, 2, 3]
        outputs = {"heads": 2, "head": 3}
        return apply_linear(
            self,
            "w",
            x,
            {"embed": 5},
            outputs,
            self.shared,
            bias=self.bias,
            residual=self.residual,
        )


def make_module(start: Initialization, platform: Any = "cpu", **fields: Any) -> Map:
    return Map(ModelContext(5, 8, Precision(), start, Hardware(platform)), **fields)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_map(bias: bool, platform: str) -> None:
    module, x = make_module(Initialization(), platform, bias=bias), normal(0, 2, 7, 5)
    shapes, declared = abstract_weights(module.init, jax.random.key(0), x)
    axes = {"w": LogicalAxes(inputs=("embed",), outputs=("heads", "head"))}
    if bias:
        axes["w_bias"] = LogicalAxes(outputs=("heads", "head"))
    assert declared == axes
    params = random_params_like(shapes)
    expected = np.einsum("BTD,DNH->BTNH", x, params["w"]) + params.get("w_bias", 0)
    assert_close(jax.jit(module.apply)({"params": params}, x), expected)


def test_residual_projections_start_smaller() -> None:
    plain, residual = (
        make_module(Initialization(std=0.5), bias=True, residual=residual)
        for residual in (False, True)
    )
    x = normal(0, 1, 1, 5)
    draw = jax.jit(lambda key: [nn.meta.unbox(each.init(key, x)) for each in (plain, residual)])
    one, other = (drawn["params"] for drawn in draw(jax.random.key(0)))
    assert_close(other["w"], one["w"] / 4, 1e-7)  # sqrt(2 * 8 layers)
    assert np.abs(one["w"]).max() > 0.5
    assert not np.any(other["w_bias"])
