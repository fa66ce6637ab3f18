"""Leave out each field of each type's config.json in turn, and compare with `transformers`.

    python -m bench.drills.huggingface_defaults [--only WORD] [--output FILE]

A field that is absent, or null, has the default of transformers. For every type one tiny model is
saved; then each field that transformers reads is dropped, or set to null, in its config.json. If
the shapes of all weights stay, both libraries read the files and the logits are compared; else the
names and shapes of the weights that they expect. Where transformers itself refuses a config,
nothing is compared.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.drills._huggingface_models import VARIANTS, Variant
from bench.drills._reference_table import run_drill
from bench.drills.huggingface import LOGITS, difference, draw_inputs, logits_of, make_model
from transformer.interop.fields import CONFIG_FIELDS, InteropError
from transformer.interop.pretrained import read_config, read_model
from transformer.interop.weight_map import model_leaves, model_tensors


def first_variants() -> list[Variant]:
    """Return one model of each type, with all that differs from the defaults where possible."""
    chosen: dict[str, Variant] = {}
    for variant in VARIANTS:
        chosen.setdefault(variant.config_class, variant)
    return list(chosen.values())


def expected_shapes(config: Any, variant: Variant) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights of a model, without making them."""
    with torch.device("meta"):
        model = getattr(transformers, variant.model_class)(config)
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def compare(folder: Path, variant: Variant, shapes: dict[str, tuple[int, ...]]) -> str | float:
    """Return the difference of logits, `shapes` if those agree, or what is wrong."""
    model_class = getattr(transformers, variant.model_class)
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        config._attn_implementation = "eager"
        theirs = expected_shapes(config, variant)
        inputs, logits = draw_inputs(variant), None
        if theirs == shapes:
            model = model_class.from_pretrained(folder, config=config).eval()
            logits = logits_of(model(**inputs.tensors)).detach().numpy()
    except Exception as error:  # noqa: BLE001  (transformers refuses a config by any kind)
        return f"refused by transformers: {type(error).__name__}"
    try:
        if logits is not None:
            pretrained, params = read_model(folder)
            output = pretrained.make_model().apply({"params": params}, *inputs.arrays)
            return difference(output.logits, logits)
        pretrained = read_config(folder)
        ours_model = pretrained.make_model()
        rules = pretrained.family.rules(pretrained.architecture)
        tensors = model_tensors(rules, model_leaves(ours_model), ours_model.config)
    except InteropError as error:
        try:
            with torch.device("meta"):
                model_class(config)(
                    **{name: each.to("meta") for name, each in inputs.tensors.items()}
                )
        except Exception as theirs_too:  # noqa: BLE001
            return f"refused by transformers: {type(theirs_too).__name__}"
        return f"refused: {str(error).partition('config.json: ')[2][:100]}"
    ours = {name: tensor.shape for name, tensor in tensors.items()}
    common = ours.keys() & theirs.keys()
    wrong = [name for name in common if ours[name] != theirs[name]]
    wrong += [] if len(common) > 5 else ["few"]
    return f"wrong: {wrong[0]} {ours.get(wrong[0])} {theirs.get(wrong[0])}" if wrong else "shapes"


def run_variant(variant: Variant) -> tuple[str, bool]:
    """Return a line of the table, and if no field failed."""
    model = make_model(variant)
    results: dict[str, str | float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        values = json.loads((folder / "config.json").read_text())
        known = CONFIG_FIELDS[values["model_type"]]
        shapes = expected_shapes(model.config, variant)
        for field in sorted(values.keys() & known.defaults.keys() - known.unread):
            changes: dict[str, dict[str, Any]] = {"absent": {}}
            if values[field] is not None:
                changes["null"] = {field: None}
            for kind, change in changes.items():
                changed = {key: value for key, value in values.items() if key != field} | change
                (folder / "config.json").write_text(json.dumps(changed))
                results[f"{field} {kind}"] = compare(folder, variant, shapes)
    differences = [each for each in results.values() if isinstance(each, float)]
    problems = [
        f"{name}: {each}"
        for name, each in results.items()
        if (isinstance(each, float) and each > LOGITS)
        or (isinstance(each, str) and each.startswith(("refused:", "wrong")))
    ]
    refused = [each for each in results.values() if "transformers" in str(each)]
    line = (
        f"{variant.name:20} {len(differences):7} {max(differences, default=0):8.1e} "
        f"{list(results.values()).count('shapes'):7} {len(refused):7} {len(problems):8}"
    )
    # What this library refuses by name is shown, and is no wrong result.
    failures = [problem for problem in problems if ": refused" not in problem]
    return "\n".join([line, *(f"    {problem}" for problem in problems)]), not failures


def main() -> int:
    """Print the table; return 1 if a field fails."""
    head = [
        f"transformers {transformers.__version__}, each field of config.json absent, then null",
        "model                 logits  largest  shapes refused problems",
    ]
    return run_drill(first_variants(), run_variant, head=head)


if __name__ == "__main__":
    sys.exit(main())
