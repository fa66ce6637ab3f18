"""Settings beside a tokenizer: chat templates, and the names and ids of added tokens."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from train.data.files import AnyPath, expand_path
from train.errors import UserError, as_user_error
from train.run_folder.regular_files import MAX_SETTINGS_BYTES, read_bytes

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"


class ChatFiles(NamedTuple):
    """Settings of conversations in the files beside a tokenizer."""

    template: str = ""
    """Jinja source; empty if there is none."""
    special_tokens: dict[str, str] = {}  # noqa: RUF012
    """Special tokens by name: `eos_token`."""


def load_chat_files(path: str) -> ChatFiles:
    """Read the files in a tokenizer's folder, or beside a tokenizer's file.

    Raises:
      UserError: One is damaged.
    """
    folder = expand_path(path)
    with as_user_error(path):
        if not folder.is_dir():
            folder = folder.parent
        config = _read_object(folder / CONFIG_FILE)
        tokens = _read_object(folder / TOKENS_FILE) | config
        template = config.get("chat_template", "")
        if (folder / TEMPLATE_FILE).exists():
            template = _read(folder / TEMPLATE_FILE)
    if isinstance(template, list):  # several, by name
        named = {
            each.get("name"): each.get("template") for each in template if isinstance(each, dict)
        }
        template = named.get("default")
    names = {name: _content(value) for name, value in tokens.items() if name.endswith("_token")}
    special = {name: text for name, text in names.items() if text}
    return ChatFiles(template if isinstance(template, str) else "", special)


class AddedToken(NamedTuple):
    """A token beyond those of a tokenizer's model, or one of them that is special."""

    id: int
    text: str
    special: bool = False
    normalized: bool = False
    """Looked for in the normalized text."""


def load_added_tokens(folder: AnyPath, num_pieces: int) -> list[AddedToken]:
    """Read the tokens that the settings in a folder add to a model of so many pieces.

    Raises:
      UserError: A file is damaged.
    """
    config = _read_object(folder / CONFIG_FILE)
    names = _read_object(folder / TOKENS_FILE) | config
    special = {_content(value) for name, value in names.items() if name.endswith("_token")}
    special |= {_content(each) for each in names.get("additional_special_tokens") or []}
    found: dict[int, AddedToken] = {}
    try:
        for text, number in _read_object(folder / ADDED_FILE).items():
            found[int(number)] = AddedToken(int(number), text, text in special)
        for key, value in (config.get("added_tokens_decoder") or {}).items():
            text, is_special = str(value["content"]), bool(value.get("special"))
            found[int(key)] = AddedToken(
                int(key), text, is_special, bool(value.get("normalized")) and not is_special
            )
        if not found:  # T5's sentinels are counted, and their numbers descend
            sentinels = range(int(config.get("extra_ids", 0)) - 1, -1, -1)
            for number, sentinel in enumerate(sentinels, start=num_pieces):
                found[number] = AddedToken(number, f"<extra_id_{sentinel}>", special=True)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder}: its added tokens are malformed ({error}); fetch {CONFIG_FILE} and "
            f"{ADDED_FILE} again"
        ) from error
    return list(found.values())


def chat_files(template: str, special_tokens: dict[str, str]) -> dict[str, str]:
    """Return the files to write beside a tokenizer, by name."""
    files = {TEMPLATE_FILE: template} if template else {}
    if special_tokens:
        files[CONFIG_FILE] = json.dumps(special_tokens, indent=2, ensure_ascii=False) + "\n"
    return files


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
    try:
        return read_bytes(file, MAX_SETTINGS_BYTES).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}; fetch it again") from error
