"""The program's name, and foreign packages that hide this project's own.

`python -m train` puts the current folder in front of `sys.path`. A `transformer/` or `configs/` of
the user's own is then imported in place of ours, as is a `train.py`, which even replaces this
program. The console script `linen-transformer` has no such folder in front.
"""

import importlib.util
import pathlib
import sys

import train

SCRIPT = "linen-transformer"
"""Name of the console script."""


def program_name() -> str:
    """Return the words that start this program, for messages."""
    return SCRIPT if pathlib.Path(sys.argv[0]).stem == SCRIPT else "python -m train"


def foreign_packages() -> dict[str, str]:
    """Return the files that `import transformer` and `import configs` would find, if not ours."""
    ours = pathlib.Path(str(train.__file__)).resolve().parents[1]
    found = {}
    for name in ("transformer", "configs"):
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        file = pathlib.Path(spec.origin or next(iter(spec.submodule_search_locations or ()), ""))
        if not file.resolve().is_relative_to(ours / name):
            found[name] = str(file)
    return found


def check_own_packages() -> None:
    """Report foreign packages in one line on standard error; exit if nothing can work with them.

    Without its `configs` the program has no shipped experiments, and everything else works.
    """
    found = foreign_packages()
    if not found:
        return
    is_fatal = "transformer" in found
    print(
        f"{'error' if is_fatal else 'note'}: {' and '.join(found.values())}: imported in place of "
        f"linen-transformer's own {' and '.join(found)}; start {SCRIPT} instead of python -m "
        "train, or rename it",
        file=sys.stderr,
    )
    if is_fatal:
        sys.exit(1)
