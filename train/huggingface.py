"""Hugging Face models as runs: `import_model` makes a run folder, `export_run` a model folder.

Both work on what `transformer.interop` reads and writes, and add what a run has beside its model:
a tokenizer, labels, settings of its task and data, a checkpoint.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from train.checkpoint.manager import CheckpointManager
from train.checkpoint.provenance import PROVENANCE_KEY, collect_provenance
from train.checkpoint.writer import install_log_filters
from train.data.config import DataConfig, TextDataConfig, TokenizerConfig
from train.data.example_configs import (
    BitextDataConfig,
    ClassificationDataConfig,
    TokenLabelDataConfig,
)
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.experiment import Experiment
from train.run import Run, load
from train.run_folder.folder import RunFolder
from train.run_folder.run_config import write_run_files
from train.runtime.local_hardware import local_hardware
from train.state import TrainState
from train.tasks.config import (
    Classification,
    LanguageModeling,
    MaskedLanguageModeling,
    Tagging,
    TaskConfig,
    Translation,
)
from transformer.interop.errors import InteropError
from transformer.interop.fields import WITHOUT_EFFECT
from transformer.interop.pretrained import (
    MAX_SHARD_BYTES,
    PretrainedConfig,
    read_json,
    read_model,
    write_model,
)
from transformer.precision import Precision

KEPT_FOLDER = "huggingface"
"""Folder of a run with the small files that it was imported with."""

KEPT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "encoder.json",
    "merges.txt",
)
"""Files without weights that survive import and export."""

LONGEST_DEFAULT = 1024
"""Tokens of a training example of an imported model that has no table of positions."""


@contextlib.contextmanager
def as_user_errors() -> Iterator[None]:
    """Raise a UserError in place of an error of the files."""
    try:
        yield
    except InteropError as error:
        raise UserError(str(error)) from error


def import_model(
    source: str, workdir: str, *, data_path: str = "", precision: str = "float32"
) -> RunFolder:
    """Make a run folder of a Hugging Face model.

    Args:
      source: Local folder, or a name on the hub (`HF_HUB_OFFLINE=1` reads its cache alone).
      workdir: Folder of the run; it must not hold one.
      data_path: Data to evaluate on, as `data.path` of the run's settings.
      precision: Precision policy of the run.

    Raises:
      UserError: The model or its tokenizer cannot be read, or the folder cannot be written. No
        folder is left behind.
    """
    install_log_filters()
    folder = RunFolder(Path(workdir).expanduser().absolute())
    if Path(folder.path).exists() and any(Path(folder.path).iterdir()):
        raise UserError(f"workdir {workdir}: is not empty; give a new folder")
    origin = find_source(source)
    try:
        policy = Precision.parse(precision).resolve(local_hardware())
    except ValueError as error:
        raise UserError(str(error)) from error
    with as_user_errors():
        pretrained, params = read_model(origin, precision=policy)
    tokenizer = Tokenizer.load(origin)
    if tokenizer.vocab_size > pretrained.config.vocab_size:
        raise UserError(
            f"{origin}: its tokenizer has {tokenizer.vocab_size} tokens and the model "
            f"{pretrained.config.vocab_size}; fetch the tokenizer that belongs to the model"
        )
    experiment = _make_experiment(source, pretrained, folder, data_path)
    existed = Path(folder.path).exists()
    try:
        folder = RunFolder.create(workdir)
        _save(folder, experiment, params, tokenizer, pretrained.labels)
        kept = Path(folder.path) / KEPT_FOLDER
        kept.mkdir()
        for name in KEPT_FILES:
            if (origin / name).exists():
                shutil.copyfile(origin / name, kept / name)
        # Last: config.json marks the folder as a run.
        write_run_files(
            folder,
            experiment,
            tokenizer,
            pretrained.labels,
            auto_choices={},
            hardware=local_hardware(),
        )
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        if existed:
            Path(folder.path).mkdir()
        raise
    return folder


def find_source(source: str) -> Path:
    """Return the folder of a source: itself, or the snapshot of a name on the hub.

    Raises:
      UserError: There is no such folder, and no such name can be fetched.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise UserError(f"{source}: is no folder; give a folder with config.json and safetensors")
    import huggingface_hub

    patterns = [*KEPT_FILES, "*.safetensors", "model.safetensors.index.json"]
    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{source}: is no folder here, and could not be fetched from the hub ({reason}); "
            "give a local folder, or check the name and the network"
        ) from error


def _make_experiment(
    source: str, pretrained: PretrainedConfig, folder: RunFolder, data_path: str
) -> Experiment:
    """Return the settings of an imported run: its task and the data that suit it."""
    config = pretrained.config
    length = min(config.max_length or LONGEST_DEFAULT, LONGEST_DEFAULT)
    tokenizer = TokenizerConfig(kind="file", path=str(folder.tokenizer))
    num_labels = pretrained.num_classes
    tasks: dict[str, tuple[TaskConfig, DataConfig]] = {
        "language_model": (
            LanguageModeling(),
            TextDataConfig(sequence_length=length, tokenizer=tokenizer),
        ),
        "masked_lm": (
            MaskedLanguageModeling(),
            TextDataConfig(sequence_length=length, tokenizer=tokenizer),
        ),
        "classifier": (
            Classification(num_labels=num_labels),
            ClassificationDataConfig(max_length=length, tokenizer=tokenizer),
        ),
        "tagger": (
            Tagging(num_labels=num_labels),
            TokenLabelDataConfig(max_length=length, tokenizer=tokenizer),
        ),
        "encoder_decoder": (
            Translation(),
            BitextDataConfig(max_length=length, tokenizer=tokenizer),
        ),
    }
    task, data = tasks[pretrained.architecture.kind]
    if data_path:
        changes: Any = {"path": data_path}
        data = dataclasses.replace(data, **changes)
    name = Path(source).name or pretrained.family.model_type
    return Experiment(
        name=name, task=task, model=config, data=data, batch_size=8, steps=1, grad_accum_steps=1
    )


def _save(
    folder: RunFolder,
    experiment: Experiment,
    params: Any,
    tokenizer: Tokenizer,
    labels: tuple[str, ...],
) -> None:
    """Write a checkpoint of step 0 with the weights; there is no optimizer state."""
    state = TrainState(
        step=jnp.int32(0),
        cursor=jnp.int32(0),
        params=params,
        optimizer=(),
        key=jax.random.key(experiment.seed),
    )
    record = {PROVENANCE_KEY: collect_provenance(experiment, tokenizer, labels)}
    with CheckpointManager(folder.checkpoints, asynchronous=False) as checkpoints:
        checkpoints.save(0, state, record)


def export_run(
    workdir: str,
    output: str,
    *,
    family: str = "",
    dtype: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> str:
    """Write a run as a folder that `transformers` opens; return its `model_type`.

    Raises:
      UserError: No architecture of transformers has this model (the message names the setting),
        or the folder is not empty or cannot be written. No folder is left behind.
    """
    target = Path(output).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"output {output}: exists and is not empty; give a new folder")
    run = load(workdir)
    kept = Path(str(run.folder.path)) / KEPT_FOLDER
    with as_user_errors():
        original = read_json(kept / "config.json") if (kept / "config.json").exists() else {}
    fields = {name: original[name] for name in original.keys() & WITHOUT_EFFECT}
    fields.pop("torch_dtype", None)
    fields.pop("dtype", None)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        with as_user_errors():
            written = write_model(
                partial,
                run.model,
                run.params,
                family=family or str(original.get("model_type", "")),
                dtype=dtype,
                fields=_token_fields(run) | fields,
                max_shard_bytes=max_shard_bytes,
            )
        _write_tokenizer(run, kept, partial)
        _write_generation_config(run, kept, partial)
        (partial / "README.md").write_text(_model_card(run, written.model_type), encoding="utf-8")
        if target.exists():
            target.rmdir()
        partial.replace(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"output {output}: cannot be written ({reason})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written.model_type


def _token_fields(run: Run) -> dict[str, Any]:
    """Return the fields of config.json that the tokenizer, the data and the labels decide."""
    fields: dict[str, Any] = {"max_position_embeddings": run.experiment.sequence_length}
    if run.tokenizer is not None:
        end = run.tokenizer.eos_token_id
        fields |= {"bos_token_id": end, "eos_token_id": end}
        fields["pad_token_id"] = run.tokenizer.vocabulary.get("[PAD]", end)
        if run.model.config.encoder is not None:
            fields["decoder_start_token_id"] = end
    if run.labels:
        fields["id2label"] = {str(i): name for i, name in enumerate(run.labels)}
        fields["label2id"] = {name: i for i, name in enumerate(run.labels)}
    return fields


def _write_tokenizer(run: Run, kept: Path, folder: Path) -> None:
    """Copy the tokenizer's files of an import; make those of a run with its own tokenizer."""
    if run.tokenizer is None:
        return
    is_imported = (kept / "config.json").exists()
    for name in KEPT_FILES[2:] if is_imported else ():
        if (kept / name).exists():
            shutil.copyfile(kept / name, folder / name)
    if not (folder / "tokenizer.json").exists():
        (folder / "tokenizer.json").write_text(run.tokenizer.to_json(), encoding="utf-8")
    if not (folder / "tokenizer_config.json").exists():
        names = {number: name for name, number in run.tokenizer.vocabulary.items()}
        end = names[run.tokenizer.eos_token_id]
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end,
            "eos_token": end,
            "model_max_length": run.experiment.sequence_length,
        }
        for field, token in (
            ("unk_token", "[UNK]"),
            ("pad_token", "[PAD]"),
            ("cls_token", "[CLS]"),
            ("sep_token", "[SEP]"),
            ("mask_token", "[MASK]"),
        ):
            if token in run.tokenizer.vocabulary:
                settings[field] = token
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _write_generation_config(run: Run, kept: Path, folder: Path) -> None:
    """Copy the file of an import; else write the token ids, for models that generate."""
    name = "generation_config.json"
    if (kept / name).exists():
        shutil.copyfile(kept / name, folder / name)
    elif isinstance(run.experiment.task, LanguageModeling | Translation):
        fields = _token_fields(run)
        ids = {field: fields[field] for field in sorted(fields) if field.endswith("token_id")}
        (folder / name).write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")


def _model_card(run: Run, model_type: str) -> str:
    """Return the text of README.md."""
    experiment, config = run.experiment, run.model.config
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    return (
        "---\nlibrary_name: transformers\ntags:\n- linen-transformer\n---\n\n"
        f"# {experiment.name}\n\n"
        f"A `{model_type}` model of {parameters:,} parameters (padding of the vocabulary included),"
        f" exported by linen-transformer at step {run.step}.\n\n"
        "| setting | value |\n| --- | --- |\n"
        f"| task | {type(experiment.task).__name__} |\n"
        f"| layers | {config.num_layers} |\n| width | {config.d_model} |\n"
        f"| vocabulary | {config.vocab_size} |\n"
        f"| longest training example | {experiment.sequence_length} tokens |\n\n"
        "What it was trained on, and what it is fit for, its author has to add.\n"
    )
