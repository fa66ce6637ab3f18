"""Compare LoRA adapters with PEFT, both ways, for every supported family.

    python -m bench.drills.peft [--only WORD] [--output FILE]
    python -m bench.drills.peft --fixtures      # write the test fixtures

Random adapters of a tiny model, on queries and values, on all matrices, and on two others, are
written here and opened by `peft.PeftModel.from_pretrained`; adapters created by PEFT are read here.
The table has the largest differences of the logits, relative to max(1, largest logit), and the
smallest effect of an adapter on them.

It needs torch, transformers and peft, and no network.
"""

import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import peft
import torch
import transformers

from bench.drills._huggingface_models import VARIANTS, Variant
from bench.drills._reference_table import run_drill
from bench.drills.huggingface import difference, make_model
from transformer.interop.fields import InteropError
from transformer.interop.peft import read_adapter, write_adapter
from transformer.interop.pretrained import read_model
from transformer.lora import LoRALayout

Array = np.ndarray[Any, Any]

FIXTURES = Path(__file__).parents[2] / "tests" / "transformer" / "interop" / "adapters"
IN_FIXTURES = ("gpt2-tied", "llama-grouped", "neox-parallel", "phi3-partial", "bert-classifier")

TOLERANCE = 1e-4
RANK, ALPHA = 3, 5.0
TARGETS = (("query", "value"), ("attention", "up", "down"), ("output", "down"))


class Result(NamedTuple):
    """Largest differences of one model."""

    written: float
    read_back: float
    theirs: float
    effect: float
    refused: str = ""

    @property
    def passed(self) -> bool:
        """True if both libraries compute the same, and the adapters change something."""
        within = max(self.written, self.theirs) <= TOLERANCE and self.read_back == 0
        return within and self.effect > 0.1


def inputs_of(variant: Variant) -> tuple[tuple[Array, ...], dict[str, torch.Tensor]]:
    """Return the inputs of a model here and in transformers."""
    draw = np.random.RandomState(0)
    source, tokens = (draw.randint(3, 51, (2, length)) for length in (11, 14))
    if variant.is_seq2seq:
        names = {"input_ids": torch.tensor(source), "decoder_input_ids": torch.tensor(tokens)}
        return (source, tokens), names
    return (tokens,), {"input_ids": torch.tensor(tokens)}


def peft_logits(variant: Variant, base: Path, adapter: Path) -> Array:
    """Return the logits of the base with an adapter, as PEFT computes them."""
    model = getattr(transformers, variant.model_class).from_pretrained(
        base, attn_implementation="eager"
    )
    adapted = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        logits: Array = adapted(**inputs_of(variant)[1]).logits.numpy()
    return logits


def make_peft_adapter(variant: Variant, base: Path, folder: Path) -> None:
    """Write an adapter of PEFT on every linear layer that it finds, except heads."""
    model = getattr(transformers, variant.model_class).from_pretrained(base)
    heads = ("lm_head", "score", "classifier", "cls", "pooler", "vocab_transform", "embed_out")
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds)
        and not any(part in heads for part in name.split("."))
        and name.rpartition(".")[2] not in ("vocab_projector", "router", "gate")
    ]
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names, use_rslora=True)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    adapted.save_pretrained(folder)


def logits_of(model: Any, layout: LoRALayout, trainable: Any, params: Any, inputs: Any) -> Array:
    """Return the logits with an adapter."""
    combined = layout.combine(jax.tree.map(jnp.asarray, trainable), layout.freeze(params))
    return np.asarray(model.apply({"params": combined}, *inputs).logits)


def run_variant(variant: Variant) -> Result:
    """Compare the adapters of one model."""
    written = read_back = 0.0
    effect, refused = np.inf, ""
    with tempfile.TemporaryDirectory() as name:
        base, adapter, made = (Path(name) / each for each in ("base", "adapter", "made"))
        make_model(variant).save_pretrained(base)
        pretrained, params = read_model(base)
        model, family = pretrained.make_model(), pretrained.family.model_type
        inputs = inputs_of(variant)[0]
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
            ours = logits_of(model, layout, trainable, params, inputs)
            written = max(written, difference(ours, peft_logits(variant, base, adapter)))
            again = read_adapter(adapter, model, family=family)
            back = logits_of(model, again.layout, again.trainable, params, inputs)
            read_back = max(read_back, float(np.abs(back - ours).max()))
            effect = min(effect, float(np.abs(ours - plain).max()))
        make_peft_adapter(variant, base, made)
        read = read_adapter(made, model, family=family)
        theirs = difference(
            logits_of(model, read.layout, read.trainable, params, inputs),
            peft_logits(variant, base, made),
        )
    return Result(written, read_back, theirs, effect, refused)


def random_factors(layout: LoRALayout, params: Any) -> Any:
    """Return a trainable tree whose update is as large as the weights."""
    draw = np.random.RandomState(0)
    tree = layout.init(jax.random.key(0), params)
    return jax.tree.map(lambda x: x + 0.3 * draw.randn(*x.shape).astype(np.float32), tree)


def write_fixtures(only: str) -> None:
    """Write adapters of PEFT, and its logits with them, for the tests' own tiny models."""
    models = FIXTURES.parent / "fixtures"
    for variant in VARIANTS:
        if variant.name in IN_FIXTURES and only in variant.name:
            folder = FIXTURES / variant.name
            shutil.rmtree(folder, ignore_errors=True)
            make_peft_adapter(variant, models / variant.name, folder)
            (folder / "README.md").unlink(missing_ok=True)
            config = json.loads((folder / "adapter_config.json").read_text())
            config["base_model_name_or_path"] = variant.name
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (folder / "adapter_config.json").write_text(text)
            logits = peft_logits(variant, models / variant.name, folder)
            np.savez_compressed(folder / "reference.npz", logits=logits)


def main() -> int:
    """Print the table; return 1 if a model does not pass."""
    warnings.simplefilter("ignore")
    versions = f"peft {peft.__version__}, transformers {transformers.__version__}"
    head = [
        f"{versions}, torch {torch.__version__.partition('+')[0]}, jax {jax.__version__}, CPU",
        f"{'model':20} {'opened':>8} {'read back':>9} {'of PEFT':>8} {'effect':>7}  refused",
    ]
    return run_drill(VARIANTS, run_line, head=head, write_fixtures=write_fixtures)


def run_line(variant: Variant) -> tuple[str, bool]:
    """Compare one model; return its line, and if it passed."""
    result = run_variant(variant)
    line = (
        f"{variant.name:20} {result.written:8.1e} {result.read_back:9.0e} "
        f"{result.theirs:8.1e} {result.effect:7.2f}  {result.refused}"
    )
    return line, result.passed


if __name__ == "__main__":
    sys.exit(main())
