"""Verbs that convert what runs have: `import`, `export`, `merge` and `reference`.

`import` and `export` are for Hugging Face, `merge` for LoRA, and `reference` for DPO.
"""

import dataclasses
from typing import Annotated

from train.cli.parsing import parse, pop_json_flag, pop_positional, print_json
from train.dpo_reference import add_reference
from train.huggingface import import_model
from train.huggingface_export import Weights, export_run
from train.lora.merge_and_export import merge_run
from transformer.validation import Bounds, PositiveInt


@dataclasses.dataclass(frozen=True)
class ImportArguments:
    """Make a run folder of a Hugging Face model, for `sample`, `evaluate` and `fit --init-from`."""

    workdir: str
    """Folder of the run to make."""
    data: str = ""
    """Data to evaluate on (`data.path` of the run's settings)."""
    precision: str = "float32"
    """Precision policy of the run; weights are cast to the dtype of its parameters."""
    adapter: str = ""
    """Folder of a LoRA adapter of PEFT for the model."""


def run_import(arguments: list[str]) -> int:
    """Import a model; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    source = pop_positional(arguments, "SOURCE", "import")
    options = parse(ImportArguments, arguments, verb="import SOURCE")
    folder = import_model(
        source,
        options.workdir,
        data_path=options.data,
        precision=options.precision,
        adapter=options.adapter,
    )
    if json_wanted:
        print_json({"workdir": str(folder.path)})
    else:
        print(f"imported: {folder.path}")
    return 0


@dataclasses.dataclass(frozen=True)
class ExportArguments:
    """Write a run as a folder that Hugging Face transformers opens."""

    output: str
    """Folder to write."""
    family: str = ""
    """model_type to write; default: that of the import, or the first that has the model."""
    dtype: str = ""
    """float32, float16 or bfloat16; default: the dtype of the run's parameters."""
    max_shard_megabytes: PositiveInt = 5000
    """Size above which the weights are split into several files."""
    weights: Weights = "merged"
    """Weights of a LoRA run to export: all with the adapter merged, the adapter alone for PEFT, or
    the weights that it adapts."""


def run_export(arguments: list[str]) -> int:
    """Export a run; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "export")
    options = parse(ExportArguments, arguments, verb="export W")
    model_type = export_run(
        workdir,
        options.output,
        family=options.family,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_megabytes * 1_000_000,
        weights=options.weights,
    )
    record = {"output": options.output, "model_type": model_type}
    if json_wanted:
        print_json(record)
    else:
        print(f"exported as {model_type}: {options.output}")
    return 0


@dataclasses.dataclass(frozen=True)
class MergeArguments:
    """Write the merged weights of a LoRA run to the folder of an ordinary run."""

    workdir: str
    """Folder of the new run."""
    step: int | None = None
    """Step of the checkpoint; default: the run's evaluation weights."""


def run_merge(arguments: list[str]) -> int:
    """Merge a LoRA run; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    source = pop_positional(arguments, "W", "merge")
    options = parse(MergeArguments, arguments, verb="merge W")
    run = merge_run(source, options.workdir, step=options.step)
    base_path = str(run.folder.path)
    if json_wanted:
        print_json({"workdir": base_path})
    else:
        print(f"merged weights in {base_path}")
    return 0


@dataclasses.dataclass(frozen=True)
class ReferenceArguments:
    """Add a run's log-likelihoods to pairs of answers, for DPO with --task.reference data."""

    pairs: str
    """JSON lines with prompt, chosen and rejected."""
    output: str
    """File to write: the same lines, with the log-likelihoods of both answers."""
    max_length: Annotated[int, Bounds(2)] = 512
    """data.max_length of the DPO run."""
    chat_template: str = ""
    """data.chat_template of the DPO run."""
    batch_size: PositiveInt = 8
    """Pairs of a forward pass."""


def run_reference(arguments: list[str]) -> int:
    """Score pairs; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "reference")
    options = parse(ReferenceArguments, arguments, verb="reference W")
    count = add_reference(
        workdir,
        options.pairs,
        options.output,
        max_length=options.max_length,
        chat_template=options.chat_template,
        batch_size=options.batch_size,
    )
    record = {"output": options.output, "pairs": count}
    if json_wanted:
        print_json(record)
    else:
        print(f"scored {count:,} pairs: {options.output}")
    return 0
