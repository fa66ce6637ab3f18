"""Shape and dtype checks, and one of each function that makes them."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from transformer import (
    EncoderConfig,
    EncoderDecoder,
    Hardware,
    LanguageModel,
    Mask,
    MaskPattern,
    NonAutoregressive,
    Tagger,
    TransformerConfig,
    generate,
)
from transformer.attention.attend import attend
from transformer.attention.masks import dense_mask
from transformer.attention.reference import ScoreSpec
from transformer.baselines.nonautoregressive import length_loss, translate_nonautoregressive
from transformer.baselines.word_vectors import SkipGram
from transformer.chunked_cross_entropy import ChunkedCrossEntropy
from transformer.generation.beam_search import BeamSearchConfig, beam_search
from transformer.generation.generate import decode_step, prefill
from transformer.generation.translate import translate
from transformer.models.block import BlockConfig
from transformer.validation import check_shapes, check_token_ids

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

B, T, S, N, K, H, D, V = 2, 5, 7, 6, 3, 4, 8, 11


def ints(*shape: int, dtype: Any = np.int32) -> Any:
    return np.zeros(shape, dtype)


def floats(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


def test_axis_sizes_are_bound_by_the_first_array_or_a_number() -> None:
    check_shapes(tokens=(ints(B, T), "B T", int), positions=(ints(1, T), "B? T", int))
    check_shapes({"T": T}, positions=(ints(1, T), "B? T"), none=(None, "A B C | None", float))
    # A broadcast size of 1 does not bind an axis.
    check_shapes(one=(ints(1, T), "B? T"), all=(ints(B, T), "B? T"))
    check_shapes(half=(jax.ShapeDtypeStruct((B,), jax.numpy.bfloat16), "B", float))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"tokens": (ints(T), "B T")}, "tokens of shape (5,), int32: give [B, T], where B"),
        (
            {"tokens": (ints(B, T), "B T"), "types": (ints(3, T), "B? T")},
            "types of shape (3, 5), int32: give [B, T], where B = 2, T = 5",
        ),
        ({"ids": (ints(1, S), "B? T")}, "ids of shape (1, 7), int32: give [B, T], where T = 5"),
        (
            {"square": (ints(3, 2), "A A")},
            "square of shape (3, 2), int32: give [A, A], where A = 3",
        ),
        ({"tokens": ([[1, 2]], "B T", int)}, "tokens of type list: give an array [B, T]"),
        (
            {"tokens": (floats(B, T), "B T", int)},
            "tokens of shape (2, 5), float32: give [B, T] of i",
        ),
        ({"tokens": (ints(B, T, dtype=bool), "B T", int)}, "tokens of shape (2, 5), bool: give"),
        (
            {"hidden": (ints(B, T), "B T", float)},
            "hidden of shape (2, 5), int32: give [B, T] of fl",
        ),
        (
            {"allowed": (ints(B, T), "B T", bool)},
            "allowed of shape (2, 5), int32: give [B, T] of b",
        ),
    ],
)
def test_messages(arrays: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_shapes({"T": T}, **arrays)


def test_narrow_index_dtypes_raise() -> None:
    check_token_ids("tokens", ints(B, T, dtype=np.int16), V, 128)
    check_token_ids("tokens", ints(B, T, dtype=np.uint8), V, 128)
    with pytest.raises(ValueError, match=r"^tokens of dtype int8: cannot index 128 rows; give"):
        check_token_ids("tokens", ints(B, T, dtype=np.int8), V, 128)


def test_known_tokens_are_checked_while_tracing() -> None:
    tokens = jax.numpy.full((B, T), 11)
    with pytest.raises(ValueError, match=r"^tokens: 11 is not one of the model's 11; use the"):
        jax.eval_shape(lambda: check_token_ids("tokens", tokens, V))


def test_narrow_target_dtypes_raise() -> None:
    assert float(LOSS(**LOSS_INPUTS | {"targets": ints(B, T, dtype=np.int8)})) == 0


def test_checks_add_nothing_to_the_program() -> None:
    def checked(x: jax.Array) -> jax.Array:
        check_shapes(x=(x, "B T", float))
        return x

    assert not jax.make_jaxpr(checked)(floats(B, T)).eqns


CONFIG = TransformerConfig(vocab_size=V, d_model=D, num_layers=1, num_token_types=2)
CROSS = TransformerConfig(
    vocab_size=V,
    d_model=D,
    num_layers=1,
    layer_pattern=(BlockConfig(cross_attention=BlockConfig().mixer),),
    encoder=EncoderConfig(num_layers=1),
)
PARALLEL = TransformerConfig(**{**vars(CROSS), "causal": False})
TOKENS = ints(B, T)
LOSS = ChunkedCrossEntropy(V)
LOSS_INPUTS: Any = dict(
    hidden=floats(B, T, D), matrix=floats(D, 16), targets=ints(B, T), weights=floats(B, T)
)
BEAM: Any = dict(logits=floats(B, V), positions=ints(B), max_lengths=ints(B) + 1)


def call_model(model: Any, *inputs: Any, **given: Any) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0), *inputs, **given)


def call_attend(**changed: Any) -> Any:
    arrays: Any = dict(q=floats(B, T, N, H), k=floats(B, S, K, H), v=floats(B, S, K, 9))
    kwargs = arrays | dict(mask=Mask(), score_spec=ScoreSpec(scale=1.0)) | changed
    return attend(**kwargs, hardware=Hardware("cpu", "", 1))


def call_search(**changed: Any) -> Any:
    kwargs: Any = BEAM | dict(decode_step_fn=lambda *_: None, cache=(), max_new_tokens=3) | changed
    return beam_search(**kwargs, stop_token=1, config=BeamSearchConfig())


def call_translate(sources: Any, start: int = 1, **given: Any) -> Any:
    return translate(EncoderDecoder(CROSS), {}, sources, start_token=start, stop_token=0, **given)


MODEL = LanguageModel(CONFIG)

BOUNDARIES: list[tuple[Callable[[], Any], str]] = [
    (lambda: call_model(MODEL, ints(B, T, dtype=np.int8)), "tokens of dtype int8"),
    (
        lambda: call_model(MODEL, TOKENS, positions=floats(1, T)),
        "positions of shape (1, 5), float32",
    ),
    (lambda: call_model(Tagger(CONFIG), TOKENS, token_types=ints(B, S)), "token_types of shape"),
    (
        lambda: call_model(EncoderDecoder(CROSS), ints(B, S, dtype=np.int8), TOKENS),
        "source of dtype int8",
    ),
    (
        lambda: call_model(EncoderDecoder(CROSS), ints(B, S), floats(B, T)),
        "tokens of shape (2, 5), float",
    ),
    (
        lambda: call_model(EncoderDecoder(CROSS), None, TOKENS, memory=ints(B, S, D)),
        "memory of shape (2, 7, 8), int32",
    ),
    (
        lambda: call_model(NonAutoregressive(PARALLEL), ints(B, S), ints(3, T)),
        "tokens of shape (3, 5), int32: give [B, T] of int, where B = 2",
    ),
    (lambda: length_loss(floats(B, 3), ints(B, S), ints(3, T)), "target_segments of shape (3, 5)"),
    (lambda: call_model(SkipGram(V, D), ints(B), ints(B), ints(3, 4)), "negatives of shape (3, 4)"),
    (lambda: call_attend(k=floats(B, S, K, 5)), "k of shape (2, 7, 3, 5), float32: give"),
    (lambda: call_attend(v=floats(B, T, K, H)), "v of shape (2, 5, 3, 4), float32: give"),
    (lambda: call_attend(sink_logits=floats(K)), "sink_logits of shape (3,)"),
    (
        lambda: call_attend(mask=Mask(positions=ints(B, T), key_lengths=ints(3))),
        "key_lengths of shape (3,), int32: give [B] of int, where B = 2",
    ),
    (
        lambda: dense_mask(Mask(MaskPattern(causal=True), positions=ints(B, S)), T, S),
        "positions of shape (2, 7), int32: give [B, T] of int, where B = 2, T = 5",
    ),
    (lambda: dense_mask(Mask(allowed=ints(B, T, S)), T, S), "allowed of shape (2, 5, 7), int32"),
    (lambda: LOSS(**LOSS_INPUTS | {"weights": floats(B, S)}), "weights of shape (2, 7)"),
    (lambda: LOSS.accuracy(**LOSS_INPUTS | {"targets": ints(B, S)}), "targets of shape (2, 7)"),
    (lambda: call_search(positions=ints(B, 1)), "positions of shape (2, 1)"),
    (lambda: call_search(cache=({"sums": ints(3)},)), "cache[0]['sums'] of shape (3,)"),
    (lambda: prefill(MODEL, {}, TOKENS, ints(3), S), "lengths of shape (3,), int32"),
    (lambda: decode_step(MODEL, {}, (), ints(B, 1), ints(B)), "tokens of shape (2, 1)"),
    (
        lambda: generate(MODEL, {}, [[1], floats(3)], max_new_tokens=1),
        "prompt 1 of shape (3,), float32",
    ),
    (lambda: call_translate([[1], []]), "source 1: is empty"),
    (lambda: call_translate([[1, V]]), "source 0: 11 is not one of the model's 11"),
    (lambda: call_translate([[1]], start=-1), "start_token: -1 is not one of the model's 11"),
    (
        lambda: translate_nonautoregressive(NonAutoregressive(PARALLEL), {}, [[V]], stop=0),
        "source 0: 11 is not one of the model's 11",
    ),
]


@pytest.mark.parametrize(("call", "message"), BOUNDARIES, ids=range(len(BOUNDARIES)))
def test_public_boundaries(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()
