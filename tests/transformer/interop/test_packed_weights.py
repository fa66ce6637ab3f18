"""Packed folders of GPTQ, AWQ and MXFP4, against the logits of those who unpack them.

The folders are written by `bench.drills.packed_models`, with the code of AutoGPTQ, AutoAWQ and
transformers.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from tests.transformer.formulas import assert_close
from transformer.interop.fields import InteropError
from transformer.interop.pretrained import read_model
from transformer.layers.logical_axes import LogicalAxes
from transformer.layers.low_rank import merge_weights
from transformer.layers.quantized import QuantizedWeight
from transformer.quantization import has_quantized, is_quantized

PACKED = Path(__file__).with_name("packed")


@pytest.mark.parametrize("name", ["gptq", "gptq-act", "gptq-8bit", "awq", "mxfp4"])
def test_logits_are_those_of_the_unpacked_model(name: str) -> None:
    pretrained, params = read_model(PACKED / name)
    reference = np.load(PACKED / name / "expected.npz")
    logits = pretrained.make_model().apply({"params": params}, reference["tokens"]).logits
    assert_close(logits, reference["logits"], 1e-4)
    # All matrices of the layers (of gpt-oss the experts) stay packed.
    packed = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(leaf)]
    assert len(packed) == (3 * 2 if name == "mxfp4" else 7)
    merged = merge_weights(params)
    assert not has_quantized(merged)
    again = pretrained.make_model().apply({"params": merged}, reference["tokens"]).logits
    assert_close(logits, again)


def test_shards_hold_what_the_whole_matrix_holds() -> None:
    """Inputs and outputs of codes are split, groups are not."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
    rules = {"embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}

    def shardings(model: Any) -> Any:
        return jax.tree.map(
            lambda axes: NamedSharding(mesh, PartitionSpec(*map(rules.get, axes.names))),
            model.logical_axes(),
            is_leaf=lambda leaf: isinstance(leaf, LogicalAxes),
        )

    whole = read_model(PACKED / "gptq-act")[1]
    placed = read_model(PACKED / "gptq-act", shardings=shardings)[1]
    weight = placed["layers"]["place_0"]["mixer"]["query"]
    assert weight.codes.sharding.spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert weight.scales.sharding.spec == PartitionSpec(None, None, "tensor", None)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(placed), strict=True):
        np.testing.assert_array_equal(a, b)


def changed(folder: Path, settings: dict[str, Any], change: Any = None, name: str = "gptq") -> Path:
    shutil.copytree(PACKED / name, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    return folder


QUERY = "model.layers.1.self_attn.q_proj"


def float_query(tensors: dict[str, Any]) -> None:
    for end in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{QUERY}.{end}"]
    tensors[f"{QUERY}.weight"] = np.zeros((32, 32), np.float32)


@pytest.mark.parametrize(
    ("settings", "change", "words"),
    [
        ({"bits": 3}, None, "gptq of 3 bits"),
        ({"checkpoint_format": "marlin"}, None, "checkpoint_format marlin"),
        ({"quant_method": "awq", "version": "gemv"}, None, "awq of 4 bits, version gemv"),
        ({"quant_method": "fp8"}, None, "quantization_config fp8: is not read; GPTQ"),
        ({}, lambda x: x.pop(f"{QUERY}.qzeros"), f"lacks {QUERY}.qzeros"),
        ({}, float_query, "packed, and that of another layer is not"),
        ({"bits": 8}, None, "does not fit the shape|is packed|config.json"),
    ],
)
def test_other_formats_are_refused(
    settings: dict[str, Any], change: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(InteropError, match=words) as caught:
        read_model(changed(tmp_path, settings, change))
    assert "\n" not in str(caught.value)


def test_zero_points_of_the_second_format_are_as_they_are(tmp_path: Path) -> None:
    first = read_model(PACKED / "gptq")[1]["layers"]["place_0"]["mixer"]["query"]
    second = read_model(changed(tmp_path, {"checkpoint_format": "gptq_v2"}))[1]
    weight = second["layers"]["place_0"]["mixer"]["query"]
    assert isinstance(weight, QuantizedWeight)
    np.testing.assert_array_equal(weight.zeros + np.uint8(1), first.zeros)
