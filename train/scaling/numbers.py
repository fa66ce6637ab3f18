"""Counts with suffixes: `1.5M` on the command line, in tables and in names of runs."""

import math

from train.errors import UsageError

_SUFFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def parse_counts(text: str, flag: str) -> list[float]:
    """Return the numbers of a list such as `100k,1.5M,2e7`, in order and without duplicates.

    Raises:
      UsageError: An entry is not a positive number.
    """
    return list(dict.fromkeys(_parse_count(entry.strip(), flag) for entry in text.split(",")))


def _parse_count(entry: str, flag: str) -> float:
    scale = _SUFFIXES.get(entry[-1:], 1.0)
    digits = entry[:-1] if scale != 1 else entry
    try:
        # Through one rounding of the decimal text: 1.1 * 1e6 is not 1100000.
        value = float(digits) if scale == 1 else float(f"{digits}e{round(math.log10(scale))}")
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{flag} {entry}: is not a positive number; give one such as 500k or 2e6")
    return value


def format_count(value: float) -> str:
    """Return a count with three significant digits and a suffix: 1.23M."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * scale:
            return f"{float(f'{value / scale:.3g}'):g}{suffix}"
    return f"{value:.3g}"
