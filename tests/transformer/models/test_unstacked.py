"""Weights and caches while decoding: no copies, and the same results in every layout."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import assert_trees_close
from tests.transformer.generation.decoders import (
    GPT,
    GREEDY,
    PROMPTS,
    make_decoder,
    read,
)
from transformer.generation import generate as generate_module
from transformer.generation.generate import (
    generate,
)
from transformer.models.language_model import LanguageModel
from transformer.models.unstacked import (
    UnstackedLayers,
    unstack_for_decoding,
    unstack_where_memory_allows,
)


@pytest.fixture(scope="module")
def gpt() -> tuple[LanguageModel, Any]:
    return make_decoder(GPT)


@pytest.fixture(scope="module")
def wide() -> tuple[LanguageModel, Any]:
    """At this width each layer's part begins at a multiple of 64 bytes: else JAX copies it."""
    return make_decoder(dataclasses.replace(GPT, d_model=80))


DEEP = dataclasses.replace(GPT, num_layers=8, d_model=40)


def layer_bytes(params: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))


def test_sampling_does_not_copy_weights(wide: tuple[LanguageModel, Any]) -> None:
    """On a CPU, the layers' weights are views of the stacks.

    Copies are looked for by shapes that no other test uses, not by the sum of live memory: another
    test of this process may have left a thread behind that still makes arrays.
    """
    model, params = wide
    leaves = jax.tree.leaves(params["layers"])
    places = [(leaf.unsafe_buffer_pointer(), leaf.nbytes) for leaf in leaves]
    shapes = {shape for leaf in leaves if leaf[0].ndim > 1 for shape in (leaf.shape, leaf[0].shape)}
    views, copies = 0, []

    def count_weights(new: Any) -> None:
        nonlocal views
        for array in jax.live_arrays():
            if array.shape not in shapes:
                continue
            if any(0 <= array.unsafe_buffer_pointer() - at < size for at, size in places):
                views += 1
            else:
                copies.append(array.shape)

    generate(model, params, [[5, 3]], max_new_tokens=9, on_tokens=count_weights)
    assert views > len(shapes)
    assert copies == []


def test_stacked_weights_are_sliced_layer_by_layer() -> None:
    """The program for stacked weights, used on accelerators, holds copies of a few of 8 layers at a
    time.
    """
    model, params = make_decoder(DEEP)
    tokens, lengths = np.ones((1, 2), np.int32), np.array([2], np.int32)
    seeds, stop = np.zeros((1, 3), np.uint32), np.int32(-1)
    arguments = (params, tokens, lengths, lengths, seeds, stop, GREEDY.values(1))
    begin = generate_module.start_rows.lower(*arguments, model=model, cache_length=41)
    start = functools.partial(generate_module.start_rows, model=model, cache_length=41)
    state = jax.eval_shape(start, *arguments)[0]
    count = np.int32(8)
    advance = generate_module.continue_rows.lower(params, state, stop, count, count, model=model)
    cache = sum(leaf.nbytes for leaf in jax.tree.leaves(model.init_cache(1, 41)))
    for lowered in (begin, advance):
        needed: Any = lowered.compile().memory_analysis()
        assert needed.temp_size_in_bytes < 2 * cache + layer_bytes(params) / 3


@pytest.mark.full
def test_stacked_and_unstacked_weights_agree(gpt: tuple[LanguageModel, Any]) -> None:
    model, params = gpt
    tokens, lengths = np.arange(10).reshape(2, 5), np.array([5, 3])
    expected = read(model, params, tokens, lengths, 8)
    for other in (unstack_for_decoding(params), unstack_where_memory_allows(params)):
        assert isinstance(other["layers"]["place_0"], UnstackedLayers)
        assert_trees_close(read(model, other, tokens, lengths, 8), expected)
    reported = generate(model, params, PROMPTS, max_new_tokens=5, seed=3)
    assert (
        generate(model, unstack_for_decoding(params), PROMPTS, max_new_tokens=5, seed=3) == reported
    )


def test_parameters_can_be_donated_after_sampling(wide: tuple[LanguageModel, Any]) -> None:
    """Otherwise each training step after a sample would hold two copies of the weights."""
    model, params = wide
    own = jax.tree.map(jax.numpy.array, jax.device_get(params))
    generate(model, own, [[5, 3]], max_new_tokens=2)
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2, tree), donate_argnums=0)
    before = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(own["layers"])}
    after = step(own)
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after["layers"])} == before
