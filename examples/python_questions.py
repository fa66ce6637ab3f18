"""Write questions on Python's library and their answers, for instruction tuning.

    python examples/python_questions.py [questions.jsonl [pairs.jsonl]]

The answers are the first sentences of docstrings of the standard library of the Python that runs
this: no network. In the pairs, for preference optimization, the rejected answer is a sentence from
further down the same docstring: a detail in place of what the thing does.
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODULES = """
argparse ast bisect calendar collections copy csv datetime decimal difflib email.message enum
fileinput fractions functools glob gzip heapq html http.client inspect io ipaddress itertools json
logging mailbox math operator os os.path pathlib pickle queue random re shlex shutil socket
statistics string struct subprocess tarfile tempfile textwrap threading time tokenize traceback
types unittest urllib.parse urllib.request uuid warnings weakref zipfile"""


def documented(module_name: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a module's functions, classes and methods, and their docstrings."""
    module = importlib.import_module(module_name)
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if callable(value):
            yield f"{module_name}.{name}", inspect.getdoc(value) or ""
        if inspect.isclass(value):
            for inner, method in sorted(vars(value).items()):
                if not inner.startswith("_") and callable(method):
                    yield f"{module_name}.{name}.{inner}", inspect.getdoc(method) or ""


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring in one line; "" if it does not begin with one."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.])\s", paragraph)[0]
    return sentence if re.fullmatch("[A-Z].{9,158}[.]", sentence) else ""


def detail(text: str) -> str:
    """Return the first sentence after the first paragraph of a docstring; empty if none."""
    return next(filter(None, map(first_sentence, text.strip().split("\n\n")[1:])), "")


def write_lines(path: str, records: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))
    print(f"{len(records):,} records in {path}")


def main(path: str = "questions.jsonl", pairs_path: str = "") -> None:
    """Write the questions with their answers, and optionally the preference pairs."""
    answers: dict[str, tuple[str, str]] = {}
    for module in MODULES.split():
        for name, text in documented(module):
            if answer := first_sentence(text):
                answers.setdefault(name, (answer, detail(text)))
    questions, pairs = [], []
    for name, (answer, other) in answers.items():
        question = {"role": "user", "content": f"What does {name} do?"}
        reply, rejected = ({"role": "assistant", "content": text} for text in (answer, other))
        questions.append({"messages": [question, reply]})
        if other:
            pairs.append({"prompt": [question], "chosen": [reply], "rejected": [rejected]})
    write_lines(path, questions)
    if pairs_path:
        write_lines(pairs_path, pairs)


if __name__ == "__main__":
    main(*sys.argv[1:])
