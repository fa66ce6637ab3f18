"""The safetensors files of a folder, and slices of parameters read from them."""

import dataclasses
import fnmatch
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from transformer.interop.family import Family
from transformer.interop.fields import InteropError
from transformer.interop.safetensors_file import SafetensorsFile
from transformer.interop.strided_copy import Array, aligned_zeros, copy_in_tiles
from transformer.interop.weight_map import Leaf, Tensor, Weight
from transformer.models.config import TransformerConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

FLOATS = ("F32", "F16", "BF16")
"""Dtypes of weights that are read, by their names in safetensors files."""

HEAD_PATHS = ("head", "output", "pooler")
"""Starts of the tree paths of parameters that are not of the body."""

MAX_JSON_BYTES = 64_000_000

MAX_COPY_THREADS = 8
"""Threads that copy the layers of a parameter: NumPy holds no lock while it copies."""

MIN_THREADED_BYTES = 1_000_000
"""Size below which threads cost more than they save."""


class WeightFiles:
    """The safetensors files of a folder."""

    def __init__(self, folder: Path, files: dict[str, SafetensorsFile], prefix: str) -> None:
        self._folder = folder
        self._file_of: dict[str, tuple[SafetensorsFile, str]] = {}
        self._optional = set[str]()  # names that a model may have no use for
        names = [name for file in files.values() for name in file.tensors]
        # Files of the body alone (`AutoModel`) lack the prefix that a model with a head has.
        bare = bool(prefix) and not any(name.startswith(prefix) for name in names)
        for file in files.values():
            for name in file.tensors:
                self._file_of[_modern_name(name, prefix if bare else "")] = file, name

    @classmethod
    def open(cls, folder: Path, family: Family) -> "WeightFiles":
        """Open the file or files of a folder.

        Raises:
          InteropError: There are none, or one is damaged, or the index is.
        """
        if (folder / INDEX).exists():
            names = _index_files(folder / INDEX)
        elif (folder / WEIGHTS).exists():
            names = [WEIGHTS]
        else:
            raise _no_weights(folder)
        for name in names:
            if not (folder / name).exists():
                raise InteropError(f"{folder / name}: is missing; fetch it again")
        files = {name: SafetensorsFile(folder / name) for name in names}
        return cls(folder, files, family.prefix)

    def read(self, name: str) -> Array:
        """Return a tensor as a view of its file."""
        file, own_name = self._file_of[name]
        return file.read(own_name)

    def release(self) -> None:
        """Give back the memory of the pages that were read."""
        for file in {id(file): file for file, _ in self._file_of.values()}.values():
            file.release()

    def tie(self, weights: Sequence[Weight], config: TransformerConfig) -> TransformerConfig:
        """Return the config with the ties that the files have, which win as in `transformers`.

        A table that the files lack is the one that it is tied to. One that they have, with other
        values than the one that it should be tied to, is a table of its own.
        """
        files = self._file_of
        inputs = _names(weights, "embedding", "source_embedding")
        outputs, biases = _names(weights, "output"), _names(weights, "head_output_bias")
        candidates = [*inputs, *(outputs if config.tie_embeddings else [])]
        present = [name for name in candidates if name in files]
        if not present:
            return config  # a table is missing, which `check` names
        self._optional = {*inputs, *biases}
        shared, target = inputs[0], inputs[-1]
        # The output matrix is tied to the shared table, if there is one, and else to the target's.
        tied = shared if shared in files else target
        for name in inputs:
            files.setdefault(name, files[present[0]])
        if config.tie_embeddings:
            for name in outputs:
                files.setdefault(name, files[tied])
        if config.encoder is not None:
            is_one = self._are_equal(inputs[-2], target)
            files[shared] = files[target]
            size = 0 if is_one else config.encoder.vocab_size or config.vocab_size
            encoder = dataclasses.replace(config.encoder, vocab_size=size)
            config = dataclasses.replace(config, encoder=encoder)
        for name in outputs if config.tie_embeddings else []:
            if self._are_equal(name, target):
                self._optional.add(name)
            else:
                config = dataclasses.replace(config, tie_embeddings=False)
        for name in biases:  # the last one is added to the logits
            last = next((each for each in reversed(biases) if each in files), None)
            if last:
                files[name] = files[last]
        self.release()
        return config

    def split_heads(self, tensors: list[Tensor], family: Family) -> tuple[list[Tensor], list[str]]:
        """Return the tensors that the files have, and the names of those of another head.

        Tensors of the body that are missing stay, for `check`.
        """
        kept = [
            tensor
            for tensor in tensors
            if tensor.name in self._file_of
            or not all(leaf.path.startswith(HEAD_PATHS) for leaf in tensor.leaves)
        ]
        body = {weight.theirs.partition(".")[0] for weight in family.weights}
        known = self._optional | {tensor.name for tensor in tensors}
        other = {
            name for name in self._file_of.keys() - known if name.partition(".")[0] not in body
        }
        left_out = {name for name in other if not _is_ignored(name, family)}
        self._optional |= left_out
        return kept, sorted(left_out)

    def check(self, tensors: list[Tensor], family: Family) -> None:
        """Raise InteropError unless the files hold exactly these tensors."""
        expected = {tensor.name: tensor for tensor in tensors}
        missing = [name for name in expected if name not in self._file_of]
        extra = [
            name
            for name in self._file_of
            if name not in expected
            and name not in family.zeros
            and name not in self._optional
            and not _is_ignored(name, family)
        ]
        if missing:
            first = missing[0]
            also = f", and has {extra[0]} too many" if extra else ""
            raise InteropError(
                f"{self._folder}: lacks {_count(missing)}, first {first} of shape "
                f"{list(expected[first].shape)}{also}; fetch the files again, or the config.json "
                "that belongs to them"
            )
        if extra:
            raise InteropError(
                f"{self._folder}: has {_count(extra)} that the model of config.json lacks, first "
                f"{extra[0]}; fetch the config.json that belongs to the files"
            )
        for name, tensor in expected.items():
            file, own_name = self._file_of[name]
            entry = file.tensors[own_name]
            if entry.shape != tensor.shape:
                raise InteropError(
                    f"{file.path}: {own_name} has shape {list(entry.shape)}, and config.json says "
                    f"{list(tensor.shape)}; fetch the config.json that belongs to the file"
                )
            if entry.dtype not in FLOATS:
                raise InteropError(
                    f"{file.path}: {own_name} is stored as {entry.dtype}; give float32, float16 or "
                    "bfloat16 weights"
                )
        for name in family.zeros:
            if name in self._file_of and np.any(self.read(name)):
                raise InteropError(
                    f"{self._folder}: {name} is not zero, and this library has no such bias; "
                    "import a model without it"
                )

    def _are_equal(self, one: str, other: str) -> bool:
        if self._file_of[one] == self._file_of[other]:
            return True
        entries = [file.tensors[name] for file, name in (self._file_of[one], self._file_of[other])]
        known = entries[0].dtype in FLOATS and entries[0].dtype == entries[1].dtype
        return known and np.array_equal(self.read(one), self.read(other))


def _names(weights: Sequence[Weight], *paths: str) -> list[str]:
    """Return the names of the tensors that hold some parameters."""
    return list(dict.fromkeys(weight.theirs for weight in weights if weight.ours in paths))


def _is_ignored(name: str, family: Family) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in family.ignored)


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def _modern_name(name: str, prefix: str) -> str:
    """Return a tensor's name as today's files have it.

    Files of a bare body lack its prefix, and the first files of BERT name gains and biases of norms
    gamma and beta.
    """
    name = f"{prefix}{name}" if prefix and not name.startswith(("lm_head.", "cls.")) else name
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


def _index_files(path: Path) -> list[str]:
    table = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise InteropError(f"{path}: has no weight_map; fetch it again")
    names = sorted(set(map(str, table.values())))
    for name in names:
        # A path in an index could lead out of the folder.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InteropError(
                f"{path}: names {name!r}, which is not a file of its folder; fetch it again"
            )
    return names


def _no_weights(folder: Path) -> InteropError:
    pickled = [
        name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for name in folder.glob(pattern)
    ]
    if pickled:
        return InteropError(
            f"{pickled[0]}: is pickled, and unpickling runs code of the file; convert it where "
            "transformers is installed: AutoModelForCausalLM.from_pretrained(SOURCE)"
            ".save_pretrained(FOLDER) writes safetensors"
        )
    return InteropError(f"{folder}: has no {WEIGHTS}; give a folder of safetensors weights")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises:
      InteropError: It is missing, too large, or no JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise InteropError(f"{path}: is too large for a settings file; fetch it again")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InteropError(f"{path}: does not exist; give a folder that has it") from error
    except OSError as error:
        raise InteropError(f"{path}: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, InteropError):  # a ValueError as well: the size, above
            raise
        raise InteropError(f"{path}: is not JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise InteropError(f"{path}: is not a JSON object; fetch it again")
    return value


Place = tuple[Tensor, int]  # a tensor, and the number of the leaf among those that it holds


def places_by_leaf(tensors: list[Tensor]) -> dict[str, dict[tuple[int, ...], Place]]:
    """Return, for each parameter, the tensor of each index of its stack axes."""
    places: dict[str, dict[tuple[int, ...], Place]] = {}
    for tensor in tensors:
        for number, leaf in enumerate(tensor.leaves):
            for index in tensor.indices:
                places.setdefault(leaf.path, {})[index] = tensor, number
    return places


def read_slice(
    files: WeightFiles,
    places: Mapping[tuple[int, ...], Place],
    leaf: Leaf,
    index: tuple[slice, ...],
    dtype: Any,
) -> Array:
    """Return a slice of a parameter, read from the views of its tensors. Padding is zero."""
    # A shard of a parameter may cut both its stack of layers and the matrix of each.
    ranges = [range(size)[part] for size, part in zip(leaf.padded_shape, index, strict=True)]
    values = aligned_zeros([len(each) for each in ranges], dtype)
    stacked = len(next(iter(places)))  # a tensor may hold all experts
    inner = tuple(slice(each.start, each.stop) for each in ranges[stacked:])

    def copy_unit(place: tuple[int, ...]) -> None:
        tensor, number = places[tuple(each[i] for each, i in zip(ranges, place, strict=False))]
        unit = tensor.layout.split(files.read(tensor.name), tensor.leaves)[number]
        part = unit[inner]  # shorter than the slice where the vocabulary is padded
        copy_in_tiles(values[place][tuple(slice(0, size) for size in part.shape)], part)

    units = list(np.ndindex(*(len(each) for each in ranges[:stacked])))
    if values.nbytes < MIN_THREADED_BYTES:
        for place in units:
            copy_unit(place)
        return values
    with ThreadPoolExecutor(min(MAX_COPY_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(copy_unit, units))  # `list` raises what a thread raised
    return values
