"""Files of sentence-transformers: how the hidden states of a model become the vector of a text.

`import` keeps them among the small files of a run's model, `embed` reads them, and `export` writes
them back. modules.json lists the steps: the model, a pooling with a folder of its own, and
sometimes a normalization.
"""

from pathlib import Path
from typing import Any

from train.errors import UserError
from train.files import AnyPath
from train.run_folder.folder import read_json
from train.tasks.text_embeddings import EmbeddingConfig
from transformer.text_embeddings import EmbeddingPooling

MODULES = "modules.json"
POOLING_PATTERN = "*_Pooling/config.json"
PROMPTS = "config_sentence_transformers.json"
LENGTHS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file with the length and the case of texts; earlier versions had one a type."""

EMBEDDING_FILES = (MODULES, PROMPTS, *LENGTHS)

POOLINGS: dict[str, EmbeddingPooling] = {
    "cls": "first",
    "mean": "mean",
    "max": "max",
    "lasttoken": "last",
}
"""Poolings by the names of sentence-transformers; others are refused by name."""

MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Fields of a pooling's config.json, each true or false, by the names of the poolings."""


def embedding_files(folder: AnyPath) -> list[str]:
    """Return the names of the files of a folder that `read_embedding_config` reads, if any."""
    if not (folder / MODULES).exists():
        return []
    pooling = [f"{path}/config.json" for kind, path in _read_modules(folder) if kind == "Pooling"]
    return [name for name in (*EMBEDDING_FILES, *pooling) if (folder / name).exists()]


def read_embedding_config(folder: AnyPath) -> EmbeddingConfig | None:
    """Return the settings of a folder of sentence-transformers; None for other folders.

    Raises:
      UserError: A file is missing or damaged, or a step is not supported (named).
    """
    if not (folder / MODULES).exists():
        return None
    modules = _read_modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{folder / MODULES}: modules {', '.join(kinds)} are not supported, only Transformer, "
            f"Pooling and Normalize; in a copy without {MODULES} the model is read as a plain one"
        )
    lengths = [name for name in LENGTHS if (folder / name).exists()]
    text = _read_object(folder / lengths[0]) if lengths else {}
    named = _read_object(folder / PROMPTS) if (folder / PROMPTS).exists() else {}
    pooling_file = folder / modules[1][1] / "config.json"
    pooling = _read_object(pooling_file)
    prompts, default = named.get("prompts"), named.get("default_prompt_name")
    return EmbeddingConfig(
        pooling=_find_pooling(pooling, pooling_file),
        normalize="Normalize" in kinds,
        max_length=_find_max_length(folder, text),
        lower_case=bool(text.get("do_lower_case", False)),
        prompts=prompts if isinstance(prompts, dict) else {},
        default_prompt=default if isinstance(default, str) else None,
        pools_prompt=bool(pooling.get("include_prompt", True)),
    )


def _read_modules(folder: AnyPath) -> list[tuple[str, str]]:
    """Return the class of each module, without its package, and its folder."""
    path = folder / MODULES
    modules = read_json(path)
    try:
        found = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in modules]
    except (TypeError, KeyError) as error:
        raise UserError(f"{path}: is no list of modules; fetch it again") from error
    for kind, name in found:
        # The model itself is beside the list. Other names could lead out of the folder.
        is_folder = name == Path(name).name and name not in ("", "..")
        if is_folder == (kind == "Transformer"):
            raise UserError(
                f"{path}: {kind} in folder {name!r} is not supported; save the model again with "
                "sentence-transformers"
            )
    return found


def _find_pooling(fields: dict[str, Any], file: AnyPath) -> EmbeddingPooling:
    modes = [name for field, name in MODES.items() if fields.get(field) is True]
    if (named := fields.get("pooling_mode")) is not None:
        modes = list(map(str, named)) if isinstance(named, list) else [str(named)]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        found = " and ".join(modes) or "none"
        raise UserError(
            f"{file}: pooling {found} is not supported; only one of {', '.join(POOLINGS)}"
        )
    return POOLINGS[modes[0]]


def _find_max_length(folder: AnyPath, text: dict[str, Any]) -> int | None:
    """Return `max_seq_length`, or else the smaller limit of the tokenizer and the model."""
    limits = [text.get("max_seq_length")]
    if limits == [None]:
        places = {
            "tokenizer_config.json": "model_max_length",
            "config.json": "max_position_embeddings",
        }
        limits = [
            _read_object(folder / name).get(field)
            for name, field in places.items()
            if (folder / name).exists()
        ]
    return min((each for each in limits if type(each) is int and each > 0), default=None)


def _read_object(path: AnyPath) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: is no JSON object; fetch it again")
    return value
