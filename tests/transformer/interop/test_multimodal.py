"""Text parts of multimodal files, written by `transformers`, in the layouts that there are.

`python -m bench huggingface-multimodal --fixtures` writes the fixtures.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from transformer.interop.fields import InteropError
from transformer.interop.pretrained import read_config, read_model, write_model

FIXTURES = Path(__file__).parent / "multimodal"


def change(folder: Path, rename: Callable[[str], str] = str, **fields: Any) -> Path:
    """Rename the tensors of a folder, and change fields of its config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): each for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


def logits_of(folder: Path) -> Any:
    pretrained, params = read_model(folder)
    tokens = np.load(folder / "reference.npz")["tokens"]
    return jax.jit(pretrained.make_model().apply)({"params": params}, tokens).logits


@pytest.fixture(params=["gemma3", "qwen2_vl"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(FIXTURES / request.param, copy)
    return copy


def test_logits_of_text_match_transformers(folder: Path) -> None:
    reference = np.load(folder / "reference.npz")
    expected = np.asarray(reference["logits"])
    assert np.abs(logits_of(folder) - expected).max() < 1e-4 * max(1, np.abs(expected).max())


OF_TRANSFORMERS_5 = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^model\.(?!language_model|visual)", "model.language_model."),
    (r"^(visual|vision_tower|multi_modal_projector)\.", r"model.\1."),
)


def modern(name: str) -> str:
    for pattern, target in OF_TRANSFORMERS_5:
        if re.match(pattern, name):
            return re.sub(pattern, target, name)
    return name


LAYOUTS: dict[str, Callable[[str], str]] = {
    "5": modern,
    "4": lambda name: re.sub(r"^model\.language_model\.", "language_model.model.", modern(name)),
    "qwen": lambda name: re.sub(r"^model\.language_model\.", "model.", modern(name)),
    "bare": lambda name: modern(name).removeprefix("model."),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_tensors_is_read(layout: str, folder: Path) -> None:
    _, expected = read_model(folder)
    _, found = read_model(change(folder, LAYOUTS[layout]))
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))


def test_the_text_part_is_a_model_of_its_family(folder: Path, tmp_path: Path) -> None:
    pretrained, params = read_model(folder)
    name = pretrained.multimodal
    family = {"gemma3": "gemma3_text", "qwen2_vl": "qwen2"}[name]
    [note] = pretrained.notes
    assert note.startswith(f"the text part of {name} is read as {family}; without ")
    assert ("visual" if name == "qwen2_vl" else "multi_modal_projector, vision_tower") in note
    target = tmp_path / "written"
    target.mkdir()
    assert write_model(target, pretrained.make_model(), params, family=family).model_type == family
    again, read_back = read_model(target)
    assert not again.multimodal
    assert jax.tree.all(jax.tree.map(np.array_equal, read_back, params))


def test_the_first_files_of_qwen2_vl_have_no_text_config(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(FIXTURES / "qwen2_vl", copy)
    expected = logits_of(copy)
    text = json.loads((copy / "config.json").read_text()).pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "text_config": None,
        "model_type": "qwen2_vl",
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    change(copy, **text)
    assert not read_config(copy).notes
    np.testing.assert_array_equal(logits_of(copy), expected)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "llava", "text_config": {"model_type": "opus"}}, "text_config: .*'opus'"),
        ({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}, "'ministral3'"),
        ({"model_type": "gemma3", "text_config": None}, "has no text_config"),
        ({"model_type": "gemma3", "text_config": {"hidden_size": "a"}}, "hidden_size 'a'"),
        ({"model_type": "mllama"}, "'mllama' is not supported.*known are .*qwen3_vl"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8: is not read"),
    ],
)
def test_what_cannot_be_read_is_named(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(FIXTURES / "gemma3", copy)
    with pytest.raises(InteropError, match=words) as caught:
        read_model(change(copy, **fields))
    assert "\n" not in str(caught.value)
