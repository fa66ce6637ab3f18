"""Models on meshes with explicit axes, the default of `jax.make_mesh` from jax 0.10 on."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer import AttentionConfig, BlockConfig, LanguageModel, RoPE, TransformerConfig

DEVICES = 2
BLOCK = BlockConfig(mixer=AttentionConfig(num_heads=2, position=RoPE(), dropout=0.5))
CONFIG = TransformerConfig(vocab_size=13, d_model=8, num_layers=2, layer_pattern=(BLOCK,))
MODEL = LanguageModel(CONFIG)
TOKENS = jnp.arange(12).reshape(4, 3)


def place(mesh: Mesh, x: Any, *axes: str | None) -> Any:
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Explicit,))


@pytest.fixture(scope="module")
def params() -> Any:
    return MODEL.init_params(jax.random.key(0))
