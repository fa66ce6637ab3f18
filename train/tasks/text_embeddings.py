"""Embeddings of texts: a vector for each text, for search, clustering and comparison.

How a model's hidden states become one vector is an `EmbeddingConfig`: that of the files of a model
of sentence-transformers (`train.run_folder.sentence_transformers`), or `usual_config`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from train.errors import UsageError, UserError
from train.tasks.task import TrainedModel
from transformer.models.config import TransformerConfig
from transformer.text_embeddings import EmbeddingPooling, embed_sequences


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """How a text becomes a vector."""

    pooling: EmbeddingPooling = "mean"
    normalize: bool = True
    """Scale vectors to length 1."""
    max_length: int | None = None
    """Most tokens of a text, those that the tokenizer adds included; the rest is cut off."""
    lower_case: bool = False
    """Texts are brought into lower case before the tokenizer."""
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Texts to put before a text, by name."""
    default_prompt: str | None = None
    """Name of the prompt that is used where none is given."""
    pools_prompt: bool = True
    """The tokens of the prompt are a part of the mean."""


def usual_config(model: TransformerConfig) -> EmbeddingConfig:
    """Return the settings of a model whose files have none."""
    return EmbeddingConfig(pooling="last" if model.causal else "mean")


def choose_prompt(
    config: EmbeddingConfig, prompt: str | None = None, prompt_name: str | None = None
) -> str:
    """Return the text to put before each text.

    Raises:
      UsageError: Both are given, the name is not known, or the model leaves prompts out of its
        vectors.
    """
    if prompt is not None and prompt_name is not None:
        raise UsageError("prompt, prompt_name: give one of them")
    if prompt is None:
        name = config.default_prompt if prompt_name is None else prompt_name
        if name is not None and name not in config.prompts:
            known = f"known are {', '.join(config.prompts)}" if config.prompts else "it has none"
            raise UsageError(f"prompt_name {name!r}: is none of the model ({known})")
        prompt = "" if name is None else config.prompts[name]
    if prompt and not config.pools_prompt:
        raise UsageError(
            "prompt: the model leaves the tokens of prompts out of its vectors (include_prompt "
            "false), which is not supported; give prompt ''"
        )
    return prompt


def embed_texts(
    trained: TrainedModel,
    texts: Sequence[str],
    config: EmbeddingConfig,
    *,
    prompt: str = "",
    is_published: bool = False,
) -> np.ndarray:  # [N, D] float32
    """Return the vector of each text. Arguments and errors are those of `encode_texts`.

    Raises:
      UserError: The model has no one stack of layers, too.
    """
    rows = encode_texts(trained, texts, config, prompt=prompt, is_published=is_published)
    try:
        return embed_sequences(
            trained.model,
            trained.params,
            rows,
            pooling=config.pooling,
            normalize=config.normalize,
        )
    except ValueError as error:
        raise UserError(f"embed: {error}") from error


def encode_texts(
    trained: TrainedModel,
    texts: Sequence[str],
    config: EmbeddingConfig,
    *,
    prompt: str = "",
    is_published: bool = False,
) -> list[np.ndarray]:  # N, each [t] int32
    """Return the tokens that the model reads of each text.

    Args:
      trained: The model and its tokenizer.
      texts: N texts.
      config: How they become vectors.
      prompt: Text to put before each.
      is_published: The tokenizer adds all tokens that the model expects around a text. Otherwise a
        text begins with that of a classifier, if its tokenizer adds none.

    Raises:
      UserError: The model has no tokenizer, or a text has no tokens or characters that the
        tokenizer lacks.
    """
    tokenizer = trained.tokenizer
    if tokenizer is None:
        raise UserError("embed: the run's data are no texts; use a run of a language model")
    before, after = tokenizer.added_token_ids
    if not len(before) and not is_published:
        before = np.array([tokenizer.cls_token_id], np.int32)
    limits = (config.max_length, trained.model.config.max_length)
    longest = min((each for each in limits if each is not None), default=None)
    room = None if longest is None else max(0, longest - len(before) - len(after))
    whole = [prompt + text for text in texts]
    if config.lower_case:
        whole = [text.lower() for text in whole]
    encoded = tokenizer.encode_documents(whole)
    rows = [np.concatenate([before, tokens[:room], after]) for tokens in encoded]
    for text, row in zip(texts, rows, strict=True):
        if not len(row):
            raise UserError(f"text {text!r}: has no tokens; give a longer one")
    return rows
