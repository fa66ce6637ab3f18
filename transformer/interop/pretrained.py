"""Read a Hugging Face folder into a model, and write a model as such a folder.

    config, params = read_model("folder")
    write_model("folder", model, params)

Weights are read lazily: each slice of each parameter comes straight from the mapped files, so a
sharded model needs no more host memory than the shards of this process.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer.hardware import Hardware
from transformer.interop.compare import find_difference
from transformer.interop.config_fields import CONFIG_FIELDS
from transformer.interop.family import Architecture, Family
from transformer.interop.family_registry import FAMILIES, find_architecture
from transformer.interop.fields import Fields, InteropError, is_kept
from transformer.interop.model_tensors import (
    arrays_by_path,
    group_by_name,
    join_tensor,
    model_leaves,
    model_tensors,
)
from transformer.interop.safetensors_file import (
    WEIGHT_DTYPES,
    TensorSpec,
    split_into_shards,
    write_safetensors,
)
from transformer.interop.strided_copy import Array
from transformer.interop.weight_files import (
    INDEX,
    WEIGHTS,
    WeightFiles,
    places_by_leaf,
    read_json,
    read_slice,
)
from transformer.interop.weight_map import Leaf
from transformer.models.config import TransformerConfig
from transformer.models.model import Model
from transformer.precision import Precision

CONFIG = "config.json"

MAX_SHARD_BYTES = 5_000_000_000
"""Default size above which weights are split into several files, as in `transformers`."""


class PretrainedConfig(NamedTuple):
    """Config of a folder: the model, and what the files say about it."""

    config: TransformerConfig
    family: Family
    architecture: Architecture
    fields: dict[str, Any]
    """The whole config.json."""
    other_head: str = ""
    """Class of the files, where it has another head than the architecture that it is read as."""
    notes: tuple[str, ...] = ()
    """What was left out of the files, a line each."""

    def make_model(self, hardware: Hardware | None = None) -> Model:
        """Return the model of this config."""
        return make_model(self.architecture, self.config, self.num_classes, hardware)

    @property
    def num_classes(self) -> int:
        """Number of labels of a classifier or tagger."""
        labels, number = self.fields.get("id2label"), self.fields.get("num_labels")
        if isinstance(labels, dict) and labels:
            return len(labels)
        return number if isinstance(number, int) and number > 0 else 2

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels of a classifier or tagger."""
        if self.architecture.kind not in ("classifier", "tagger"):
            return ()
        names = self.fields.get("id2label") or {}
        return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(self.num_classes))


def make_model(
    architecture: Architecture,
    config: TransformerConfig,
    num_classes: int = 2,
    hardware: Hardware | None = None,
) -> Model:
    """Return the model of an architecture."""
    from transformer.models.encoder_decoder import EncoderDecoder
    from transformer.models.heads import Classifier, Tagger
    from transformer.models.language_model import LanguageModel
    from transformer.models.masked_lm import MaskedLanguageModel

    hardware = hardware or Hardware()
    match architecture.kind:
        case "language_model":
            return LanguageModel(config, hardware)
        case "masked_lm":
            return MaskedLanguageModel(config, hardware)
        case "classifier":
            return Classifier(config, hardware, num_classes=num_classes)
        case "tagger":
            return Tagger(config, hardware, num_classes=num_classes)
    return EncoderDecoder(config, hardware)


def read_config(folder: str | Path, precision: Precision | None = None) -> PretrainedConfig:
    """Read the config of a folder.

    Raises:
      InteropError: There is none, it is damaged, or it has a field whose value is not supported.
    """
    path = Path(folder) / CONFIG
    values = read_json(path)
    source = str(path)
    family, architecture, other_head = find_architecture(
        values.get("model_type"), values.get("architectures"), source
    )
    for name in ("quantization_config", "compression_config"):
        if packed := values.get(name):
            method = packed.get("quant_method", "") if isinstance(packed, dict) else packed
            raise InteropError(
                f"{source}: {name} {method}: packed weights are not supported; where transformers "
                "is installed, load the model unpacked (gpt-oss: quantization_config="
                "Mxfp4Config(dequantize=True)), and save_pretrained it in bfloat16"
            )
    fields = Fields(values, source, family.model_type)
    try:
        config = family.read_config(fields)
    except InteropError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        text = " ".join(str(error).split())
        raise InteropError(f"{source}: {text}; restore the original file") from error
    config = dataclasses.replace(
        config, precision=precision or Precision(), pooler=architecture.pooler
    )
    notes = _field_notes(fields.unknown(), family.model_type)
    return PretrainedConfig(config, family, architecture, values, other_head, notes)


def _field_notes(unknown: list[str], model_type: str) -> tuple[str, ...]:
    if not unknown:
        return ()
    note = f"config.json has fields that no code of {model_type} reads: {', '.join(unknown)}"
    if "auto_map" in unknown:
        note += f"; own code (auto_map) is not run, and the weights are read as plain {model_type}"
    return (note,)


def read_model(
    folder: str | Path,
    *,
    precision: Precision | None = None,
    shardings: Callable[[Model], Any] | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> tuple[PretrainedConfig, Any]:
    """Read a folder: its config, and the parameters of its model.

    Args:
      folder: Folder with config.json and safetensors files.
      precision: Precision policy of the model; default float32. Weights of any dtype are cast to
        that of the policy's parameters.
      shardings: Function from the model to a tree of shardings, one for each parameter. Every
        device gets its own slice. Default: the first local device.
      on_progress: Called after each parameter with the fraction of all weights that it is.

    Raises:
      InteropError: A file is missing or damaged, or a tensor is missing, left over or of another
        shape than the config says.
    """
    pretrained = read_config(folder, precision)
    family, architecture = pretrained.family, pretrained.architecture
    files = WeightFiles.open(Path(folder), family)
    config = files.tie((*family.weights, *architecture.head), pretrained.config)
    pretrained = pretrained._replace(config=config)
    model = pretrained.make_model()
    leaves = model_leaves(model)
    tensors = model_tensors(family, architecture, model, leaves)
    initial: dict[str, jax.Array] = {}
    if pretrained.other_head:
        tensors, left_out = files.split_heads(tensors, family)
        read_paths = {leaf.path for tensor in tensors for leaf in tensor.leaves}
        new = [path for path in leaves if path not in read_paths]
        initial = _draw(model, new)
        note = _head_note(pretrained, new, left_out)
        pretrained = pretrained._replace(notes=(*pretrained.notes, note))
    files.check(tensors, family)
    dtype = np.dtype(jnp.dtype(model.config.precision.parameters))
    by_leaf = places_by_leaf(tensors)
    sharding_of = None if shardings is None else arrays_by_path(shardings(model))
    num_weights = sum(math.prod(leaf.padded_shape) for leaf in leaves.values())

    def load(leaf: Leaf) -> jax.Array:
        def read(index: Any) -> Array:  # a slice for each axis
            return read_slice(files, by_leaf[leaf.path], leaf, index, dtype)

        if leaf.path in initial:
            drawn = initial[leaf.path]
            sharding = None if sharding_of is None else sharding_of[leaf.path]
            loaded = jax.device_put(drawn, sharding)
        elif sharding_of is None:
            loaded = jax.device_put(read(tuple(map(slice, leaf.padded_shape))))
        else:
            loaded = jax.make_array_from_callback(leaf.padded_shape, sharding_of[leaf.path], read)
        jax.block_until_ready(loaded)  # before the next one takes memory
        files.release()
        if on_progress is not None:
            on_progress(loaded.size / num_weights)
        return loaded

    return pretrained, _nest({path: load(leaf) for path, leaf in leaves.items()})


def _draw(model: Model, paths: list[str]) -> dict[str, jax.Array]:
    """Return initial values of some parameters."""

    def init() -> dict[str, jax.Array]:
        own = arrays_by_path(model.init_params(jax.random.key(0)))
        return {path: own[path] for path in paths}

    return jax.jit(init)() if paths else {}


def _head_note(pretrained: PretrainedConfig, new: list[str], left_out: list[str]) -> str:
    """Return the note about a class with another head."""
    note = f"{pretrained.other_head} is read as {pretrained.architecture.name}"
    if left_out:
        note += f"; without {', '.join(left_out)}"
    if new:
        note += f"; not in the files, and drawn at random: {', '.join(new)}"
    return note


def write_model(
    folder: str | Path,
    model: Model,
    params: Any,
    *,
    family: str = "",
    dtype: str = "",
    fields: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: Callable[[float], None] | None = None,
) -> Family:
    """Write config.json and the weights of a model, so that `transformers` reads them.

    Args:
      folder: Existing folder.
      model: The model.
      params: Its parameters.
      family: `model_type` to write; default: the first family that can express the model.
      dtype: Dtype of the weights; default: that of the parameters.
      fields: Further fields of config.json (token ids, label names). Fields that the model decides
        are never taken from here.
      max_shard_bytes: Size above which the weights are split into several files.
      on_progress: Called with each tensor that is written, with the fraction of all bytes that it
        is.

    Returns:
      The family that was written.

    Raises:
      InteropError: No family can express the model; the message names the setting.
    """
    folder = Path(folder)
    chosen, architecture, written = express(model, family)
    dtype = dtype or model.config.precision.parameters
    if dtype not in WEIGHT_DTYPES:
        raise InteropError(f"dtype {dtype}: is not known; give one of {', '.join(WEIGHT_DTYPES)}")
    leaves = model_leaves(model)
    tensors = model_tensors(chosen, architecture, model, leaves)
    arrays = arrays_by_path(params)
    by_name = group_by_name(tensors)
    specs = [TensorSpec(name, each[0].shape, dtype) for name, each in by_name.items()]
    zeros = (1, model.config.vocab_size)
    specs += [TensorSpec(name, zeros, dtype) for name in chosen.zeros]

    def values(name: str) -> Array:
        if on_progress is not None:
            on_progress(num_bytes[name] / total)
        if name in chosen.zeros:
            return np.zeros(zeros, np.float32)
        return join_tensor(by_name[name], arrays)

    shards = split_into_shards(specs, max_shard_bytes)
    num_bytes = {spec.name: spec.num_bytes for spec in specs}
    total = sum(num_bytes.values())
    names: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = WEIGHTS
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / name, shard, values)
        names |= {spec.name: name for spec in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    # Weights that were here before, and an index that would lead to them.
    kept = {*names.values(), *([INDEX] if len(shards) > 1 else [])}
    for pattern in (INDEX, WEIGHTS, "model-?????-of-?????.safetensors"):
        for path in folder.glob(pattern):
            if path.name not in kept:
                path.unlink()
    # Null ids stand where a family's default would be beyond the vocabulary; given ones win.
    unset = {
        name: None
        for name, value in written.items()
        if value is None and is_kept(name, chosen.model_type)
    }
    decided = {name: value for name, value in written.items() if name not in unset}
    # Another name of a field that the model decides would replace its value.
    aliases = CONFIG_FIELDS[chosen.model_type].aliases
    given = {
        name: value for name, value in (fields or {}).items() if aliases.get(name) not in decided
    }
    record = unset | _label_fields(model) | given | decided
    record |= {
        "model_type": chosen.model_type,
        "architectures": [architecture.name],
        "torch_dtype": dtype,
    }
    (folder / CONFIG).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    return chosen


def _label_fields(model: Model) -> dict[str, Any]:
    """Return names of labels, whose number is that of a classifier's or tagger's classes."""
    names = [f"LABEL_{i}" for i in range(getattr(model, "num_classes", 0))]
    if not names:
        return {}
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def express(model: Model, family: str = "") -> tuple[Family, Architecture, dict[str, Any]]:
    """Return the family and architecture of a model, and the fields of its config.json.

    Raises:
      InteropError: No family can express the model.
    """
    kind = _kind_of(model)
    if family and family not in FAMILIES:
        raise InteropError(f"family {family}: is not known; give one of {', '.join(FAMILIES)}")
    candidates = [FAMILIES[family]] if family else list(FAMILIES.values())
    problems: list[tuple[int, str]] = []
    for each in candidates:
        matching = [
            architecture for architecture in each.architectures if architecture.kind == kind
        ]
        if not matching:
            continue
        problem, written = _try_family(each, matching[0], model)
        if problem is None:
            return each, matching[0], written
        problems.append((problem.count("."), f"{each.model_type}: {problem}"))
    if not problems:
        raise InteropError(
            f"model {type(model).__name__}: has no counterpart in transformers that is supported; "
            "export a language model, masked language model, classifier or encoder-decoder"
        )
    # The family that agrees deepest into the config is the nearest one.
    nearest = max(problems, key=lambda each: each[0])[1]
    raise InteropError(
        f"model: no architecture of transformers has it (nearest is {nearest}); change what differs"
    )


def _try_family(
    family: Family, architecture: Architecture, model: Model
) -> tuple[str | None, dict[str, Any]]:
    """Return the first setting that a family lacks (None: it has all), and its fields."""
    config = model.config
    try:
        written = family.write_config(config)
        values = json.loads(json.dumps(written))
        read = family.read_config(Fields(values, family.model_type, family.model_type))
        if config.encoder is not None and not config.encoder.vocab_size and not read.tie_embeddings:
            # One table of source and target is written as two equal ones.
            encoder = dataclasses.replace(read.encoder or config.encoder, vocab_size=0)
            read = dataclasses.replace(read, encoder=encoder)
        if architecture.kind != "masked_lm":
            read = dataclasses.replace(read, masked_head=config.masked_head)  # without effect
        difference = find_difference(config, read)
        if difference is None and config.pooler != architecture.pooler:
            difference = f"model.pooler {config.pooler!r}"
        if difference is None:
            model_tensors(family, architecture, model, model_leaves(model))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        return " ".join(str(error).split()), {}
    return difference, written


def _kind_of(model: Model) -> str:
    return {
        "LanguageModel": "language_model",
        "MaskedLanguageModel": "masked_lm",
        "Classifier": "classifier",
        "Tagger": "tagger",
        "EncoderDecoder": "encoder_decoder",
    }.get(type(model).__name__, "")


def _nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree
