"""The golden files of the shipped experiments: what each resolves to, line by line.

A change of a default shows here as the experiments that it changes. Having read the difference,
renew them:

    python -m tests.configs.renew
"""

from pathlib import Path

from train.registry import find, names
from train.settings import as_text

FOLDER = Path(__file__).parent / "golden"


def golden() -> dict[str, str]:
    """The text of every shipped experiment by the name of its file."""
    return {f"{name.replace(':', '-')}.txt": as_text(find(name)) for name in names()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    for name, text in golden().items():
        (FOLDER / name).write_text(text)
