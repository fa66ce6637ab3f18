"""Compare LoRA adapters with PEFT, both ways, for every supported family.

    python -m bench peft [--only WORD]
    python -m bench peft --fixtures      # write the test fixtures

Random adapters of a tiny model, on queries and values, on all matrices, and on two others, are
written here and opened by `peft.PeftModel.from_pretrained`; adapters created by PEFT are read here.
The table has the largest differences of the logits, relative to max(1, largest logit), and the
smallest effect of an adapter on them.

It needs torch, transformers and peft, and no network.
"""

import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import torch
import transformers

from bench.drills._huggingface_models import VARIANTS, Array, Variant, difference, logits_of
from bench.drills._reference_table import TESTS, Options, compare_cases, fixture_folders, versions
from transformer.interop.fields import InteropError
from transformer.interop.peft import read_adapter, write_adapter
from transformer.interop.pretrained import read_model
from transformer.lora import LoRALayout

FIXTURES = TESTS / "transformer" / "interop" / "adapters"

TOLERANCE = 1e-4
RANK, ALPHA = 3, 5.0
TARGETS = (("query", "value"), ("attention", "up", "down"), ("output", "down"))

HEADS = {"lm_head", "score", "classifier", "pre_classifier", "classification_head", "cls", "head"}
HEADS |= {"qa_outputs", "pooler", "vocab_transform", "embed_out", "predictions"}
HEADS |= {"generator_predictions", "generator_lm_head"}
OUTSIDE = {"vocab_projector", "decoder", "embeddings_project", "embedding_hidden_mapping_in"}
OUTSIDE |= {"router", "gate", "shared_expert_gate"}
"""Parts of the names of modules, and last parts, that have no adapter here."""

LEFT_OUT = ("Mamba2", "Qwen2Moe", "Qwen3Next", "DeepseekV2", "DeepseekV3")
"""Types of which PEFT refuses a projection, or adapts experts too where a layer is plain."""
CASES = {
    name: variant
    for name, variant in VARIANTS.items()
    if variant.config_class.removesuffix("Config") not in LEFT_OUT
}


def peft_logits(variant: Variant, base: Path, adapter: Path) -> Array:
    """Return the logits of the base with an adapter, as PEFT computes them."""
    adapted = peft.PeftModel.from_pretrained(variant.open_model(base), adapter).eval()
    with torch.no_grad():
        return np.asarray(logits_of(adapted(**variant.draw_inputs()[1])))


def make_peft_adapter(variant: Variant, base: Path, folder: Path) -> None:
    """Write an adapter of PEFT on every linear layer that it finds in the layers."""
    model = getattr(transformers, variant.model_class).from_pretrained(base)
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds)
        and not any(part in HEADS for part in name.split("."))
        and name.rpartition(".")[2] not in OUTSIDE
    ]
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names, use_rslora=True)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    adapted.save_pretrained(folder)


def adapted_logits(
    model: Any, layout: LoRALayout, trainable: Any, params: Any, inputs: tuple[Array, ...]
) -> Array:
    """Return the logits with an adapter."""
    combined = layout.combine(jax.tree.map(jnp.asarray, trainable), layout.freeze(params))
    return np.asarray(model.apply({"params": combined}, *inputs).logits)


def random_factors(layout: LoRALayout, params: Any) -> Any:
    """Return a trainable tree whose update is as large as the weights."""
    draw = np.random.RandomState(0)
    tree = layout.init(jax.random.key(0), params)
    return jax.tree.map(lambda x: x + 0.3 * draw.randn(*x.shape).astype(np.float32), tree)


def compare_adapters(name: str, variant: Variant) -> tuple[str, bool]:
    """Compare the adapters of one model; return its line, and if it passed."""
    written = read_back = 0.0
    effect, refused = np.inf, ""
    with tempfile.TemporaryDirectory() as root:
        base, adapter, made = (Path(root) / each for each in ("base", "adapter", "made"))
        variant.make_model().save_pretrained(base)
        pretrained, params = read_model(base)
        model, family = pretrained.make_model(), pretrained.family.model_type
        inputs = variant.draw_inputs()[0]
        plain = np.asarray(model.apply({"params": params}, *inputs).logits)
        for targets in TARGETS:
            layout = LoRALayout.create(
                model.logical_axes(), rank=RANK, alpha=ALPHA, targets=targets
            )
            trainable = random_factors(layout, params)
            shutil.rmtree(adapter, ignore_errors=True)
            adapter.mkdir()
            try:
                write_adapter(adapter, model, layout, trainable, family=family)
            except InteropError as error:
                refused = str(error).partition(":")[0]
                continue
            ours = adapted_logits(model, layout, trainable, params, inputs)
            written = max(written, difference(ours, peft_logits(variant, base, adapter)))
            again = read_adapter(adapter, model, family=family)
            back = adapted_logits(model, again.layout, again.trainable, params, inputs)
            read_back = max(read_back, float(np.abs(back - ours).max()))
            effect = min(effect, float(np.abs(ours - plain).max()))
        make_peft_adapter(variant, base, made)
        read = read_adapter(made, model, family=family)
        theirs = difference(
            adapted_logits(model, read.layout, read.trainable, params, inputs),
            peft_logits(variant, base, made),
        )
    line = f"{name:20} {written:8.1e} {read_back:9.0e} {theirs:8.1e} {effect:7.2f}  {refused}"
    return line, max(written, theirs) <= TOLERANCE and read_back == 0 and effect > 0.1


def write_fixtures(variants: dict[str, Variant]) -> None:
    """Write adapters of PEFT, and its logits with them, for the tests' own tiny models."""
    for folder, variant in fixture_folders(FIXTURES, variants):
        base = FIXTURES.parent / "fixtures" / folder.name
        shutil.rmtree(folder)
        make_peft_adapter(variant, base, folder)
        (folder / "README.md").unlink(missing_ok=True)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = folder.name
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / "adapter_config.json").write_text(text)
        logits = peft_logits(variant, base, folder)
        np.savez_compressed(folder / "reference.npz", logits=logits)


def drill(options: Options) -> int:
    """Print the table; return 1 if a model does not pass."""
    warnings.simplefilter("ignore")
    columns = f"{'opened':>8} {'read back':>9} {'of PEFT':>8} {'effect':>7}"
    return compare_cases(
        options,
        CASES,
        compare_adapters,
        head=[
            f"{versions('peft', 'transformers', 'torch', 'jax')}, CPU",
            f"{'model':20} {columns}  refused",
        ],
        write_fixtures=write_fixtures,
    )
