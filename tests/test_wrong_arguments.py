"""Every public class and function, called with wrong values: the error names the argument."""

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import train
import transformer
from train.errors import UserError
from train.optim.optimizer_registry import OPTIMIZERS
from transformer import (
    AttentionConfig,
    BlockConfig,
    Classifier,
    EncoderConfig,
    EncoderDecoder,
    FeatureClassifier,
    Hardware,
    LanguageModel,
    Mask,
    MaskedLanguageModel,
    MaskPattern,
    ModelOutput,
    RoPE,
    Tagger,
    TransformerConfig,
    generate,
    register_mixer,
)
from transformer.attention.attend import ScoreSpec, attend
from transformer.attention.masks import dense_mask
from transformer.attention.rope import apply_rope
from transformer.attention_maps import attention_maps
from transformer.chunked_cross_entropy import ChunkedCrossEntropy
from transformer.flops import count_token_flops
from transformer.generation.beam_search import BeamSearchConfig, beam_search
from transformer.generation.generate import decode_step, prefill
from transformer.generation.log_likelihood import log_likelihoods
from transformer.generation.sampling import (
    SamplingConfig,
    sample_tokens,
)
from transformer.generation.translate import translate
from transformer.inspection import (
    add_vector,
    at_layers,
    layer_values,
    logit_lens,
    patch,
    zero_heads,
)
from transformer.interop.pretrained import read_config, read_model
from transformer.layers.stack_weights import unstack_for_decoding
from transformer.lora import LoRALayout
from transformer.losses import (
    auxiliary_losses,
    label_loss,
    next_token_loss,
    token_loss,
    weighted_loss,
)
from transformer.models.model import Model
from transformer.parameter_counts import cache_bytes, count_parameters
from transformer.testing import check_mixer

ROOT = Path(__file__).parents[1]

B, T, S, D, V = 2, 5, 7, 8, 11

WRONG_SETTINGS: tuple[Any, ...] = ("text", None, -1, 0.5, float("nan"), (), [1], 10**40, object())

OTHERS = (Model, Mask, train.Run, transformer.Mixer, transformer.MixerInputs)
"""Dataclasses that are not settings."""


def setting_classes(config: Any) -> set[type[Any]]:
    """Return the classes of a config and of all configs in it."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return set()
    values = [getattr(config, field.name) for field in dataclasses.fields(config)]
    return {type(config)}.union(*map(setting_classes, values))


PUBLIC = {
    found
    for module in (transformer, train)
    for name in module.__all__
    if isinstance(found := getattr(module, name), type)
    and dataclasses.is_dataclass(found)
    and not issubclass(found, OTHERS)
}
CONFIGS = sorted(
    PUBLIC | setting_classes(train.Experiment()) | {*OPTIMIZERS.values()},
    key=lambda config: config.__qualname__,
)
"""Settings of models and of everything in an experiment."""


def wrong_settings() -> list[Any]:
    return [
        pytest.param(config, field.name, id=f"{config.__name__}-{field.name}")
        for config in CONFIGS
        for field in dataclasses.fields(config)
        if field.init
    ]


@pytest.mark.parametrize(("config", "field"), wrong_settings())
def test_wrong_setting_is_named(config: type[Any], field: str) -> None:
    """The class itself may raise, or later the model or the experiment that contains it."""
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
DECODER = LanguageModel(MODEL)


def ints(*shape: int) -> Any:
    return np.zeros(shape, np.int32)


def floats(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


@functools.cache
def weights_of(model: Model) -> Any:
    """Return zeros in the shapes of a model's parameters, without compiling anything."""
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    return jax.tree.map(lambda leaf: floats(*leaf.shape), shapes)


def trace_model(model: Model, **arguments: Any) -> Any:
    """Trace a model."""
    return jax.eval_shape(lambda p: model.apply({"params": p}, **arguments), weights_of(model))


def trace_edited_model(make_edit: Callable[..., Any], **arguments: Any) -> Any:
    """Trace a one-layer model with an edit of its heads' outputs [B, T, D, 1]."""
    edits = {"head_outputs": make_edit(**arguments)}
    return trace_model(DECODER, tokens=ints(B, T), edits=edits)


def decode_nothing(cache: Any, tokens: jax.Array, positions: jax.Array) -> Any:
    return cache, floats(len(tokens), V)


BATCH = {"targets": ints(B, T), "weights": floats(B, T)}
TOKEN_BATCH = BATCH | {
    "tokens": ints(B, T),
    "positions": ints(1, T),
    "segments": np.ones((B, T), np.int32),
}
LAYOUT = LoRALayout.create(DECODER.logical_axes(), rank=1)
RESIDUAL = ModelOutput(None, floats(B, T, D), aux=({"residual_post": floats(1, B, T, D)},))
HEADS = {name: floats(B, n, 2, 4) for name, n in (("q", T), ("k", S), ("v", S))}
EXPERIMENT = train.Experiment("example", train.LanguageModeling(), MODEL, train.TextDataConfig())
RNGS = jax.random.split(jax.random.key(0), B)

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{
        type(model).__name__: (
            functools.partial(trace_model, model),
            dict(tokens=ints(B, T), **more),
        )
        for model, more in (
            (DECODER, dict(positions=None, segments=None, outputs=frozenset({"logits"}))),
            (MaskedLanguageModel(ENCODER), dict(positions=None, segments=None)),
            (Classifier(ENCODER), dict(segments=None)),
            (Tagger(ENCODER), dict(segments=None)),
            (EncoderDecoder(CROSS), dict(source=ints(B, S), source_segments=None)),
        )
    },
    "FeatureClassifier": (
        functools.partial(trace_model, FeatureClassifier(ENCODER)),
        dict(features=floats(B, T, 1), segments=None, adjacency=None),
    ),
    "generate": (
        generate,
        dict(
            model=DECODER,
            params={},
            prompts=[[1]],
            max_new_tokens=1,
            sampling=SamplingConfig(),
            seed=0,
            stop_token=1,
        ),
    ),
    "prefill": (
        prefill,
        dict(model=DECODER, params={}, tokens=ints(B, T), lengths=ints(B), cache_length=S),
    ),
    "decode_step": (
        functools.partial(decode_step, cache=()),
        dict(model=DECODER, params={}, tokens=ints(B), positions=ints(B)),
    ),
    "translate": (
        translate,
        dict(
            model=EncoderDecoder(CROSS),
            params={},
            sources=[[1]],
            start_token=1,
            stop_token=0,
            beam_search_config=BeamSearchConfig(),
            extra_length=1,
            length_factor=1.0,
            batch_size=1,
        ),
    ),
    "log_likelihoods": (
        log_likelihoods,
        dict(
            model=LanguageModel(DECODER.config),
            params={},
            sequences=[[1, 2]],
            context_lengths=[1],
            sources=None,
        ),
    ),
    "beam_search": (
        functools.partial(beam_search, decode_nothing),
        dict(
            cache=(),
            logits=floats(B, V),
            positions=ints(B),
            max_lengths=ints(B),
            stop_token=jax.numpy.int32(0),
            config=BeamSearchConfig(1),
            max_new_tokens=1,
        ),
    ),
    "sample_tokens": (
        sample_tokens,
        dict(logits=floats(B, V), rngs=RNGS, positions=ints(B), config=SamplingConfig()),
    ),
    "SamplingConfig": (SamplingConfig, dict(temperature=1.0, top_k=0, top_p=1.0)),
    "BeamSearchConfig": (BeamSearchConfig, dict(num_beams=1, length_penalty=0.5)),
    "attend": (
        attend,
        dict(
            **HEADS,
            mask=Mask(),
            score_spec=ScoreSpec(scale=1.0),
            sink_logits=None,
            backend="auto",
            hardware=CPU,
            outputs=frozenset(),
        ),
    ),
    "dense_mask": (dense_mask, dict(mask=Mask(), num_queries=T, num_keys=S)),
    "MaskPattern": (
        MaskPattern,
        dict(causal=False, window=1, dilation=1, prefix=False, ordered=True),
    ),
    "apply_rope": (
        apply_rope,
        dict(x=floats(B, T, 2, 4), positions=ints(1, T), config=RoPE()),
    ),
    "init_cache": (DECODER.init_cache, dict(batch_size=B, length=T)),
    "layer_values": (layer_values, dict(output=RESIDUAL, name="residual_post")),
    "at_layers": (
        functools.partial(trace_edited_model, at_layers),
        dict(layers=[0], edit=lambda x: x),
    ),
    "zero_heads": (functools.partial(trace_edited_model, zero_heads), dict(layer=0, heads=[0])),
    "add_vector": (
        functools.partial(trace_edited_model, add_vector),
        dict(layer=0, vector=floats(D, 1)),
    ),
    "patch": (
        functools.partial(trace_edited_model, patch),
        dict(layer=0, source=floats(B, T, D, 1), positions=None),
    ),
    "logit_lens": (
        logit_lens,
        dict(model=DECODER, params=weights_of(DECODER), hidden=floats(B, T, D)),
    ),
    "attention_maps": (
        attention_maps,
        dict(model=DECODER, params=weights_of(DECODER), tokens=ints(B, T)),
    ),
    "weighted_loss": (weighted_loss, dict(values=floats(B), weights=floats(B))),
    "token_loss": (
        token_loss,
        dict(
            model=DECODER,
            params=weights_of(DECODER),
            hidden=floats(B, T, D),
            batch=BATCH,
            bias=None,
            label_smoothing=0.0,
        ),
    ),
    "next_token_loss": (
        next_token_loss,
        dict(model=DECODER, params=weights_of(DECODER), batch=TOKEN_BATCH, dropout_rngs=None),
    ),
    "unstack_for_decoding": (unstack_for_decoding, dict(params=weights_of(DECODER))),
    "LoRALayout.init": (
        functools.partial(LAYOUT.init, jax.random.key(0)),
        dict(params=weights_of(DECODER)),
    ),
    "LoRALayout.freeze": (LAYOUT.freeze, dict(params=weights_of(DECODER))),
    "LoRALayout.combine": (
        LAYOUT.combine,
        dict(
            trainable=jax.eval_shape(LAYOUT.init, jax.random.key(0), weights_of(DECODER)),
            frozen=weights_of(DECODER),
        ),
    ),
    "read_config": (read_config, dict(folder="nowhere")),
    "read_model": (read_model, dict(folder="nowhere", precision=None)),
    "label_loss": (label_loss, dict(model=DECODER, logits=floats(B, T, 3), batch=BATCH)),
    "auxiliary_losses": (auxiliary_losses, dict(aux=(), weight=floats())),
    "ChunkedCrossEntropy": (
        ChunkedCrossEntropy(vocab_size=V),
        dict(
            hidden=floats(B, T, D),
            matrix=floats(D, V),
            targets=ints(B, T),
            weights=floats(B, T),
            bias=None,
        ),
    ),
    "LoRALayout.create": (
        LoRALayout.create,
        dict(
            logical_axes=DECODER.logical_axes(),
            rank=2,
            alpha=1.0,
            targets=("query",),
            trained=(),
        ),
    ),
    "count_parameters": (count_parameters, dict(model=DECODER)),
    "count_token_flops": (count_token_flops, dict(model=DECODER, length=T)),
    "cache_bytes": (cache_bytes, dict(model=DECODER, length=T)),
    "check_mixer": (check_mixer, dict(mixer="full", d_model=D, hardware=CPU)),
    "register_mixer": (register_mixer, dict(mixer=None)),
    "register_task": (train.register_task, dict(config=None)),
    "register_dataset": (train.register_dataset, dict(dataset=None)),
    "register_optimizer": (train.register_optimizer, dict(optimizer=None)),
    "register_schedule": (train.register_schedule, dict(schedule=None)),
    "fit": (
        train.fit,
        dict(experiment=EXPERIMENT, workdir="", params=None, init_from="", init_only=""),
    ),
    "load": (train.load, dict(workdir="nowhere", step=None, average_checkpoints=None)),
}
"""Public functions with valid arguments."""

NOT_CALLED = {
    "apply_layers": "part of a user-defined model: called inside its scope",
    "find_experiment": "takes the name of a config, see tests/train/config",
    "project_output": "part of a user-defined mixer: called inside its scope",
    "project_qkv": "part of a user-defined mixer: called inside its scope",
    "reject_mask_patterns": "takes the inputs of a mixer",
    "reject_memory": "takes the inputs of a mixer",
    "reject_weights": "takes the inputs of a mixer",
    "run_sweep": "takes a sweep from the command line",
    "sample": "takes a run, see tests/train/test_run.py",
    "show_stages": "takes no argument of a user",
    "train_tokenizer": "takes settings and texts, see tests/train/data",
    "train_word_vectors": "takes the tokens of a corpus, see tests/bench/test_word_vectors.py",
    "write_model": "takes a folder, see tests/transformer/interop",
    "view_attention": "takes a run, see tests/train/visualization",
    "write_word_vectors": "takes a table of vectors, see tests/bench/test_word_vectors.py",
}
"""Public functions that are not called here, with the reason."""


def documented_names() -> set[tuple[str, str]]:
    """Return (module, name) of what the guides and the examples import from the two packages."""
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py")]
    text = "\n".join(file.read_text() for file in files)
    pattern = r"^ *from ((?:transformer|train)[\w.]*) import (\([^)]*\)|.*)$"
    actual = re.findall(pattern, text, re.MULTILINE)
    public = {(module.__name__, name) for module in (transformer, train) for name in dir(module)}
    return public | {(module, n) for module, names in actual for n in re.findall(r"\w+", names)}


def test_every_documented_function_is_called() -> None:
    result = {
        name: getattr(importlib.import_module(module), name) for module, name in documented_names()
    }
    functions = {name for name, each in result.items() if inspect.isfunction(each)}
    assert functions <= CALLS.keys() | NOT_CALLED.keys()
    assert not CALLS.keys() & NOT_CALLED.keys()


NEED_MORE = ("prefill", "decode_step", "translate", "generate", "log_", "fit", "load", "read")
"""Functions whose arguments are valid only with weights or a folder."""


@pytest.mark.parametrize("name", [n for n in CALLS if not n.startswith(("register", *NEED_MORE))])
def test_valid_arguments_are_accepted(name: str) -> None:
    call, arguments = CALLS[name]
    if name not in ("attention_maps", "check_mixer"):  # functions that inspect values
        jax.eval_shape(lambda: (call(**arguments), 0)[1])


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (LanguageModel, "config"),
        (LanguageModel, "hardware"),
        (Classifier, "num_classes"),
        (Classifier, "head_dropout"),
        (Tagger, "num_classes"),
        (FeatureClassifier, "num_features"),
        (EncoderDecoder, "config"),
    ],
)
def test_wrong_field_of_a_model_is_named(model: type[Any], field: str) -> None:
    for value in ("cpu", None, -1, object()):
        with pytest.raises(ValueError, match=f"^{field} ") as raised:
            model(**{"config": ENCODER, field: value})
        assert_names(raised.value, field)


@pytest.mark.parametrize("name", TOKEN_BATCH)
def test_array_that_a_batch_lacks_is_named(name: str) -> None:
    batch = {key: value for key, value in TOKEN_BATCH.items() if key != name}
    with pytest.raises(ValueError, match=f"^{name} of type NoneType: is not an array; give one"):
        next_token_loss(DECODER, weights_of(DECODER), batch)


WRONG_ARGUMENTS: dict[str, Any] = {
    "text": "text",
    "number": 0.5,
    "negative": -3,
    "scalar": np.float32(1),
    "floats": np.full((3, 9), 0.5, np.float32),
    "strings": np.array(["a", "b", "c"]),
    "cube": np.zeros((3, 1, 2, 2), np.int32),
    "list": ["a"],
    "class": object(),
    "none": None,
}

SYNONYMS = {("register_task", "config"): "task"}
"""Words by which a message names an argument, if not by its own name."""

VALID = {
    ("SamplingConfig", "temperature"): "number",
    ("SamplingConfig", "top_p"): "number",
    ("BeamSearchConfig", "length_penalty"): "number",
    ("EncoderDecoder", "source"): "none",  # with a memory or a cache
    ("EncoderDecoder", "tokens"): "none",  # the encoder alone
    ("LoRALayout.create", "alpha"): "number",
    ("add_vector", "vector"): "number negative scalar",  # broadcast
    ("auxiliary_losses", "weight"): "scalar",
    ("beam_search", "stop_token"): "negative",  # none
    ("fit", "init_from"): "text",
    ("fit", "init_only"): "text",
    ("fit", "workdir"): "text",
    ("generate", "stop_token"): "none",
    ("log_likelihoods", "context_lengths"): "none",
    ("fit", "experiment"): "text",  # rejected as the name of a config
    ("load", "average_checkpoints"): "negative",  # rejected by the run
    ("load", "step"): "negative",
    ("token_loss", "label_smoothing"): "number",
    ("translate", "length_factor"): "number scalar",
}
"""Wrong arguments that are right for some parameters."""


@pytest.mark.parametrize("value", WRONG_ARGUMENTS)
@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name, (_, arguments) in CALLS.items() for argument in arguments],
)
def test_wrong_argument_is_named(name: str, argument: str, value: str) -> None:
    call, arguments = CALLS[name]
    is_default = value == "none" and arguments[argument] is None and not name.startswith("register")
    if is_default or value in VALID.get((name, argument), "").split():
        pytest.skip("a valid argument")
    with pytest.raises((ValueError, TypeError, UserError)) as raised:
        call(**arguments | {argument: WRONG_ARGUMENTS[value]})
    text = str(raised.value)
    assert SYNONYMS.get((name, argument), argument.rstrip("s").split("_")[0]) in text, text
    assert "\n" not in text
