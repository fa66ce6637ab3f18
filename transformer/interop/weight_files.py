"""The safetensors files of a folder, and slices of parameters read from them."""

import fnmatch
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from transformer.interop.family import Family
from transformer.interop.fields import InteropError
from transformer.interop.safetensors_file import SafetensorsFile
from transformer.interop.strided_copy import Array, aligned_zeros, copy_in_tiles
from transformer.interop.weight_map import Leaf, Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

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

    def check(self, tensors: list[Tensor], family: Family, vocab_size: int) -> None:
        """Raise InteropError unless the files hold exactly these tensors."""
        expected = {tensor.name: tensor for tensor in tensors}
        missing = [name for name in expected if name not in self._file_of]
        extra = [
            name
            for name in self._file_of
            if name not in expected
            and name not in family.zeros
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in family.ignored)
        ]
        if "lm_head.weight" in extra and self._is_copy_of_embedding("lm_head.weight", expected):
            extra.remove("lm_head.weight")  # a tied matrix that was saved all the same
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
            if entry.dtype not in ("F32", "F16", "BF16"):
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

    def _is_copy_of_embedding(self, name: str, expected: Mapping[str, Tensor]) -> bool:
        tables = (
            tensor.name
            for tensor in expected.values()
            if tensor.leaves[0].path == "embedding" and tensor.name in self._file_of
        )
        return any(np.array_equal(self.read(name), self.read(table)) for table in tables)


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
