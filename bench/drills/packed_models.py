"""Write the packed models of tests/transformer/interop/packed, by their publishers' own code.

    python -m bench packed_models --gptq qlinear_cuda.py --awq autoawq/ --output packed

GPTQ is packed and unpacked by
the QuantLinear of AutoGPTQ (auto_gptq/nn_modules/qlinear/qlinear_cuda.py, which imports nothing of
its package), AWQ by awq/modules/linear/gemm.py and awq/utils/packing_utils.py of AutoAWQ, and MXFP4
is unpacked by transformers. Each folder has the logits of the unpacked model for its tokens.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

SIZES = {
    "vocab_size": 51,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def drill(gptq: Path, awq: Path, output: Path) -> None:
    """Write all folders.

    Args:
      gptq: AutoGPTQ's qlinear_cuda.py.
      awq: A checkout of AutoAWQ.
      output: The folder for them.
    """
    tokens = torch.arange(2 * 12).reshape(2, 12) * 7 % SIZES["vocab_size"]

    def write(name: str, model: Any, packed: dict[str, Any], settings: dict[str, Any]) -> None:
        folder = output / name
        folder.mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            logits = model(tokens).logits
        np.savez_compressed(folder / "expected.npz", tokens=tokens, logits=logits)
        record = json.loads(model.config.to_json_string())
        record |= {"architectures": [type(model).__name__], "quantization_config": settings}
        (folder / "config.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        tensors = {key: value.contiguous() for key, value in packed.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def llama() -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES, initializer_range=0.2)
        return transformers.LlamaForCausalLM(config).eval()

    spec = importlib.util.spec_from_file_location("qlinear_cuda", gptq)
    assert spec is not None
    assert spec.loader is not None
    qlinear: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(qlinear)
    # Without the `__init__` of its packages, which import the models of older transformers.
    for package in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(awq.joinpath(*package.split(".")))]
    devices: Any = types.ModuleType("awq.utils.utils")
    devices.get_best_device = lambda: "cpu"
    sys.modules["awq.utils.utils"] = devices
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    def quantize(weight: Any, groups: Any, count: int, bits: int) -> tuple[Any, Any]:
        """Return scales and zero points [out, groups] by the range of each group."""
        scales, zeros = [], []
        for group in range(count):
            low, high = torch.aminmax(weight[:, groups == group], dim=1)
            scale = ((high.clamp(min=0) - low.clamp(max=0)) / (2**bits - 1)).half().float()
            # The first format of GPTQ cannot hold a zero point of 0.
            zeros.append(torch.round(-low.clamp(max=0) / scale).clamp(1, 2**bits - 1))
            scales.append(scale)
        return torch.stack(scales, 1), torch.stack(zeros, 1)

    for name, bits, permuted in (
        ("gptq", 4, False),
        ("gptq-act", 4, True),
        ("gptq-8bit", 8, False),
    ):
        model, packed, size = llama(), {}, 16
        for path, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear) or path == "lm_head":
                continue
            inputs, outputs = module.in_features, module.out_features
            groups = torch.arange(inputs) // size
            if permuted:
                groups = groups[torch.randperm(inputs)]
            scales, zeros = quantize(module.weight.data, groups, inputs // size, bits)
            linear = qlinear.QuantLinear(bits, size, inputs, outputs, bias=False)
            linear.pack(module, scales, zeros.clone(), groups.int())
            linear.autogptq_cuda_available = False
            module.weight.data = linear(torch.eye(inputs)).float().T.contiguous()
            for part in ("qweight", "qzeros", "g_idx"):
                packed[f"{path}.{part}"] = getattr(linear, part).clone()
            packed[f"{path}.scales"] = linear.scales.half()
            packed[f"{path}.bias"] = torch.zeros(outputs).half()  # as AutoGPTQ does
        kept = {key: x for key, x in model.state_dict().items() if "_proj" not in key}
        settings = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": permuted}
        write(name, model, kept | packed, settings)

    model, packed, size = llama(), {}, 16
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and path != "lm_head":
            groups = torch.arange(module.in_features) // size
            scales, zeros = quantize(module.weight.data, groups, module.in_features // size, 4)
            linear = WQLinear_GEMM.from_linear(
                module, 4, size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
            )
            parts = linear.qweight, linear.qzeros, linear.scales
            # In float32: products of half-precision scales would be rounded.
            matrix = dequantize_gemm(*parts[:2], linear.scales.float(), 4, size)
            module.weight.data = matrix.T.contiguous()
            for part, value in zip(("qweight", "qzeros", "scales"), parts, strict=True):
                packed[f"{path}.{part}"] = value.clone()
    kept = {key: x for key, x in model.state_dict().items() if "_proj" not in key}
    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    write("awq", model, kept | packed, settings | {"zero_point": True})

    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    model, packed = transformers.GptOssForCausalLM(config).eval(), {}
    for path, parameter in model.named_parameters():
        if path.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape
            shape = experts, outputs, inputs // 32
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            scales = torch.randint(120, 126, shape, dtype=torch.uint8)
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            packed |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
    kept = {
        key: value
        for key, value in model.state_dict().items()
        if not key.endswith(("gate_up_proj", "down_proj"))
    }
    write("mxfp4", model, kept | packed, {"quant_method": "mxfp4"})
