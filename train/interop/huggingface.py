"""Hugging Face models as runs: `import_model` makes a run folder.

It adds to what `transformer.interop` reads what a run has beside its model: a tokenizer, labels,
settings of its task and data, a checkpoint. `huggingface_export` has the other direction.
"""

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
from etils import epath

from train.checkpoint.manager import CheckpointManager
from train.data.bitext import BitextDataConfig
from train.data.data_config import DataConfig, TextDataConfig, TokenizerConfig
from train.data.question_answers import QuestionAnsweringDataConfig
from train.data.text_labels import ClassificationDataConfig
from train.data.token_labels import TokenLabelDataConfig
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.experiment import Experiment
from train.files import expand_path
from train.run_folder.base_weights import BASE_KEY, base_digest, save_base
from train.run_folder.folder import RunFolder
from train.run_folder.provenance import PROVENANCE_KEY, collect_provenance
from train.run_folder.run_config import write_run_files
from train.run_folder.sentence_transformers import (
    EMBEDDING_FILES,
    POOLING_PATTERN,
    embedding_files,
    read_embedding_config,
)
from train.runtime.local_hardware import local_hardware
from train.runtime.stages import stage
from train.state import TrainState
from train.tasks.classification import Classification, Tagging
from train.tasks.language_modeling import LanguageModeling
from train.tasks.masked_language_modeling import MaskedLanguageModeling
from train.tasks.question_answering import QuestionAnswering
from train.tasks.task import TaskConfig
from train.tasks.translation import Translation
from train.telemetry.event_log import EventLog
from train.warm_start.lora_start import adapter_settings, read_run_adapter
from transformer.interop.fields import InteropError
from transformer.interop.pretrained import PretrainedConfig, read_model
from transformer.precision import Precision

log = logging.getLogger(__name__)

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
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "encoder.json",
    "merges.txt",
)
"""Files without weights that survive import and export."""

MAX_DEFAULT_LENGTH = 1024
"""Most tokens of a training example of an imported model."""


@contextlib.contextmanager
def as_user_errors() -> Iterator[None]:
    """Raise a UserError in place of an error of the files."""
    try:
        yield
    except InteropError as error:
        raise UserError(str(error)) from error


def import_model(
    source: str,
    workdir: str,
    *,
    data_path: str = "",
    precision: str = "float32",
    adapter: str = "",
) -> RunFolder:
    """Make a run folder of a Hugging Face model.

    Args:
      source: Local folder, or a name on the hub (`HF_HUB_OFFLINE=1` reads its cache alone).
      workdir: Folder of the run; it must be new or empty.
      data_path: Data to evaluate on, as `data.path` of the run's settings.
      precision: Precision policy of the run.
      adapter: Folder of a LoRA adapter of PEFT for the model. The run is a LoRA run then.

    Raises:
      UserError: The model or its tokenizer cannot be read, or the folder cannot be written. No
        folder is left behind.
    """
    existed = expand_path(os.fspath(workdir)).exists()
    folder = RunFolder.create(workdir)
    if any(folder.path.iterdir()):
        raise UserError(f"workdir {workdir}: is not empty; give a new folder")
    try:
        _import_into(folder, source, data_path, precision, adapter)
    except BaseException:
        epath.Path(folder.path).rmtree()
        if existed:
            folder.path.mkdir()
        raise
    return folder


def _import_into(
    folder: RunFolder, source: str, data_path: str, precision: str, adapter_folder: str
) -> None:
    """Read a model, and write the run to an empty folder."""
    origin = find_source(source)
    try:
        policy = Precision.parse(precision).resolve(local_hardware())
    except ValueError as error:
        raise UserError(str(error)) from error
    embedding = read_embedding_config(origin)  # refuses modules before weights are read
    with as_user_errors(), stage("reading weights", total=1) as progress:
        pretrained, params = read_model(origin, precision=policy, on_progress=progress.advance)
    for note in pretrained.notes:
        log.warning("%s: %s", origin, note)
    if embedding is not None:
        log.warning(
            "%s: is a model of sentence-transformers; embed gives its vectors (pooling %s%s%s), "
            "for which a head has no effect",
            origin,
            embedding.pooling,
            ", normalized" if embedding.normalize else "",
            f", at most {embedding.max_length} tokens" if embedding.max_length else "",
        )
    tokenizer = Tokenizer.load(origin).with_num_embeddings(pretrained.config.vocab_size)
    if surplus := tokenizer.num_tokens - tokenizer.vocab_size:
        log.warning(
            "%s: its tokenizer has %s more than the model's table has rows; a text that needs one "
            "is refused",
            origin,
            "1 token" if surplus == 1 else f"{surplus} tokens",
        )
    task, data = _task_and_data(pretrained, data_path, str(folder.tokenizer.absolute()))
    experiment = Experiment(
        name=Path(source).name or pretrained.family.model_type,
        task=task,
        model=pretrained.config,
        data=data,
        batch_size=8,
        steps=1,
        grad_accum_steps=1,
    )
    adapter = None
    if adapter_folder:
        model_type = pretrained.family.model_type
        adapter = read_run_adapter(adapter_folder, pretrained.make_model(), model_type)
        lora = dataclasses.replace(experiment.lora, train_fully=())
        lora = adapter_settings(adapter, lora, adapter_folder)
        experiment = dataclasses.replace(experiment, lora=lora)
    record: dict[str, Any] = {
        PROVENANCE_KEY: collect_provenance(experiment, tokenizer, pretrained.labels)
    }
    if adapter is not None:
        trainable = jax.tree.map(jnp.asarray, adapter.trainable)
        save_base(folder, params, trainable)
        params = trainable
        record[BASE_KEY] = base_digest(folder)
    # Step 0 of a run, without an optimizer state.
    state = TrainState(
        step=jnp.int32(0),
        cursor=jnp.int32(0),
        params=params,
        optimizer=(),
        key=jax.random.key(experiment.seed),
    )
    with CheckpointManager(folder.checkpoints, asynchronous=False) as checkpoints:
        checkpoints.save(0, state, record)
    folder.pretrained.mkdir()
    for name in (*KEPT_FILES, *embedding_files(origin)):
        if (origin / name).exists():
            (folder.pretrained / name).parent.mkdir(exist_ok=True)
            (folder.pretrained / name).write_bytes((origin / name).read_bytes())
    if pretrained.multimodal:
        (folder.pretrained / "config.json").write_text(json.dumps(pretrained.fields, indent=2))
    # Last: config.json marks the folder as a run.
    write_run_files(
        folder,
        experiment,
        tokenizer,
        pretrained.labels,
        auto_choices={},
        hardware=local_hardware(),
    )
    EventLog(folder.event_log).write("saved", step=0)


def find_source(source: str) -> Path:
    """Return the folder of a source: itself, or the snapshot of a name on the hub.

    Raises:
      UserError: There is no such folder, and no such name can be fetched.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise UserError(f"{source}: is not a folder; give one with config.json and safetensors")
    patterns = [*KEPT_FILES, *EMBEDDING_FILES, POOLING_PATTERN]
    patterns += ["*.safetensors", "model.safetensors.index.json"]
    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{source}: is not a folder here, and could not be fetched from the hub "
            f"({reason}); give a local folder, or check the name and the network"
        ) from error


def _task_and_data(
    pretrained: PretrainedConfig, data_path: str, tokenizer_path: str
) -> tuple[TaskConfig, DataConfig]:
    """Return the task of a model, and settings of data that suit it."""
    length = min(pretrained.config.max_length or MAX_DEFAULT_LENGTH, MAX_DEFAULT_LENGTH)
    tokenizer = TokenizerConfig(kind="file", path=tokenizer_path)
    text = TextDataConfig(path=data_path, sequence_length=length, tokenizer=tokenizer)
    num_labels = pretrained.num_classes
    match pretrained.architecture.kind:
        case "language_model":
            return LanguageModeling(), text
        case "masked_lm":
            return MaskedLanguageModeling(), text
        case "classifier":
            task = Classification(
                num_labels=num_labels,
                pooling=pretrained.pooling,
                end_token=pretrained.end_token,
                classifier_bias=pretrained.architecture.head_bias,
            )
            return task, ClassificationDataConfig(
                path=data_path, max_length=length, tokenizer=tokenizer
            )
        case "tagger":
            return Tagging(num_labels=num_labels), TokenLabelDataConfig(
                path=data_path, max_length=length, tokenizer=tokenizer
            )
        case "question_answering":
            # As in the examples of transformers, but for short models.
            length = min(length, QuestionAnsweringDataConfig.max_length)
            return QuestionAnswering(), QuestionAnsweringDataConfig(
                path=data_path, max_length=length, overlap=length // 3, tokenizer=tokenizer
            )
        case "encoder_decoder":
            return Translation(), BitextDataConfig(
                path=data_path, max_length=length, tokenizer=tokenizer
            )
