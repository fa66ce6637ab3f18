"""Continuous inputs: patches, frames, built-in sets and files, against plain loops."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train.data.features import (
    BUILT_IN,
    FeatureDataConfig,
    image_patches,
    read_features,
    signal_frames,
    to_features,
)
from train.errors import UserError

RANDOM = np.random.default_rng(0)


def test_image_patches_are_in_row_major_order() -> None:
    images = RANDOM.normal(size=(3, 4, 6, 2))
    patches = image_patches(images, 2)
    assert patches.shape == (3, 6, 8)
    for index in range(6):
        row, column = 2 * (index // 3), 2 * (index % 3)
        expected = images[:, row : row + 2, column : column + 2].reshape(3, 8)
        np.testing.assert_array_equal(patches[:, index], expected)
    grey = image_patches(images[..., 0], 2)
    np.testing.assert_array_equal(grey, patches.reshape(3, 6, 4, 2)[..., 0])


def test_signal_frames_are_log_magnitude_spectra() -> None:
    signals = RANDOM.normal(size=(2, 20)).astype(np.float32)
    frames = signal_frames(signals, 8, 3)
    assert frames.shape == (2, 5, 5)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(8) / 8)
    for frame in range(5):
        part = signals[:, 3 * frame : 3 * frame + 8] * window
        for k in range(5):
            wave = np.exp(-2j * np.pi * k * np.arange(8) / 8)
            expected = np.log1p(np.abs(part @ wave))
            np.testing.assert_allclose(frames[:, frame, k], expected, rtol=1e-5)


def test_digits_match_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    config = FeatureDataConfig("builtin:digits", patch_size=2, length=16, scale=16.0)
    train, test = (read_features(config, split) for split in ("train", "test"))
    assert train is not None
    assert test is not None
    assert read_features(config, "validation") is None
    dataset = datasets.load_digits()
    np.testing.assert_array_equal(np.concatenate([train["images"], test["images"]]), dataset.images)
    examples = to_features(test, config)
    assert examples["features"].shape == (360, 16, 4)
    assert examples["features"].max() == 1
    np.testing.assert_array_equal(examples["targets"], dataset.target[-360:])


def test_chirp_labels_match_the_change_of_pitch() -> None:
    chirps = BUILT_IN["chirps"]()
    config = FeatureDataConfig("builtin:chirps", frame_length=128, length=15)
    examples = to_features(chirps, config)
    assert examples["features"].shape == (2500, 15, 65)
    # The spectra of every example are normalized.
    np.testing.assert_allclose(examples["features"].mean(axis=(1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(examples["features"].std(axis=(1, 2)), 1, atol=1e-5)
    peaks = examples["features"][:, :, 3:20].argmax(axis=-1)  # the pitch of each frame
    change = peaks[:, -1] - peaks[:, 0]
    falling, level, rising = (np.median(change[examples["targets"] == label]) for label in range(3))
    assert falling < level == 0 < rising


def test_graph_labels_match_a_breadth_first_search() -> None:
    graphs = BUILT_IN["graphs"]()
    assert graphs["labels"].mean() == 0.5
    assert (graphs["adjacency"] == graphs["adjacency"].swapaxes(1, 2)).all()
    for adjacency, marks, label in zip(
        graphs["adjacency"][:200], graphs["features"], graphs["labels"], strict=False
    ):
        (first,), (second,) = np.flatnonzero(marks[:, 1]), np.flatnonzero(marks[:, 2])
        reached = {first}
        for _ in range(3):
            reached |= {j for i in reached for j in np.flatnonzero(adjacency[i])}
        assert (second in reached) == label


def test_npz_file_is_read_and_a_damaged_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    arrays: dict[str, Any] = {
        "images": RANDOM.integers(256, size=(5, 4, 4), dtype=np.uint8),
        "labels": np.arange(5),
    }
    np.savez(path, **arrays)
    config = FeatureDataConfig(str(path), patch_size=2, length=4, scale=255.0)
    arrays_read = read_features(config, "train")
    assert arrays_read is not None
    examples = to_features(arrays_read, config)
    np.testing.assert_allclose(
        examples["features"], image_patches(arrays["images"] / 255, 2), rtol=1e-6
    )
    assert read_features(config, "test") is None
    np.save(tmp_path / "array.npy", arrays["images"])
    np.savez_compressed(path, **arrays)
    member = bytearray(path.read_bytes())
    member[100:110] = b"\xff" * 10
    array = (tmp_path / "array.npy").read_bytes()
    for content in (b"no archive", b"", b"PK\x03\x04", array, bytes(member)):
        path.write_bytes(content)
        with pytest.raises(
            UserError, match=r"mine.npz: is not an .npz file of arrays \(.+\); write it"
        ):
            read_features(config, "train")


def write_archive(file: Path, dtype: str, shape: str) -> FeatureDataConfig:
    """Write an .npz file whose array has this header and no data."""
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    with zipfile.ZipFile(file, "w") as archive:
        length = len(header).to_bytes(2, "little")
        archive.writestr("labels.npy", b"\x93NUMPY\x01\x00" + length + header)
    return FeatureDataConfig(path=str(file))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("|O", "(1,)"), ("<f8", f"({10**14},)"), ("<f8", f"({10**30},)"), ("<f8", "(" * 3000)],
    ids=["pickle", "no memory", "overflow", "nested"],
)
def test_invalid_array_is_one_line(tmp_path: Path, dtype: str, shape: str) -> None:
    config = write_archive(tmp_path / "a.npz", dtype, shape)
    with pytest.raises(UserError, match=r"a.npz: is not an .npz file of arrays \(.+\); write it"):
        read_features(config, "train")


def test_archive_that_fills_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "a.npz", labels=np.zeros(2**20, np.uint8))
    assert (tmp_path / "a.npz").stat().st_size < 2**12
    monkeypatch.setattr("train.data.features.host_memory_bytes", lambda: 2**21)
    config = FeatureDataConfig(path=str(tmp_path / "a.npz"))
    with pytest.raises(UserError, match=r"a.npz: has 1 MiB or more, and at most 524288 bytes"):
        read_features(config, "train")
    monkeypatch.setattr("train.data.features.host_memory_bytes", lambda: 2**23)
    assert read_features(config, "train") is not None


IMAGES = {"images": np.zeros((2, 4, 4)), "labels": np.zeros(2, int)}
LABELS = np.zeros(2, int)
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (IMAGES, {}, r"patch_size 0: does not divide images of shape \(4, 4\)"),
    (IMAGES, {"patch_size": 3}, "patch_size 3: does not divide"),
    (IMAGES, {"patch_size": 2, "length": 3}, "the examples have 4 positions"),
    ({"signals": np.zeros((2, 8)), "labels": LABELS}, {"frame_length": 9}, "frame_length 9"),
    ({"images": IMAGES["images"]}, {"patch_size": 2}, "give labels"),
    ({"features": np.zeros((2, 4, 1)), "labels": np.array(["a", "b"])}, {"length": 4}, "numbers"),
    ({"features": np.zeros((2, 4)), "labels": LABELS}, {}, r"features have shape \(2, 4\)"),
    (
        {"features": np.zeros((2, 4, 1)), "labels": LABELS, "adjacency": np.ones((2, 4, 3))},
        {"length": 4},
        r"adjacency has shape \(2, 4, 3\)",
    ),
]


@pytest.mark.parametrize(("arrays", "settings", "message"), WRONG, ids=range(len(WRONG)))
def test_invalid_arrays_raise(
    arrays: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        to_features(arrays, FeatureDataConfig(**settings))
