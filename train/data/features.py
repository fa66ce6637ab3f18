"""Continuous inputs as sequences of vectors: patches of images, spectra of sound, nodes of graphs.

Every set of examples becomes `features` [examples, T, I] and `targets` [examples], with
`adjacency` [examples, T, T] for graphs. Two sets are generated, so that sound and graphs can be
tried without a download.
"""

import dataclasses
import io
import zipfile
from collections.abc import Callable, Mapping
from typing import Annotated

import numpy as np

from train.data.arrays import ArrayDataConfig, Arrays
from train.data.files import find_file
from train.errors import UserError, as_damaged, as_user_error
from train.files import too_large_error
from train.runtime.host import host_memory_bytes
from transformer.validation import Mark, NonNegativeInt, PositiveFloat


@dataclasses.dataclass(frozen=True)
class FeatureDataConfig(ArrayDataConfig):
    """Examples of numbers with a label each: images, sound, graphs, or sequences of vectors."""

    path: Annotated[str, Mark.RESUMABLE, Mark.COMMON] = ""
    """A .npz file with `labels` [examples] and one of `images` [examples, height, width(,
    channels)], `signals` [examples, samples] and `features` [examples, T, numbers]; optionally
    `adjacency` [examples, T, T]. Or a built-in set: builtin:digits, builtin:chirps,
    builtin:graphs."""

    test_path: Annotated[str, Mark.RESUMABLE] = ""
    """Likewise, for the test split. Empty: none, unless the set is built in."""

    patch_size: NonNegativeInt = 0
    """Images: height and width of a patch. Each patch is one position."""

    frame_length: NonNegativeInt = 0
    """Signals: samples of a frame. The spectrum of each frame is one position."""

    frame_step: NonNegativeInt = 0
    """Signals: samples from the start of a frame to the next. 0: half of frame_length."""

    scale: PositiveFloat = 1.0
    """Images and features are divided by this: 255 for pixels of one byte."""


TEST_FRACTION = 5  # a fifth of the examples of a built-in set are test examples

GENERATED_EXAMPLES = 2500


def image_patches(
    images: np.ndarray,  # [examples, height, width] or [examples, height, width, channels]
    size: int,  # P
) -> np.ndarray:  # [examples, height / P * width / P, P * P * channels]
    """Cut images into square patches, row by row (Dosovitskiy et al. 2021, section 3.1)."""
    images = images[..., None] if images.ndim == 3 else images
    count, height, width, channels = images.shape
    rows, columns = height // size, width // size
    tiles = images.reshape(count, rows, size, columns, size, channels).swapaxes(2, 3)
    return tiles.reshape(count, rows * columns, size * size * channels)


def signal_frames(
    signals: np.ndarray,  # [examples, samples]
    length: int,
    step: int,
) -> np.ndarray:  # [examples, T, length // 2 + 1]
    """Return the logarithmic magnitudes of the spectra of overlapping frames (Hann windows)."""
    frames = np.lib.stride_tricks.sliding_window_view(signals, length, axis=1)[:, ::step]
    spectra = np.abs(np.fft.rfft(frames * np.hanning(length + 1)[:-1], axis=-1))
    return np.log1p(spectra).astype(np.float32)


def read_features(config: FeatureDataConfig, split: str) -> Arrays | None:
    """Return the arrays of a split as they are in the file or the built-in set.

    Raises:
      UserError: The file is missing or damaged, or there is no such set.
    """
    kind, _, name = config.path.partition(":")
    if kind == "builtin":
        if split == "validation":
            return None
        if name not in BUILT_IN:
            known = ", ".join(f"builtin:{each}" for each in BUILT_IN)
            raise UserError(f"data.path {config.path}: is not a built-in set; choose from {known}")
        arrays = BUILT_IN[name]()
        first_test = len(arrays["labels"]) * (TEST_FRACTION - 1) // TEST_FRACTION
        rows = slice(first_test, None) if split == "test" else slice(first_test)
        return {key: array[rows] for key, array in arrays.items()}
    path = {"train": config.path, "test": config.test_path}.get(split, "")
    if not path:
        return None
    file = find_file(path, "data.path" if split == "train" else "data.test_path").path
    with as_user_error(path):
        content = file.read_bytes()
    with as_damaged(path, "an .npz file of arrays", "write it with numpy.savez"):
        # What it unpacks to, which NumPy does not read beyond: a small file may hold terabytes.
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        limit = (host_memory_bytes() or 2**36) // 4
        if unpacked > limit:
            raise too_large_error(file, unpacked, limit)
        with np.load(io.BytesIO(content), allow_pickle=False) as saved:
            return {key: saved[key] for key in saved.files}


def to_features(arrays: Arrays, config: FeatureDataConfig) -> dict[str, np.ndarray]:
    """Return `features` and `targets`, with `adjacency` if there is one.

    Raises:
      UserError: An array is missing or of the wrong shape, or a setting does not suit it.
    """
    found = [name for name in _TO_FEATURES if name in arrays]
    labels = arrays.get("labels", arrays.get("targets"))
    if len(found) != 1 or labels is None:
        raise UserError(
            f"data.path {config.path or '(none)'}: has arrays {', '.join(sorted(arrays))}; give "
            f"labels, and one of {', '.join(_TO_FEATURES)}"
        )
    features = _TO_FEATURES[found[0]](np.asarray(arrays[found[0]]), config)
    if features.shape[1] != config.length:
        raise UserError(
            f"data.length {config.length}: the examples have {features.shape[1]} positions; set "
            f"--data.length {features.shape[1]}"
        )
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iub" or labels.min(initial=0) < 0:
        raise UserError(f"data.path {config.path}: labels are not numbers from 0 on; number them")
    converted = {"features": features, "targets": labels.astype(np.int32)}
    if "adjacency" in arrays:
        adjacency = np.asarray(arrays["adjacency"]).astype(bool)
        if adjacency.shape[1:] != (config.length, config.length):
            raise UserError(
                f"data.path {config.path}: adjacency has shape {adjacency.shape}; give one "
                f"[{config.length}, {config.length}] matrix for each example"
            )
        converted["adjacency"] = adjacency
    return converted


def _from_images(images: np.ndarray, config: FeatureDataConfig) -> np.ndarray:
    size = config.patch_size
    if images.ndim not in (3, 4) or not size or images.shape[1] % size or images.shape[2] % size:
        raise UserError(
            f"data.patch_size {size}: does not divide images of shape {images.shape[1:3]}; give a "
            "size that divides height and width"
        )
    return image_patches(images.astype(np.float32) / config.scale, size)


def _from_signals(signals: np.ndarray, config: FeatureDataConfig) -> np.ndarray:
    length = config.frame_length
    if signals.ndim != 2 or not 2 <= length <= signals.shape[1]:
        raise UserError(
            f"data.frame_length {length}: does not fit signals of shape {signals.shape[1:]}; give "
            "2 samples or more, and at most those of a signal"
        )
    frames = signal_frames(signals.astype(np.float32), length, config.frame_step or length // 2)
    # Normalized by example, as in speech recognition: loudness is no feature, and without it the
    # common level of all spectra is far larger than their differences.
    mean, std = (each(frames, axis=(1, 2), keepdims=True) for each in (np.mean, np.std))
    return (frames - mean) / np.maximum(std, 1e-6)


def _from_features(features: np.ndarray, config: FeatureDataConfig) -> np.ndarray:
    if features.ndim != 3:
        raise UserError(
            f"data.path {config.path}: features have shape {features.shape}; give [examples, "
            "positions, numbers]"
        )
    return (features / config.scale).astype(np.float32)


_TO_FEATURES: Mapping[str, Callable[[np.ndarray, FeatureDataConfig], np.ndarray]] = {
    "images": _from_images,
    "signals": _from_signals,
    "features": _from_features,
}
"""Names of the arrays that examples may have, and what makes features of each."""


# ---- Built-in sets ----


def read_digits() -> Arrays:
    """Return 1,797 handwritten digits of 8 x 8 pixels from 0 to 16 (Alpaydin and Kaynak 1998).

    They come with scikit-learn, ordered by writer: the last ones are of other writers.

    Raises:
      UserError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            "data.path builtin:digits: comes with scikit-learn, which is not installed; run "
            "pip install scikit-learn"
        ) from error
    digits = load_digits()
    return {"images": digits.images, "labels": digits.target}


def generate_chirps() -> Arrays:
    """Return noisy tones of 1,024 samples: falling (0), level (1) or rising (2) in pitch.

    All three begin and end at random pitches of one range, so that no single frame tells them
    apart.
    """
    random = np.random.default_rng(0)
    labels = random.integers(3, size=GENERATED_EXAMPLES)
    low = random.uniform(0.04, 0.1, size=GENERATED_EXAMPLES)  # cycles a sample
    high = low * random.uniform(1.3, 1.8, size=GENERATED_EXAMPLES)
    level = np.where(random.random(GENERATED_EXAMPLES) < 0.5, low, high)
    begin = np.choose(labels, [high, level, low])
    end = np.choose(labels, [low, level, high])
    pitch = np.linspace(begin, end, 1024, axis=1)
    phase = random.uniform(0, 2 * np.pi, size=(GENERATED_EXAMPLES, 1))
    tones = np.sin(2 * np.pi * np.cumsum(pitch, axis=1) + phase)
    signals = tones + random.normal(scale=1.0, size=tones.shape)
    return {"signals": signals.astype(np.float32), "labels": labels}


def generate_graphs(num_nodes: int = 12, num_edges: int = 10, max_distance: int = 3) -> Arrays:
    """Return graphs with two marked nodes: 1 if a path of at most 3 edges joins them, else 0.

    Half of the graphs have each label. The features of a node say which mark it has, if any: edges
    are in the adjacency alone, which has loops, so that a node also attends to itself.
    """
    random = np.random.default_rng(0)
    wanted = [GENERATED_EXAMPLES // 2] * 2
    pairs = np.array([(i, j) for i in range(num_nodes) for j in range(i)])
    features, adjacencies, labels = [], [], []
    while sum(wanted):
        adjacency = np.eye(num_nodes, dtype=bool)
        chosen = pairs[random.choice(len(pairs), num_edges, replace=False)]
        adjacency[chosen[:, 0], chosen[:, 1]] = adjacency[chosen[:, 1], chosen[:, 0]] = True
        first, second = random.choice(num_nodes, 2, replace=False)
        walks = np.linalg.matrix_power(adjacency.astype(np.int64), max_distance)
        near = int(walks[first, second] > 0)
        if not wanted[near]:
            continue
        wanted[near] -= 1
        marks = np.zeros((num_nodes, 3), np.float32)
        marks[:, 0] = 1
        marks[[first, second]] = [[0, 1, 0], [0, 0, 1]]
        features.append(marks)
        adjacencies.append(adjacency)
        labels.append(near)
    order = random.permutation(len(labels))
    stacked = {"features": features, "adjacency": adjacencies, "labels": labels}
    return {name: np.array(each)[order] for name, each in stacked.items()}


BUILT_IN: Mapping[str, Callable[[], Arrays]] = {
    "digits": read_digits,
    "chirps": generate_chirps,
    "graphs": generate_graphs,
}
"""Sets that need no file, by the name after `builtin:`."""
