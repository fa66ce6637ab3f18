"""Read a Hugging Face folder into a model, and write a model as such a folder.

    config, params = read_model("folder")
    write_model("folder", model, params)

Weights are read lazily: each slice of each parameter comes straight from the mapped files, so a
sharded model needs no more host memory than the shards of this process.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from huggingface_hub import split_state_dict_into_shards_factory
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from transformer.hardware import Hardware
from transformer.interop.families import MODELS, express, find_architecture
from transformer.interop.family import Architecture, Family
from transformer.interop.fields import CONFIG_FIELDS, Fields, InteropError, is_kept
from transformer.interop.multimodal import (
    MULTIMODAL,
    left_out_note,
    other_class,
    read_text_config,
    text_tensor_name,
)
from transformer.interop.packed_weights import PARTS, Packing, read_packing
from transformer.interop.weight_files import (
    INDEX,
    WEIGHT_DTYPES,
    WEIGHTS,
    WeightFiles,
    places_by_leaf,
    read_json,
    read_slice,
    write_safetensors,
)
from transformer.interop.weight_map import (
    Array,
    Leaf,
    arrays_by_path,
    model_leaves,
    model_tensors,
)
from transformer.layers.quantized import QuantizedWeight
from transformer.models.config import TransformerConfig
from transformer.models.heads import Classifier, Pooling, Tagger
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
    """The whole config.json; of a multimodal model that of its text part."""
    other_head: str = ""
    """Class of the files, where it has another head than the architecture that it is read as."""
    notes: tuple[str, ...] = ()
    """What was left out of the files, a line each."""
    multimodal: str = ""
    """`model_type` of the files, where the model is their text part."""
    pooling: Pooling = "first"
    """Pooling of a classifier."""
    end_token: int | None = None
    """`Classifier.end_token`."""
    packing: Packing | None = None
    """How the weights are packed, if they are."""

    def make_model(self, hardware: Hardware | None = None) -> Model:
        """Return the model of this config."""
        return make_model(
            self.architecture,
            self.config,
            self.num_classes,
            hardware,
            pooling=self.pooling,
            end_token=self.end_token,
        )

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
    pooling: Pooling = "first",
    end_token: int | None = None,
) -> Model:
    """Return the model of an architecture."""
    model_class = MODELS[architecture.kind]
    hardware = hardware or Hardware()
    if architecture.kind == "classifier":
        return Classifier(
            config,
            hardware,
            num_classes=num_classes,
            pooling=pooling,
            end_token=end_token,
            head_bias=architecture.head_bias,
        )
    if architecture.kind == "tagger":
        return Tagger(config, hardware, num_classes=num_classes)
    return model_class(config, hardware)


def read_config(folder: str | Path, precision: Precision | None = None) -> PretrainedConfig:
    """Read the config of a folder.

    Raises:
      InteropError: There is none, it is damaged, or it has a field whose value is not supported.
    """
    path = Path(folder) / CONFIG
    whole = read_json(path)
    values, source, multimodal = whole, str(path), ""
    model_type, names = values.get("model_type"), values.get("architectures")
    if isinstance(model_type, str) and model_type in MULTIMODAL:
        multimodal = model_type
        values, model_type = read_text_config(whole, source)
        source = f"{source}: text_config"
    family, architecture, other_head = find_architecture(
        values.get("model_type"), None if multimodal else names, source
    )
    if multimodal:
        other_head = other_class(names)
    packed = whole.get("quantization_config") or whole.get("compression_config")
    packing = read_packing(packed, source) if packed else None
    fields = Fields(values, source, str(model_type))
    try:
        config = architecture.with_pooler(family.read_config(fields))
        pooling = architecture.read_pooling(fields)
        end_token = architecture.read_end_token(fields)
    except InteropError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        text = " ".join(str(error).split())
        raise InteropError(f"{source}: {text}; restore the original file") from error
    config = dataclasses.replace(config, precision=precision or Precision())
    notes = _field_notes(fields.unknown(), family.model_type)
    return PretrainedConfig(
        config,
        family,
        architecture,
        values,
        other_head,
        notes,
        multimodal,
        pooling,
        end_token,
        packing,
    )


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
        that of the policy's parameters. Packed matrices stay packed, each a `QuantizedWeight`.
      shardings: Function from the model to a tree of shardings, one for each parameter. Every
        device gets its own slice. Default: the first local device.
      on_progress: Called after each parameter with the fraction of all weights that it is.

    Raises:
      InteropError: A file is missing or damaged, or a tensor is missing, left over or of another
        shape than the config says.
    """
    pretrained = read_config(folder, precision)
    family = pretrained.family
    rules = family.rules(pretrained.architecture)
    files = WeightFiles(Path(folder), family, text_tensor_name if pretrained.multimodal else str)
    if pretrained.multimodal:
        note = left_out_note(pretrained.multimodal, family.model_type, files.other_parts)
        pretrained = pretrained._replace(notes=(*pretrained.notes, note))
    pretrained = pretrained._replace(config=files.tie(rules, pretrained.config))
    model = pretrained.make_model()
    leaves = model_leaves(model)
    tensors = model_tensors(rules, leaves, model.config)
    drawn: dict[str, jax.Array] = {}
    if pretrained.other_head:
        tensors, left_out = files.split_heads(tensors, family)
        read_paths = {leaf.path for tensor in tensors.values() for leaf in tensor.leaves}
        drawn = _draw(model, [path for path in leaves if path not in read_paths])
        note = _head_note(pretrained, list(drawn), left_out)
        pretrained = pretrained._replace(notes=(*pretrained.notes, note))
    if pretrained.packing is not None:
        tensors = files.unpack(tensors, pretrained.packing)
    files.check(tensors, family)
    dtype = WEIGHT_DTYPES[model.config.precision.parameters]
    by_leaf = places_by_leaf(tensors.values())
    sharding_of = None if shardings is None else arrays_by_path(shardings(model))
    num_weights = sum(math.prod(leaf.padded_shape) for leaf in leaves.values())

    def read(leaf: Leaf, dtype: Any, sharding: Any) -> jax.Array:
        read_shard = functools.partial(read_slice, files, by_leaf[leaf.path], leaf, dtype)
        if sharding is None:
            return jax.device_put(read_shard(tuple(map(slice, leaf.padded_shape))))
        return jax.make_array_from_callback(leaf.padded_shape, sharding, read_shard)

    def read_parts(leaf: Leaf, sharding: Any) -> QuantizedWeight:
        parts = {}
        for part in PARTS:
            if places := by_leaf.get(f"{leaf.path}/{part}"):
                tensor, number = next(iter(places.values()))
                each = tensor.leaves[number]
                placed = None if sharding is None else part_sharding(sharding, leaf, each)
                parts[part] = read(each, files.dtype(tensor.name), placed)
        return QuantizedWeight(
            parts["codes"],
            parts["scales"],
            parts.get("zeros"),
            parts.get("group_of_input"),
            inputs=leaf.unit_shape[: len(leaf.axes.inputs)],
            num_outputs=len(leaf.axes.outputs),
            dtype=dtype.name,
        )

    params: dict[str, Any] = {}
    for path, leaf in leaves.items():
        sharding = sharding_of and sharding_of[path]
        if path in drawn:
            params[path] = jax.device_put(drawn[path], sharding)
        elif path in by_leaf:
            params[path] = read(leaf, dtype, sharding)
        else:
            params[path] = read_parts(leaf, sharding)
        jax.block_until_ready(params[path])  # before the next one takes memory
        files.release()
        if on_progress is not None:
            on_progress(math.prod(leaf.padded_shape) / num_weights)
    return pretrained, unflatten_dict(params, sep="/")


def part_sharding(sharding: Sharding, leaf: Leaf, part: Leaf) -> Sharding:
    """Return the sharding of one array of a packed matrix from that of the matrix."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    split = dict(zip(leaf.axes.names, (*sharding.spec, *(None,) * len(leaf.shape)), strict=False))
    names: list[Any] = [split[name] for name in part.axes.names]
    if not part.path.endswith("/codes"):  # groups are whole on each device
        names[part.num_stacked] = None
    return NamedSharding(sharding.mesh, PartitionSpec(*names))


def _draw(model: Model, paths: list[str]) -> dict[str, jax.Array]:
    """Return initial values of some parameters."""

    def init() -> dict[str, jax.Array]:
        params = arrays_by_path(model.init_params(jax.random.key(0)))
        return {path: params[path] for path in paths}

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
    tensors = model_tensors(chosen.rules(architecture), model_leaves(model), model.config)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if architecture.kind == "encoder_decoder":
        shapes |= dict.fromkeys(chosen.zeros, (1, model.config.vocab_size))
    arrays = arrays_by_path(params)

    def num_bytes(shape: tuple[int, ...]) -> int:
        return math.prod(shape) * WEIGHT_DTYPES[dtype].itemsize

    def values(name: str) -> Array:
        if on_progress is not None:
            on_progress(num_bytes(shapes[name]) / total)
        if name in chosen.zeros:
            return np.zeros(shapes[name], np.float32)
        return tensors[name].join(arrays)

    split = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    total = split.metadata["total_size"]
    for file, names in split.filename_to_tensors.items():
        write_safetensors(folder / file, {name: shapes[name] for name in names}, dtype, values)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    else:
        (folder / INDEX).unlink(missing_ok=True)  # it would lead to weights that were here before
    for pattern in (WEIGHTS, "model-?????-of-?????.safetensors"):
        for path in folder.glob(pattern):
            if path.name not in split.filename_to_tensors:
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
