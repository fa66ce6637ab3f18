"""Verbs for other libraries, and those that convert what runs have.

`import` and `export` are for Hugging Face, `merge` for LoRA, `reference` for DPO, and `lm-eval` for
EleutherAI's evaluation harness.
"""

import dataclasses
import json
import os
import sys
from typing import Annotated

import tyro

from train.cli.parsing import JsonArguments, Workdir, parse
from train.errors import UserError
from train.interop.dpo_reference import add_reference
from train.interop.huggingface import import_model
from train.interop.huggingface_export import Weights, export_run
from train.interop.lora_export import merge_run
from transformer.validation import Bounds, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportArguments(JsonArguments):
    """Make a run folder of a Hugging Face model, for `sample`, `evaluate` and `fit --init-from`."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A local folder, or a name on the Hugging Face hub."""
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
    options = parse(ImportArguments, arguments, verb="import")
    folder = import_model(
        options.source,
        options.workdir,
        data_path=options.data,
        precision=options.precision,
        adapter=options.adapter,
    )
    options.show({"workdir": str(folder.path)}, f"imported: {folder.path}")
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportArguments(JsonArguments):
    """Write a run as a folder that Hugging Face transformers opens."""

    workdir: Workdir
    """Folder of the run."""
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
    options = parse(ExportArguments, arguments, verb="export")
    model_type = export_run(
        options.workdir,
        options.output,
        family=options.family,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_megabytes * 1_000_000,
        weights=options.weights,
    )
    options.show(
        {"output": options.output, "model_type": model_type},
        f"exported as {model_type}: {options.output}",
    )
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeArguments(JsonArguments):
    """Write the merged weights of a LoRA run to the folder of an ordinary run."""

    source: Workdir
    """Folder of the LoRA run."""
    workdir: str
    """Folder of the new run."""
    step: int | None = None
    """Step of the checkpoint; default: the run's evaluation weights."""


def run_merge(arguments: list[str]) -> int:
    """Merge a LoRA run; return the exit status."""
    options = parse(MergeArguments, arguments, verb="merge")
    run = merge_run(options.source, options.workdir, step=options.step)
    options.show({"workdir": str(run.folder.path)}, f"merged weights in {run.folder.path}")
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceArguments(JsonArguments):
    """Add a run's log-likelihoods to pairs of answers, for DPO with --task.reference data."""

    workdir: Workdir
    """Folder of the run."""
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
    options = parse(ReferenceArguments, arguments, verb="reference")
    count = add_reference(
        options.workdir,
        options.pairs,
        options.output,
        max_length=options.max_length,
        chat_template=options.chat_template,
        batch_size=options.batch_size,
    )
    options.show(
        {"output": options.output, "pairs": count}, f"scored {count:,} pairs: {options.output}"
    )
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmEvalArguments:
    """Evaluate a run on tasks of EleutherAI's lm-evaluation-harness, by its own command.

    After W come the options of `lm-eval run`: --tasks, --num_fewshot, --limit, --output_path,
    --include_path, --apply_chat_template and others (lm-eval run --help lists them). --model_args
    sets arguments of train.interop.lm_eval.HarnessModel: step=100 quantize=int8.
    """

    workdir: Workdir
    """Folder of the run."""


def run_lm_eval(arguments: list[str]) -> int:
    """Run the harness's command with a run as its model; return the exit status."""
    options = parse(LmEvalArguments, arguments[:1], verb="lm-eval")
    try:
        from lm_eval.__main__ import cli_evaluate

        from train.interop.lm_eval import MODEL_NAME
    except ImportError as error:
        raise UserError(
            f"lm-eval: needs the package lm_eval ({error}); "
            "pip install 'linen-transformer[lm-eval]'"
        ) from error
    # As JSON: the folder may have a comma.
    model = ["--model", MODEL_NAME, "--model_args", json.dumps({"run": options.workdir})]
    # Its bootstrap forks processes, which may hang beside the threads of JAX.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    # It reads the process's arguments. The last of an option given twice counts.
    sys.argv = ["lm-eval", "run", *model, "--batch_size", "auto", *arguments[1:]]
    cli_evaluate()
    return 0
