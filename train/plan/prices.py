"""What an hour of a chip costs."""

import importlib.resources
import tomllib

from train.data.files import explained, locate
from train.errors import UserError
from train.plan.chips import Chip


def price(chip: Chip, path: str = "") -> float:
    """US dollars for one chip and hour, from a table of the user's own or the one shipped.

    Raises UserError if the file cannot be read or has no number for the chip.
    """
    source = path or "the table of prices"
    with explained(source):
        text = _text(path)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"prices {source}: is not TOML ({error}); write lines like v5e = 1.20"
        ) from error
    found = table.get(chip.name)
    if not isinstance(found, int | float):
        raise UserError(
            f"prices {source}: has no number for {chip.name}; add {chip.name} = 1.20, say"
        )
    return float(found)


def _text(path: str) -> str:
    if path:
        return locate(path).read_text(encoding="utf-8")
    return (importlib.resources.files("train.plan") / "prices.toml").read_text(encoding="utf-8")
