"""Record what the code computes, and compare it after a change that should compute the same.

    python -m bench.drills.recordings record FILE [--only WORD ...]
    python -m bench.drills.recordings compare FILE [--only WORD ...]

`record` writes a .npz file: for each case, arrays by name. `compare` computes the cases again with
the code as it is now, and prints what differs: equal bits are expected of moved code. Cases use
public names alone where there are some, so that they run before and after modules move. Weights are
drawn by tree path. Recordings are compared on the machine that made them.

| case | recorded |
| --- | --- |
| `model NAME` | logits, gradients of all weights, greedy tokens where it decodes |
| `import NAME` | logits of a folder in Hugging Face's format, digest of what is exported |
| `describe CONFIG` | the JSON object of `python -m train describe CONFIG` |
| `train NAME` | losses of 20 steps, and the weights after them |
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

import train
from tests.train.tasks.support import TINY
from train.config.experiment_files import list_experiments
from train.detector import RecoveryConfig
from train.optim.optimizer_registry import OPTIMIZERS
from train.optim.schedules import ScheduleConfig, Shape
from train.parallel.mesh import MeshConfig
from train.state import EmaConfig
from transformer import (
    MIXERS,
    AdditiveScore,
    ALiBi,
    AttentionConfig,
    BilinearScore,
    BlockConfig,
    Classifier,
    DotScore,
    EncoderConfig,
    EncoderDecoder,
    FeatureClassifier,
    FeedForwardConfig,
    LanguageModel,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    MaskedLanguageModel,
    Model,
    MoEConfig,
    NonAutoregressive,
    NormConfig,
    NTKScaling,
    Precision,
    RelativePositions,
    RoPE,
    SinusoidalPositions,
    SlidingWindowConfig,
    T5RelativeBias,
    Tagger,
    TransformerConfig,
    YaRNScaling,
    generate,
)
from transformer.generation.sampling import SamplingConfig
from transformer.interop.pretrained import read_model, write_model
from transformer.testing.mixer_under_test import default_config

FIXTURES = Path("tests/transformer/interop/fixtures")
V, T, S, B = 23, 37, 11, 2

BLOCK = BlockConfig(mixer=AttentionConfig(num_heads=4), feed_forward=FeedForwardConfig(20))
BASE = TransformerConfig(vocab_size=V, d_model=16, num_layers=2, layer_pattern=(BLOCK,))

Arrays = dict[str, np.ndarray]


def attention(**settings: Any) -> TransformerConfig:
    """Return the base model with other settings of attention."""
    return with_block(mixer=AttentionConfig(**{"num_heads": 4, **settings}))


def with_block(**settings: Any) -> TransformerConfig:
    """Return the base model with other settings of its layers."""
    return dataclasses.replace(BASE, layer_pattern=(dataclasses.replace(BLOCK, **settings),))


def with_model(**settings: Any) -> TransformerConfig:
    """Return the base model with other settings of its own."""
    return dataclasses.replace(BASE, **settings)


def encoder_decoder(**settings: Any) -> TransformerConfig:
    """Return an encoder-decoder whose decoder's layers have these settings."""
    decoder = dataclasses.replace(BLOCK, **settings)
    encoder = EncoderConfig(num_layers=1, layer_pattern=(BLOCK,))
    return with_model(layer_pattern=(decoder,), encoder=encoder)


def models() -> Iterator[tuple[str, Model]]:
    """Yield a model for each part of the library, with a name."""
    for kind in sorted(MIXERS):
        config: Any = default_config(kind)
        if hasattr(config, "num_heads"):
            config = dataclasses.replace(config, num_heads=4)
        abilities = MIXERS[kind].abilities(config)
        if config.reads_memory:
            yield f"mixer {kind}", EncoderDecoder(encoder_decoder(mixer=config))
            continue
        if abilities.causal:
            yield f"mixer {kind}", LanguageModel(with_block(mixer=config))
        yield (
            f"mixer {kind}, both directions",
            MaskedLanguageModel(dataclasses.replace(with_block(mixer=config), causal=False)),
        )
        if abilities.cross:
            cross = encoder_decoder(cross_attention=config)
            yield f"mixer {kind}, to a memory", EncoderDecoder(cross)
    language_models = {
        "score dot": attention(score=DotScore()),
        "score bilinear": attention(score=BilinearScore()),
        "score additive": attention(score=AdditiveScore(7)),
        "soft cap": attention(soft_cap=5.0),
        "sinks": attention(sinks=True),
        "window": with_block(mixer=SlidingWindowConfig(num_heads=4, window=5, dilation=2)),
        "grouped queries": attention(num_kv_heads=2, head_dim=6, value_head_dim=10),
        "query-key norm": attention(qk_norm=NormConfig("rms"), position=RoPE()),
        "RoPE": attention(position=RoPE()),
        "RoPE interleaved": attention(position=RoPE(layout="interleaved", fraction=0.5)),
        "RoPE linear": attention(position=RoPE(scaling=LinearScaling(2.0))),
        "RoPE NTK": attention(position=RoPE(scaling=NTKScaling(2.0))),
        "RoPE YaRN": attention(position=RoPE(scaling=YaRNScaling(2.0, 16))),
        "RoPE Llama 3": attention(
            position=RoPE(scaling=Llama3Scaling(8.0, original_max_length=16))
        ),
        "RoPE longrope": attention(
            position=RoPE(scaling=LongRoPEScaling((1.0, 1.5), (2.0, 3.0), 16))
        ),
        "ALiBi": attention(position=ALiBi()),
        "relative positions": attention(position=RelativePositions(5)),
        "T5 bias": attention(position=T5RelativeBias(8, 20)),
        "learned positions": with_model(position_embedding=LearnedPositions(64)),
        "sinusoidal positions": with_model(position_embedding=SinusoidalPositions()),
        "norm rms": with_block(norm=NormConfig("rms")),
        "norm rms_offset": with_block(norm=NormConfig("rms_offset")),
        "post-norm": dataclasses.replace(with_block(norm_placement="post"), final_norm=None),
        "sandwich norm": with_block(norm_placement="sandwich"),
        "parallel": with_block(norm_placement="parallel"),
        "mixture, dense": with_block(feed_forward=MoEConfig(4, 2, FeedForwardConfig(12))),
        "mixture, sorted": with_block(
            feed_forward=MoEConfig(4, 2, FeedForwardConfig(12), dispatcher="sorted")
        ),
        "clamped gate": with_block(
            feed_forward=FeedForwardConfig(20, activation="silu", gated=True, gate_clamp=1.0)
        ),
        "two kinds of layer": with_model(
            num_layers=5,
            layer_pattern=(
                BLOCK,
                dataclasses.replace(BLOCK, mixer=SlidingWindowConfig(num_heads=2, window=3)),
            ),
        ),
        "unrolled": with_model(layer_loop="unroll"),
        "remat dots": with_model(remat="dots"),
        "remat full": with_model(remat="full"),
        "separate output, capped": with_model(tie_embeddings=False, logit_soft_cap=3.0),
        "scaled embeddings": with_model(scale_embeddings=True, embedding_norm=NormConfig()),
        "bfloat16": with_model(precision=Precision.parse("bfloat16")),
        "float16": with_model(precision=Precision.parse("float16")),
    }
    for activation in ("relu", "gelu", "gelu_tanh", "silu", "swish", "learned_swish"):
        for gated in (False, True):
            feed_forward = FeedForwardConfig(20, activation=activation, gated=gated)
            name = f"activation {activation}{', gated' if gated else ''}"
            language_models[name] = with_block(feed_forward=feed_forward)
    for backend in ("reference", "query_blocks", "blockwise"):
        language_models[f"backend {backend}"] = attention(backend=backend)
        window = SlidingWindowConfig(num_heads=4, window=9, backend=backend)
        language_models[f"backend {backend}, window"] = with_block(mixer=window)
    for name, language_model in language_models.items():
        yield name, LanguageModel(language_model)
    both_ways = with_model(causal=False)
    yield "classifier", Classifier(dataclasses.replace(both_ways, pooler=True), num_classes=3)
    yield "classifier, mean", Classifier(both_ways, num_classes=3, pooling="mean")
    yield "tagger", Tagger(both_ways, num_classes=5)
    yield "features", FeatureClassifier(both_ways, num_features=3, num_classes=4)
    cross = encoder_decoder(cross_attention=AttentionConfig(num_heads=4))
    yield "encoder-decoder", EncoderDecoder(cross)
    yield "non-autoregressive", NonAutoregressive(dataclasses.replace(cross, causal=False))


def drawn_weights(model: Model) -> Any:
    """Return weights that depend on their tree paths and shapes alone."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), *model.example_inputs())["params"]

    def draw(path: tuple[str, ...], leaf: Any) -> Any:
        random = np.random.default_rng(zlib.crc32("/".join(path).encode()))
        return (0.05 + 0.2 * random.standard_normal(leaf.shape)).astype(leaf.dtype)

    leaves = flatten_dict(shapes)
    return unflatten_dict({path: draw(path, leaf) for path, leaf in leaves.items()})


def inputs_of(model: Model) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a forward pass: two packed documents and padding, or pairs of texts."""
    random = np.random.default_rng(3)
    if isinstance(model, FeatureClassifier):
        return (random.standard_normal((B, T, model.num_features)).astype(np.float32),), {}
    tokens = random.integers(0, V, (B, T)).astype(np.int32)
    source = random.integers(0, V, (B, S)).astype(np.int32)
    if model.config.encoder is not None:
        segments = np.repeat([[1, 0]], [S - 3, 3], axis=1).repeat(B, axis=0)
        return (source, tokens), {"source_segments": segments}
    segments = np.repeat([[1, 2, 0]], [19, T - 24, 5], axis=1).repeat(B, axis=0)
    return (tokens,), {"segments": segments}


def record_model(model: Model) -> Arrays:
    """Return outputs, gradients and greedily decoded tokens of a model."""
    params = drawn_weights(model)
    inputs, keywords = inputs_of(model)

    @jax.jit
    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        output: Any = model.apply({"params": params}, *inputs, **keywords)
        logits = output.logits.astype(np.float32)
        weights = np.random.default_rng(5).standard_normal(logits.shape).astype(np.float32)
        return (logits * weights).mean(), logits

    (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    found = {"logits": np.asarray(logits)}
    for path, leaf in flatten_dict(gradients).items():
        found[f"gradient {'/'.join(path)}"] = np.asarray(leaf.astype(np.float32))
    if isinstance(model, LanguageModel):
        output = generate(
            model,
            params,
            [[1, 2, 3], [4], list(range(9))],
            max_new_tokens=12,
            sampling=SamplingConfig(temperature=0.0),
        )
        found["greedy tokens"] = np.array([each[-12:] for each in output.tokens])
    return found


def record_import(folder: Path) -> Arrays:
    """Return the logits of a model in Hugging Face's format, and what is written of it."""
    pretrained, params = read_model(folder)
    model = pretrained.make_model()
    reference = np.load(folder / "reference.npz")
    names = ["tokens"] if pretrained.config.encoder is None else ["source", "tokens"]
    logits = jax.jit(model.apply)({"params": params}, *(reference[name] for name in names)).logits
    with tempfile.TemporaryDirectory() as written:
        write_model(written, model, params, family=pretrained.family.model_type)
        digest = hashlib.sha256()
        for file in sorted(Path(written).iterdir()):
            digest.update(file.name.encode() + file.read_bytes())
    return {"logits": np.asarray(logits), "exported": text_array(digest.hexdigest())}


def record_description(name: str) -> Arrays:
    """Return what `describe` prints of a config."""
    command = [sys.executable, "-m", "train", "describe", name, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    return {"json": text_array(done.stdout or done.stderr.splitlines()[-1])}


def trainings() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield a name, a task and changed settings for each short run."""
    for task in TINY:
        yield task, task, {}
    for precision in ("bfloat16", "float16"):
        yield precision, "language", {"precision": precision}
    yield "accumulation", "language", {"grad_accum_steps": 2}
    yield "averaged weights", "language", {"ema": EmaConfig(decay=0.9)}
    yield "with the detector", "language", {"recovery": RecoveryConfig(window=8, warmup=4)}
    for kind in sorted(OPTIMIZERS):
        yield f"optimizer {kind}", "language", {"optimizer": OPTIMIZERS[kind]()}
    for shape in get_args(Shape):
        schedule = ScheduleConfig(shape, learning_rate=1e-2, warmup_steps=4)
        yield f"schedule {shape}", "language", {"schedule": schedule}
    for axis in ("data", "fsdp", "tensor", "context"):
        sizes: dict[str, Any] = {"data": 1, axis: 2}
        yield f"mesh {axis}", "language", {"mesh": MeshConfig(**sizes)}
    yield "pmap", "language", {"compile": "pmap", "mesh": MeshConfig(data=2)}


def record_training(task: str, changed: dict[str, Any]) -> Arrays:
    """Return the losses of a short run, and its last weights."""
    changes: dict[str, Any] = {"recovery": RecoveryConfig(window=0), "mesh": MeshConfig(data=1)}
    changes |= changed
    devices = math.prod(
        getattr(changes["mesh"], axis) for axis in ("data", "fsdp", "tensor", "context", "expert")
    )
    with tempfile.TemporaryDirectory() as folder:
        experiment = TINY[task](Path(folder), steps=20, log_every=1)
        precision = changes.pop("precision", "")
        if precision:
            model = dataclasses.replace(experiment.model, precision=Precision.parse(precision))
            changes |= {"model": model}
        with mock.patch.object(jax, "device_count", return_value=devices):
            run = train.fit(
                dataclasses.replace(experiment, **changes), Path(folder, "run"), quiet=True
            )
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        losses = [each["loss"] for each in map(json.loads, lines) if "loss" in each]
        found = {"losses": np.array(losses)}
        for path, leaf in flatten_dict(jax.device_get(run.params)).items():
            found[f"weights {'/'.join(path)}"] = np.asarray(leaf, np.float32)
    return found


def text_array(text: str) -> np.ndarray:
    """Return a text as an array that .npz files hold."""
    return np.frombuffer(text.encode(), np.uint8)


def cases() -> Iterator[tuple[str, Callable[[], Arrays]]]:
    """Yield the name of each case, and the function that computes it."""
    for name, model in models():
        yield f"model {name}", functools.partial(record_model, model)
    for folder in sorted(FIXTURES.iterdir()):
        if (folder / "reference.npz").exists():
            yield f"import {folder.name}", functools.partial(record_import, folder)
    for name in list_experiments():
        yield f"describe {name}", functools.partial(record_description, name)
    for name, task, changes in trainings():
        yield f"train {name}", functools.partial(record_training, task, changes)


def compute(case: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of a case; one that raises is recorded as its error."""
    try:
        return case()
    except Exception as error:  # noqa: BLE001 (recorded too)
        return {"error": text_array(f"{type(error).__name__}: {error}")}


def difference(old: np.ndarray, new: np.ndarray) -> str:
    """Describe how an array differs from the recorded one; empty if its bits are equal."""
    if old.dtype == np.uint8 and new.dtype == np.uint8:  # texts
        return "" if np.array_equal(old, new) else f"is {new.tobytes().decode()[:200]}"
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"is {new.dtype}{list(new.shape)}, and was {old.dtype}{list(old.shape)}"
    if old.tobytes() == new.tobytes():
        return ""
    gap = np.nanmax(np.abs(old.astype(np.float64) - new), initial=0.0)
    return f"differs by {gap:.2g}, of at most {np.nanmax(np.abs(old), initial=0.0):.2g}"


def compare(recorded: Mapping[str, np.ndarray], name: str, found: Arrays) -> list[str]:
    """Return a line for each array of a case that is not as it was."""
    start = f"{name}/"
    old = {key.removeprefix(start): recorded[key] for key in recorded if key.startswith(start)}
    lines = []
    for key in sorted(old.keys() | found.keys()):
        if key not in old or key not in found:
            lines.append(f"{name}: {key} is {'new' if key not in old else 'gone'}")
        elif change := difference(old[key], found[key]):
            lines.append(f"{name}: {key} {change}")
    return lines


def main() -> int:
    """Record the cases, or compare them with a recording."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name has one of these")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    chosen = {name: case for name, case in cases() if any(word in name for word in options.only)}
    recorded = np.load(options.file) if options.action == "compare" else {}
    arrays: Arrays = {}
    changed = 0
    for name, case in chosen.items():
        found = compute(case)
        if options.action == "record":
            arrays |= {f"{name}/{key}": value for key, value in found.items()}
            if "error" in found:
                print(f"{name}: {found['error'].tobytes().decode()[:200]}", flush=True)
        else:
            lines = compare(recorded, name, found)
            changed += bool(lines)
            print("".join(f"{line}\n" for line in lines), end="", flush=True)
    if options.action == "record":
        np.savez(options.file, allow_pickle=False, **arrays)
        print(f"{len(chosen)} cases with {len(arrays):,} arrays recorded")
        return 0
    print(f"{len(chosen) - changed} of {len(chosen)} cases are as recorded")
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
