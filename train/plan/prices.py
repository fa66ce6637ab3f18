"""What an hour of a chip costs."""

import importlib.resources
import tomllib
from typing import Any

from train.data.files import as_user_error, expand_path
from train.errors import UserError
from train.plan.chips import Chip
from train.regular_files import SETTINGS_BYTES, read_bytes

MAX_DOLLARS_PER_HOUR = 1e9
"""Dollars of an hour, beyond which a number is no price."""


def chip_price(chip: Chip, path: str = "") -> float:
    """US dollars for one chip and hour, from a table of the user's own or the one shipped.

    Raises UserError if the file cannot be read or has no number for the chip.
    """
    found = load_prices(path).get(chip.name)
    if (
        isinstance(found, bool)
        or not isinstance(found, int | float)
        or not 0 <= found < MAX_DOLLARS_PER_HOUR
    ):
        raise UserError(
            f"prices {_source(path)}: has no price for {chip.name}; add {chip.name} = 1.20, say"
        )
    return float(found)


def load_prices(path: str = "") -> dict[str, Any]:
    """Return the table of a file, or the one shipped (UserError: it cannot be read)."""
    source = _source(path)
    with as_user_error(source):
        data = _data(path)
    try:
        table: dict[str, Any] = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"prices {source}: is not TOML ({error}); write lines like v5e = 1.20"
        ) from error
    return table


def _source(path: str) -> str:
    return path or "the table of prices"


def _data(path: str) -> bytes:
    if path:
        return read_bytes(expand_path(path), SETTINGS_BYTES)
    return (importlib.resources.files("train.plan") / "prices.toml").read_bytes()
