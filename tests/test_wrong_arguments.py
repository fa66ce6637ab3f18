"""Every public class and function, called with wrong values: the error names the argument."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import train
import transformer
from train.errors import UserError
from transformer import (
    AttentionConfig,
    BlockConfig,
    Classifier,
    EncoderConfig,
    EncoderDecoder,
    Hardware,
    LanguageModel,
    Mask,
    MaskedLanguageModel,
    RoPE,
    Tagger,
    TransformerConfig,
    generate,
)
from transformer.attention.attend import ScoreSpec, attend
from transformer.attention.rope import apply_rope
from transformer.generation.generate import decode_step, prefill
from transformer.generation.sampling import SamplingConfig
from transformer.generation.translate import translate
from transformer.models.base import Model

B, T, S, D, V = 2, 5, 7, 8, 11

WRONG_SETTINGS: tuple[Any, ...] = ("text", None, -1, 0.5, float("nan"), (), [1], 10**40, object())

OTHERS = (Model, Mask, train.Run, transformer.Mixer, transformer.MixerInputs)
"""Dataclasses that are not settings."""

CONFIGS = [
    found
    for module in (transformer, train)
    for name in module.__all__
    if isinstance(found := getattr(module, name), type)
    and dataclasses.is_dataclass(found)
    and not issubclass(found, OTHERS)
]


def wrong_settings() -> list[Any]:
    return [
        pytest.param(config, field.name, id=f"{config.__name__}-{field.name}")
        for config in CONFIGS
        for field in dataclasses.fields(config)
        if field.init
    ]


@pytest.mark.parametrize(("config", "field"), wrong_settings())
def test_a_wrong_setting_is_named(config: type[Any], field: str) -> None:
    """Or it is found later, by the model or the experiment that holds it."""
    for value in WRONG_SETTINGS:
        try:
            config(**{field: value})
        except (ValueError, UserError) as error:
            assert_names(error, field)


def assert_names(error: Exception, name: str) -> None:
    """Require a message of one line that names the argument, the problem and the remedy."""
    text = str(error)
    assert name.partition("_")[0] in text, text
    assert "\n" not in text
    assert ":" in text, text


MODEL = TransformerConfig(vocab_size=V, d_model=D, num_layers=1)
CROSS = dataclasses.replace(
    MODEL,
    layer_pattern=(BlockConfig(cross_attention=AttentionConfig()),),
    encoder=EncoderConfig(num_layers=1),
)
ENCODER = dataclasses.replace(MODEL, causal=False)
CPU = Hardware("cpu", "", 1)


def ints(*shape: int) -> Any:
    return np.zeros(shape, np.int32)


def floats(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def applied(model: Model, **arguments: Any) -> Any:
    """Trace a model; the first argument is positional."""
    params = jax.eval_shape(model.init_params, jax.random.key(0))
    return jax.eval_shape(lambda params: model.apply({"params": params}, **arguments), params)


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{
        type(model).__name__: (functools.partial(applied, model), dict(tokens=ints(B, T), **more))
        for model, more in (
            (LanguageModel(MODEL), dict(positions=None, segments=None)),
            (MaskedLanguageModel(ENCODER), dict(positions=None, segments=None)),
            (Classifier(ENCODER), dict(segments=None)),
            (Tagger(ENCODER), dict(segments=None)),
            (EncoderDecoder(CROSS), dict(source=ints(B, S), source_segments=None)),
        )
    },
    "generate": (
        functools.partial(generate, LanguageModel(MODEL), {}),
        dict(prompts=[[1]], max_new_tokens=1, sampling=SamplingConfig(), stop_token=1),
    ),
    "prefill": (
        functools.partial(prefill, LanguageModel(MODEL), {}),
        dict(tokens=ints(B, T), lengths=ints(B), cache_length=S),
    ),
    "decode_step": (
        functools.partial(decode_step, LanguageModel(MODEL), {}, ()),
        dict(tokens=ints(B), positions=ints(B)),
    ),
    "translate": (
        functools.partial(translate, EncoderDecoder(CROSS), {}),
        dict(sources=[[1]], start_token=1, stop_token=0, batch_size=1),
    ),
    "attend": (
        functools.partial(attend, mask=Mask(), score_spec=ScoreSpec(scale=1.0), hardware=CPU),
        dict(
            q=floats(B, T, 2, 4),
            k=floats(B, S, 2, 4),
            v=floats(B, S, 2, 4),
        ),
    ),
    "apply_rope": (
        functools.partial(apply_rope, config=RoPE()),
        dict(x=floats(B, T, 2, 4), positions=ints(1, T)),
    ),
}

WRONG_ARGUMENTS: dict[str, Any] = {
    "text": "text",
    "number": 0.5,
    "negative": -3,
    "scalar": np.float32(1),
    "floats": np.full((3, 9), 0.5, np.float32),
    "strings": np.array(["a", "b"]),
    "cube": np.zeros((3, 1, 2, 2), np.int32),
    "list": ["a"],
    "class": object(),
}


@pytest.mark.parametrize("value", WRONG_ARGUMENTS)
@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name, (_, arguments) in CALLS.items() for argument in arguments],
)
def test_a_wrong_argument_is_named(name: str, argument: str, value: str) -> None:
    call, arguments = CALLS[name]
    with pytest.raises((ValueError, TypeError)) as raised:
        call(**arguments | {argument: WRONG_ARGUMENTS[value]})
    text = str(raised.value)
    assert argument.rstrip("s").split("_")[0] in text, text
    assert "\n" not in text
