"""Write questions on Python's library and their answers, for instruction tuning.

    python examples/python_questions.py questions.jsonl [pairs.jsonl]

The answers are the first sentences of docstrings of the standard library of the Python that runs
this: no network. In the pairs, for preference optimization, the rejected answer is a sentence from
further down the same docstring: a detail in place of what the thing does.
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

MODULES = """
argparse ast bisect calendar collections copy csv datetime decimal difflib email.message enum
fileinput fractions functools glob gzip heapq html http.client inspect io ipaddress itertools json
logging mailbox math operator os os.path pathlib pickle queue random re shlex shutil socket
statistics string struct subprocess tarfile tempfile textwrap threading time tokenize traceback
types unittest urllib.parse urllib.request uuid warnings weakref zipfile
"""

LONGEST = 160
"""Longest answer, in characters."""


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
    is_sentence = sentence[:1].isupper() and sentence.endswith(".")
    return sentence if is_sentence and 10 < len(sentence) <= LONGEST else ""


def detail(text: str) -> str:
    """Return the first sentence after the first paragraph of a docstring; empty if none."""
    paragraphs = text.strip().split("\n\n")[1:]
    return next(filter(None, map(first_sentence, paragraphs)), "")


def write_lines(path: str, records: Iterable[object]) -> None:
    """Write JSON lines."""
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def main(path: str, pairs_path: str = "") -> None:
    """Write the questions with their answers, and optionally the preference pairs."""
    answers: dict[str, str] = {}
    details: dict[str, str] = {}
    for module in MODULES.split():
        for name, text in documented(module):
            if name not in answers and (answer := first_sentence(text)):
                answers[name] = answer
                details[name] = detail(text)
    questions = [{"role": "user", "content": f"What does {name} do?"} for name in answers]
    replies = [{"role": "assistant", "content": answer} for answer in answers.values()]
    both = list(zip(questions, replies, strict=True))
    write_lines(path, ({"messages": list(each)} for each in both))
    if pairs_path:
        rejected = [[{"role": "assistant", "content": text}] for text in details.values()]
        pairs = [
            {"prompt": [question], "chosen": [answer], "rejected": other}
            for (question, answer), other in zip(both, rejected, strict=True)
            if other[0]["content"]
        ]
        write_lines(pairs_path, pairs)
        print(f"{len(pairs):,} pairs in {pairs_path}")
    print(f"{len(answers):,} questions in {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
