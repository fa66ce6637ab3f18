"""Published models have the published number of parameters; nothing of them is allocated."""

import math

import jax
import numpy as np
import pytest

from tests.fixtures.tiny import Sizes
from tests.transformer.huggingface import gpt2_config, llama_config
from transformer import LanguageModel, TransformerConfig


def gpt2(layers: int, width: int, heads: int) -> TransformerConfig:
    """Radford et al. 2019, table 2, with the heads of the published weights."""
    sizes = Sizes(
        vocab=50_257,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_width=64,
        hidden=4 * width,
        length=1024,
        epsilon=1e-5,
    )
    return gpt2_config(sizes)


def llama(vocab: int, kv_heads: int, hidden: int, rotary_base: float) -> TransformerConfig:
    """Touvron et al. 2023 and Grattafiori et al. 2024: 32 layers of width 4,096."""
    sizes = Sizes(
        vocab=vocab,
        width=4096,
        layers=32,
        heads=32,
        kv_heads=kv_heads,
        head_width=128,
        hidden=hidden,
        length=0,
        epsilon=1e-5,
        rotary_base=rotary_base,
    )
    return llama_config(sizes)


PUBLISHED = {
    "GPT-2 small": (gpt2(12, 768, 12), 124_439_808),
    "GPT-2 medium": (gpt2(24, 1024, 16), 354_823_168),
    "GPT-2 large": (gpt2(36, 1280, 20), 774_030_080),
    "GPT-2 XL": (gpt2(48, 1600, 25), 1_557_611_200),
    "Llama 2 7B": (llama(32_000, 32, 11_008, 10_000.0), 6_738_415_616),
    "Llama 3 8B": (llama(128_256, 8, 14_336, 500_000.0), 8_030_261_248),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name: str) -> None:
    config, published = PUBLISHED[name]
    tokens = np.zeros((1, 2), int)
    params = jax.eval_shape(LanguageModel(config).init, jax.random.key(0), tokens)["params"]
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == published
