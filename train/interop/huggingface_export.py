"""Runs as Hugging Face folders: weights, tokenizer and settings that `transformers` opens."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import jax

from train.data.bitext import find_start_token, sentence_ends, target_frame
from train.data.chat_template import end_tokens
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_settings import TEMPLATE_FILE
from train.errors import UserError, as_user_error
from train.interop.huggingface import KEPT_FILES, as_user_errors
from train.interop.lora_export import base_params, check_is_lora, export_adapter
from train.run import Run, load
from train.run_folder.sentence_transformers import embedding_files
from train.runtime.stages import stage
from train.tasks.translation import Translation
from transformer.interop.families import express
from transformer.interop.fields import GENERATION, InteropError, is_kept
from transformer.interop.pretrained import MAX_SHARD_BYTES, write_model
from transformer.interop.weight_files import read_json
from transformer.layers.low_rank import merge_weights
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.language_model import LanguageModel

Weights = Literal["merged", "adapter", "base"]
"""Weights of a run to export."""


def export_run(
    workdir: str,
    output: str,
    *,
    family: str = "",
    dtype: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    weights: Weights = "merged",
) -> str:
    """Write a run as a folder that `transformers` or PEFT opens; return its `model_type`.

    Args:
      workdir: Folder of the run.
      output: Folder to write.
      family: `model_type` to write; default: that of the import, or the first that fits.
      dtype: Dtype of the weights; default: that of the run's parameters.
      max_shard_bytes: Size above which the weights are split into several files.
      weights: `merged`: all weights. Of a LoRA run also `adapter`, the adapter alone for PEFT, and
        `base`, the weights that it adapts.

    Raises:
      UserError: No architecture of transformers has this model (the message names the setting),
        or the folder is not empty or cannot be written. No folder is left behind.
    """
    target = Path(output).expanduser().resolve()
    if target == Path.cwd():
        raise UserError(f"output {output}: is the current folder; give the name of a new one")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"output {output}: exists and is not empty; give a new folder")
    run = load(workdir)
    if weights != "merged":
        check_is_lora(run, weights)
    family = family or _known_family(run)
    # Beside the target, so that the last step is a rename within one file system.
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with as_user_error(f"output {output}"), as_user_errors():
            partial.mkdir(parents=True)
            if weights == "adapter":
                model_type = export_adapter(run, partial, family=family, dtype=dtype)
            else:
                if weights == "base":
                    run = dataclasses.replace(run, params=base_params(run), step=0)
                run = dataclasses.replace(run, params=merge_weights(run.params))
                model_type = _write_run(run, partial, family, dtype, max_shard_bytes)
            if target.exists():
                target.rmdir()
            partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return model_type


def _write_run(run: Run, folder: Path, family: str, dtype: str, max_shard_bytes: int) -> str:
    """Write weights, settings and tokenizer to a folder; return the `model_type`."""
    source = run.folder.pretrained / "config.json"
    # The dtype is that of the weights that are written, which may differ from the import's.
    decided_here = {"torch_dtype", "dtype", "quantization_config", "compression_config"}
    if run.labels:  # those of the import may be others
        decided_here |= {"id2label", "label2id", "num_labels", "problem_type"}
    fields = {
        name: value
        for name, value in (read_json(source) if source.exists() else {}).items()
        if is_kept(name, run.folder.model_type) and name not in decided_here
    }
    with stage("writing weights", total=1) as progress:
        written = write_model(
            folder,
            run.model,
            run.params,
            family=family,
            dtype=dtype,
            fields=_token_fields(run) | fields,
            max_shard_bytes=max_shard_bytes,
            on_progress=progress.advance,
        )
    _write_tokenizer(run, folder)
    for name in embedding_files(run.folder.pretrained):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((run.folder.pretrained / name).read_bytes())
    _write_generation_config(run, folder)
    (folder / "README.md").write_text(_model_card(run, written.model_type), encoding="utf-8")
    return written.model_type


def _known_family(run: Run) -> str:
    """Return the `model_type` that a run's weights come from, if it has the run's model."""
    try:
        return express(run.model, run.folder.model_type)[0].model_type
    except InteropError:
        return ""


def _token_fields(run: Run) -> dict[str, Any]:
    """Return the fields of config.json that the tokenizer, the data and the labels decide."""
    fields: dict[str, Any] = {"max_position_embeddings": run.experiment.sequence_length}
    if run.tokenizer is not None:
        names, ids = _special_tokens(run.tokenizer), run.tokenizer.vocabulary
        # Null, where there is none: the defaults may be beyond the vocabulary, or words.
        fields |= {
            f"{role}_id": ids.get(names.get(role, "")) for role in ("bos_token", "pad_token")
        }
        fields["eos_token_id"] = next(iter(_end_tokens(run)), None)
        if run.model.config.encoder is not None:
            name = getattr(run.experiment.task, "start_token", "")
            fields["decoder_start_token_id"] = find_start_token(run.tokenizer, name)
    if run.labels:
        fields["id2label"] = {str(i): name for i, name in enumerate(run.labels)}
        fields["label2id"] = {name: i for i, name in enumerate(run.labels)}
    return fields


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return special tokens by role: those of the model's files, or what they are here."""
    names = {number: name for name, number in tokenizer.vocabulary.items()}
    own = {
        "eos_token": names[tokenizer.eos_token_id],
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    known = {role: text for role, text in own.items() if text in tokenizer.vocabulary}
    return known | tokenizer.special_token_names


def _end_tokens(run: Run) -> list[int]:
    """Return the tokens that end a text and that the model can write."""
    assert run.tokenizer is not None
    translates = run.model.config.encoder is not None
    ends = sentence_ends(run.tokenizer) if translates else end_tokens(run.tokenizer)
    return [each for each in ends if each < run.model.config.vocab_size]


def _write_tokenizer(run: Run, folder: Path) -> None:
    """Copy the tokenizer's files of an import; make those of a run with its own tokenizer."""
    if run.tokenizer is None:
        return
    for name in KEPT_FILES[2:]:
        source = run.folder.pretrained / name
        if source.exists():
            (folder / name).write_bytes(source.read_bytes())
    if run.tokenizer.chat_template:  # of the run: data.chat_template may have replaced it
        (folder / TEMPLATE_FILE).write_text(run.tokenizer.chat_template, encoding="utf-8")
    if not (folder / "tokenizer.json").exists():
        (folder / "tokenizer.json").write_text(run.tokenizer.to_json(), encoding="utf-8")
    if not (folder / "tokenizer_config.json").exists():
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **_special_tokens(run.tokenizer),
            "model_max_length": run.experiment.sequence_length,
        }
        _write_json(folder / "tokenizer_config.json", settings)


def _write_generation_config(run: Run, folder: Path) -> None:
    """Write how models that generate do, as the import has it, with all tokens that end a text."""
    if run.tokenizer is None or not isinstance(run.model, LanguageModel | EncoderDecoder):
        return
    source = run.folder.pretrained / "generation_config.json"
    if source.exists():
        fields = read_json(source)
    else:  # transformers takes them from config.json where there is no such file
        config = read_json(folder / "config.json")
        names = [each for each in sorted(config) if each in GENERATION or each.endswith("token_id")]
        fields = {each: config[each] for each in names if config[each] is not None}
    task = run.experiment.task
    if isinstance(task, Translation) and task.target_language:
        frame = target_frame(run.tokenizer, task.start_token, task.target_language)
        fields |= {"decoder_start_token_id": frame.start, "forced_bos_token_id": frame.forced}
    known = fields.get("eos_token_id", [])
    ends = [*(known if isinstance(known, list) else [known]), *_end_tokens(run)]
    if ends := [each for each in dict.fromkeys(ends) if each is not None]:
        fields["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    _write_json(folder / "generation_config.json", fields)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
