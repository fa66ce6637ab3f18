"""What the files of a model say about its tokens: those around a text, and those that end one.

The files are those of `transformers`: tokenizer_config.json, special_tokens_map.json,
added_tokens.json, generation_config.json, config.json and chat_template.jinja. What its tokenizer
classes do in code, and no file says, is in `TOKENIZER_CLASSES`. A run's folder has the same files,
written by `settings_files`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from tokenizers import AddedToken

from train.errors import UserError
from train.files import MAX_SETTINGS_BYTES, AnyPath, read_bytes
from transformer.interop.fields import CONFIG_FIELDS

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
GENERATION_FILE = "generation_config.json"

SETTINGS_FILES = (TEMPLATE_FILE, CONFIG_FILE, GENERATION_FILE)
"""Files that `settings_files` may write."""

ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Roles of special tokens, in the order in which `transformers` numbers new ones."""


Vocabulary = Literal["vocab.txt", "vocab.json", "sentencepiece", "tokenizer.json"]
"""Kind of a tokenizer's file, or files (vocab.json and merges.txt)."""


class TokenizerClass(NamedTuple):
    """What a tokenizer class of `transformers` does in code."""

    vocabulary: Vocabulary
    """Kind of its files, besides tokenizer.json."""
    special_tokens: Mapping[str, str]
    """Special tokens by role, where no file names another."""
    before: str = ""
    """Role of the token before every text."""
    after: str = ""
    """Role of the token after every text."""
    num_sentinels: int = 0
    """Tokens `<extra_id_0>` and so on, after the others."""
    normalizes: bool = False
    """Texts are brought into NFC, for vocab.json and merges.txt."""
    word_pattern: str = ""
    """Regular expression that splits texts, for vocab.json and merges.txt; empty: GPT-2's."""


QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_BERT = TokenizerClass(
    "vocab.txt",
    {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
    before="cls_token",
    after="sep_token",
)
_SENTENCEPIECE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_FAIRSEQ = {
    **_SENTENCEPIECE,
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
_ROBERTA = TokenizerClass("vocab.json", _FAIRSEQ, before="cls_token", after="sep_token")
_CAMEMBERT = TokenizerClass("sentencepiece", _FAIRSEQ, before="bos_token", after="eos_token")
_T5_TOKENS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_T5 = TokenizerClass("sentencepiece", _T5_TOKENS, after="eos_token", num_sentinels=100)
_GPT2_TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_GPT2 = TokenizerClass("vocab.json", _GPT2_TOKENS)
_QWEN2_TOKENS = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
_QWEN2 = TokenizerClass("vocab.json", _QWEN2_TOKENS, normalizes=True, word_pattern=QWEN2_WORDS)
_LLAMA = TokenizerClass("sentencepiece", _SENTENCEPIECE)
_GEMMA_TOKENS = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
_GEMMA = TokenizerClass("sentencepiece", _GEMMA_TOKENS)

TOKENIZER_CLASSES = {
    "bert": _BERT,
    "distilbert": _BERT,
    "electra": _BERT,
    "mobilebert": _BERT,
    "bigbird": TokenizerClass(
        "sentencepiece",
        {**_FAIRSEQ, "sep_token": "[SEP]", "cls_token": "[CLS]", "mask_token": "[MASK]"},
        before="cls_token",
        after="sep_token",
    ),
    "roberta": _ROBERTA,
    "bart": _ROBERTA,
    "longformer": _ROBERTA,
    "led": _ROBERTA,
    "mpnet": TokenizerClass(
        "vocab.txt", {**_FAIRSEQ, "unk_token": "[UNK]"}, before="cls_token", after="sep_token"
    ),
    "camembert": _CAMEMBERT,
    "xlmroberta": _CAMEMBERT,
    "t5": _T5,
    "mt5": _T5,
    "umt5": _T5,
    "marian": _T5._replace(num_sentinels=0),
    "pegasus": _T5._replace(num_sentinels=0),
    **dict.fromkeys(("llama", "mistral", "mixtral"), _LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3text"), _GEMMA),
    **dict.fromkeys(("gpt2", "opt", "phi", "gptneo", "gptj"), _GPT2),
    "gptneox": _GPT2._replace(normalizes=True),
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen3", "qwen3moe"), _QWEN2),
}
"""Tokenizer classes by their names without `Tokenizer`, and by the types of models, in lower case
and without signs."""

_USUAL_CLASSES: dict[Vocabulary, TokenizerClass] = {
    "vocab.txt": _BERT,
    "vocab.json": _GPT2,
    "sentencepiece": _LLAMA,
    "tokenizer.json": TokenizerClass("tokenizer.json", {}),
}
"""Classes of vocabularies where the files name none that has such a vocabulary."""


@dataclasses.dataclass(frozen=True)
class TokenizerSettings:
    """What a tokenizer has beside its vocabulary, and is stored with a run."""

    chat_template: str = ""
    """Jinja template of conversations; empty if there is none."""
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Special tokens by role (`eos_token`), as the files name them."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end a generated text (`eos_token_id`), as the files name them."""
    decoder_start_token_id: int | None = None
    """First token that the decoder of an encoder-decoder reads."""
    forced_bos_token_id: int | None = None
    """First token that it writes, whatever it predicts: a language's in M2M-100."""
    num_embeddings: int | None = None
    """Rows of the model's table, if the tokenizer has more tokens."""


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """The JSON files of a model beside its tokenizer; empty where there is none."""

    folder: AnyPath
    tokenizer_config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any]
    added_tokens_map: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    config: Mapping[str, Any]
    template: str | None
    """Text of chat_template.jinja."""
    vocabulary: Vocabulary

    @classmethod
    def read(cls, folder: AnyPath, vocabulary: Vocabulary) -> ModelFiles:
        """Read the files of a folder that has a vocabulary of this kind.

        Raises:
          UserError: One is damaged.
        """
        template = folder / TEMPLATE_FILE
        return cls(
            folder,
            _read_object(folder / CONFIG_FILE),
            _read_object(folder / TOKENS_FILE),
            _read_object(folder / ADDED_FILE),
            _read_object(folder / GENERATION_FILE),
            _read_object(folder / "config.json"),
            _read(template) if template.exists() else None,
            vocabulary,
        )

    @property
    def tokenizer_class(self) -> TokenizerClass:
        """The class that the files name, or the usual one of the model."""
        name = self.tokenizer_config.get("tokenizer_class") or self.config.get("tokenizer_class")
        name = str(name or self.config.get("model_type")).lower()
        found = TOKENIZER_CLASSES.get(re.sub(r"[-_]|tokenizer(fast)?$", "", name))
        if found is None or self.vocabulary not in (found.vocabulary, "tokenizer.json"):
            return _USUAL_CLASSES[self.vocabulary]
        return found

    @property
    def named_tokens(self) -> dict[str, str]:
        """Special tokens by role (`eos_token`) that the files name."""
        values = {**self.special_tokens_map, **self.tokenizer_config}
        named = {name: _content(value) for name, value in values.items() if name.endswith("_token")}
        return {name: text for name, text in named.items() if text}

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by role, those that the class has by default included."""
        return {**self.tokenizer_class.special_tokens, **self.named_tokens}

    @property
    def chat_template(self) -> str:
        """Jinja source of the default template; empty if there is none."""
        template = self.tokenizer_config.get("chat_template")
        if self.template is not None:
            template = self.template
        if isinstance(template, list):  # several, by name
            named = {
                each.get("name"): each.get("template")
                for each in template
                if isinstance(each, dict)
            }
            template = named.get("default")
        return template if isinstance(template, str) else ""

    def added_tokens(self, *, in_normalized: bool = True) -> list[tuple[int, AddedToken]]:
        """Return the tokens that the files add to a vocabulary, by their ids, ascending.

        Without `in_normalized`, none is looked for in the normalized text.

        Raises:
          UserError: A file is malformed.
        """
        special = {*self.named_tokens.values()}
        names = {**self.special_tokens_map, **self.tokenizer_config}
        found: dict[int, AddedToken] = {}
        try:
            special |= {_content(each) for each in names.get("additional_special_tokens") or []}
            for text, number in self.added_tokens_map.items():
                normalized = in_normalized and text not in special
                token = AddedToken(text, special=text in special, normalized=normalized)
                found[int(number)] = token
            for key, value in (self.tokenizer_config.get("added_tokens_decoder") or {}).items():
                flags = {
                    name: bool(value.get(name))
                    for name in ("special", "lstrip", "rstrip", "single_word")
                }
                normalized = in_normalized and bool(value.get("normalized"))
                text = str(value["content"])
                found[int(key)] = AddedToken(text, normalized=normalized, **flags)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.folder}: its added tokens are malformed ({error}); fetch {CONFIG_FILE} and "
                f"{ADDED_FILE} again"
            ) from error
        return sorted(found.items())

    def sentinels(self, num_tokens: int) -> list[tuple[int, AddedToken]]:
        """Return T5's sentinels, after a vocabulary of this size: their numbers descend."""
        count = self.tokenizer_config.get("extra_ids", self.tokenizer_class.num_sentinels)
        if type(count) is not int:
            raise UserError(f"{self.folder / CONFIG_FILE}: extra_ids is no number; fetch it again")
        numbers = range(count - 1, -1, -1)
        return [
            (token_id, AddedToken(f"<extra_id_{number}>", special=True, normalized=False))
            for token_id, number in enumerate(numbers, start=num_tokens)
        ]

    def settings(self, vocabulary: Mapping[str, int]) -> TokenizerSettings:
        """Return the settings of a tokenizer with this vocabulary."""
        special = self.special_tokens
        generation, config = self.generation_config, self.config
        ids = frozenset(vocabulary.values())
        ends = _token_ids(generation.get("eos_token_id"), ids)
        starts = [each.get("decoder_start_token_id") for each in (generation, config)]
        model_type = config.get("model_type")
        if model_type in ("t5", "mt5", "umt5"):
            starts.append(config.get("pad_token_id", 0))
        if model_type in CONFIG_FIELDS:
            starts.append(CONFIG_FIELDS[model_type].defaults.get("decoder_start_token_id"))
        start = [token for each in starts for token in _token_ids(each, ids)]
        # In generation_config.json null is a value too: its writer wants none.
        name = "forced_bos_token_id"
        forced = _token_ids((generation if name in generation else config).get(name), ids)
        rows = self.tokenizer_config.get("num_embeddings")
        return TokenizerSettings(
            self.chat_template,
            {role: text for role, text in special.items() if text in vocabulary},
            ends or _token_ids(config.get("eos_token_id"), ids),
            start[0] if start else None,
            forced[0] if forced else None,
            rows if isinstance(rows, int) else None,
        )


def settings_files(settings: TokenizerSettings, end_token_ids: tuple[int, ...]) -> dict[str, str]:
    """Return the files to write beside a tokenizer, by name, for `ModelFiles` to read."""
    files: dict[str, str] = {}
    if settings.chat_template:
        files[TEMPLATE_FILE] = settings.chat_template
    tokenizer: dict[str, Any] = dict(settings.special_tokens)
    if settings.num_embeddings is not None:
        tokenizer["num_embeddings"] = settings.num_embeddings
    generation: dict[str, Any] = {}
    if end_token_ids:
        generation["eos_token_id"] = list(end_token_ids)
    if settings.decoder_start_token_id is not None:
        generation["decoder_start_token_id"] = settings.decoder_start_token_id
    if settings.forced_bos_token_id is not None:
        generation["forced_bos_token_id"] = settings.forced_bos_token_id
    for name, content in ((CONFIG_FILE, tokenizer), (GENERATION_FILE, generation)):
        if content:
            files[name] = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return files


def _token_ids(value: Any, known: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens of a field that is a number, a list or null; unknown ones are left out."""
    values = value if isinstance(value, list) else [value]
    return tuple(each for each in values if type(each) is int and each in known)


def _content(value: Any) -> str:
    """Return a token of tokenizer_config.json: its text, or an object with it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _read_object(file: AnyPath) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error}); fetch it again") from error
    return content if isinstance(content, dict) else {}


def _read(file: AnyPath) -> str:
    return decode_text(file, read_bytes(file, MAX_SETTINGS_BYTES))


def decode_text(file: AnyPath, data: bytes) -> str:
    """Return the text of a file, without a byte order mark.

    Raises:
      UserError: It is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}; fetch it again") from error
