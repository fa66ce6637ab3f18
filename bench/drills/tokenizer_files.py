"""Tokenizers from the files beside a model, beside the `AutoTokenizer` of `transformers`.

    python -m bench.drills.tokenizer_files [--output FILE] [--fixtures]

Each case is a small folder as models are published in: config.json, vocabularies without a
tokenizer.json (or with one), and settings. Compared are the tokens of texts, those before and after
them included, what is decoded, the end token and the special tokens. `--fixtures` writes the
folders and what `transformers` makes of them, for tests that do without it.

It needs the extra `hf`, sentencepiece and protobuf, and no network.
"""

import argparse
import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

from bench.drills.sentencepiece_models import MODELS as MODELS_OF_KINDS
from bench.drills.sentencepiece_models import train
from train.data.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[2] / "tests" / "train" / "data"

TEXTS = ["low lower lowest", "Low é 世界 low", "low's,  new!  low", "a<b>new c"]
"""Their characters are in the small vocabularies, but for a few that BERT's has not."""

PIECES = ["lo", "low", "Ġlow", "er", "Ġlower", "ne", "new"]


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=True)


def byte_level(*special: str, last: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return vocab.json and merges.txt: special tokens, the bytes of `TEXTS`, a few merges."""
    merges = ["l o", "lo w", "Ġ low", "e r", "Ġlow er", "n e", "ne w"]
    letters = {c for text in TEXTS for word, _ in BYTES.pre_tokenize_str(text) for c in word}
    words = [*special, *sorted(letters), *PIECES, *last]
    return {
        "vocab.json": {word: number for number, word in enumerate(words)},
        "merges.txt": "#version: 0.2\n" + "\n".join(merges) + "\n",
    }


def without_template(files: dict[str, Any]) -> str:
    """Return a tokenizer.json of vocab.json and merges.txt that puts nothing around a text."""
    merges = [each.split() for each in files["merges.txt"].splitlines()[1:]]
    backend = tokenizers.Tokenizer(models.BPE(files["vocab.json"], [(a, b) for a, b in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return str(backend.to_str())


def train_t5() -> bytes:
    """Return a small SentencePiece model with T5's special pieces."""
    settings = MODELS_OF_KINDS["unigram, as T5"] | {
        "vocab_size": 105,
        "normalization_rule_name": "identity",
    }
    with tempfile.TemporaryDirectory() as folder:
        return train([*TEXTS, "".join(map(chr, range(33, 127)))] * 3, settings, folder)


def word_level(template: str = "", special: tuple[str, ...] = ("<s>", "</s>")) -> str:
    """Return a tokenizer.json of words, which puts the tokens of a template around a text."""
    words = ["<unk>", *special, "low", "lower", "lowest", "new", "<|endoftext|>", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        around = [(each, vocabulary[each]) for each in template.split() if each != "$A"]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=around
        )
    backend.add_special_tokens(["<|endoftext|>", "[CLS]", "[SEP]", *special])
    return str(backend.to_str())


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "low", "##er", "##est", "Low", "e", "é", "a"]
BERT = "\n".join([*WORDS, "世", "界", "世界", "new", ",", "!", "'", "s", "b", "c", "<", ">"]) + "\n"
ROBERTA = byte_level("<s>", "<pad>", "</s>", "<unk>", last=("<mask>",))
GPT2 = byte_level("<|endoftext|>")
NEXT = len(GPT2["vocab.json"])
BPE = (FIXTURES / "sentencepiece" / "bpe.model").read_bytes()
T5 = train_t5()
OPT_TOKENS = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
LLAMA = {"tokenizer_class": "LlamaTokenizer"}


def added(token_id: int, text: str, **flags: bool) -> dict[str, Any]:
    """Return an entry of `added_tokens_decoder`."""
    names = ("lstrip", "normalized", "rstrip", "single_word", "special")
    return {str(token_id): {"content": text} | dict.fromkeys(names, False) | flags}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "BERT": ("bert", {"vocab.txt": BERT}, {"do_lower_case": True}),
    "BERT, cased": ("bert", {"vocab.txt": BERT}, {"do_lower_case": False}),
    "BERT, accents": ("bert", {"vocab.txt": BERT}, {"do_lower_case": True, "strip_accents": False}),
    "BERT, Chinese words": (
        "bert",
        {"vocab.txt": BERT},
        {"do_lower_case": False, "tokenize_chinese_chars": False},
    ),
    "BERT, added": (
        "bert",
        {"vocab.txt": BERT, "added_tokens.json": {"<b>": len(BERT.splitlines())}},
        {"do_lower_case": False},
    ),
    "DistilBERT": (
        "distilbert",
        {"vocab.txt": BERT},
        {"tokenizer_class": "DistilBertTokenizer", "do_lower_case": True},
    ),
    "GPT-2": ("gpt2", GPT2, {}),
    "GPT-2, space first": ("gpt2", GPT2, {"add_prefix_space": True}),
    "GPT-2, bos": ("gpt2", GPT2, {"add_bos_token": True}),
    "GPT-2, chat tokens": (
        "gpt2",
        {
            **GPT2,
            "added_tokens.json": {"<|im_end|>": NEXT, "<b>": NEXT + 1},
            "special_tokens_map.json": {"eos_token": "<|im_end|>"},
        },
        {},
    ),
    "GPT-2, added": (
        "gpt2",
        GPT2,
        {
            "added_tokens_decoder": added(NEXT, "<b>", rstrip=True)
            | added(NEXT + 1, "<x>", special=True)
        },
    ),
    "RoBERTa": ("roberta", ROBERTA, {}),
    "RoBERTa, classes": ("roberta", ROBERTA, {"cls_token": "<pad>"}),
    "Longformer": ("longformer", ROBERTA, {"tokenizer_class": "LongformerTokenizer"}),
    "BART": ("bart", ROBERTA, {"tokenizer_class": "BartTokenizer"}),
    "OPT": (
        "opt",
        ROBERTA,
        {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, **OPT_TOKENS},
    ),
    "Qwen2": ("qwen2", GPT2, {"tokenizer_class": "Qwen2Tokenizer"}),
    "GPT-NeoX": ("gpt_neox", GPT2, {"pad_token": "<|endoftext|>"}),
    "Llama, bos": (
        "llama",
        {"tokenizer.model": BPE},
        {**LLAMA, "add_bos_token": True, "add_eos_token": False},
    ),
    "Llama, eos": (
        "llama",
        {"tokenizer.model": BPE},
        {**LLAMA, "add_bos_token": False, "add_eos_token": True},
    ),
    "Llama, neither": ("llama", {"tokenizer.model": BPE}, LLAMA),
    "T5": ("t5", {"spiece.model": T5}, {}),
    "T5, sentinels": ("t5", {"spiece.model": T5}, {"extra_ids": 7}),
    "words": ("llama", {"tokenizer.json": word_level("<s> $A")}, {"eos_token": "</s>"}),
    "words, flags": (
        "llama",
        {"tokenizer.json": word_level()},
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
    ),
    "words, other end": (
        "llama",
        {"tokenizer.json": word_level(special=("<｜end▁of▁sentence｜>",))},
        {"eos_token": "<｜end▁of▁sentence｜>"},
    ),
    "ModernBERT": (
        "modernbert",
        {"tokenizer.json": word_level("[CLS] $A [SEP]")},
        {"cls_token": "[CLS]", "sep_token": "[SEP]"},
    ),
    "RoBERTa, no template": ("roberta", {"tokenizer.json": without_template(ROBERTA)}, {}),
    "byte order marks": (
        "bert",
        {"vocab.txt": "\ufeff" + BERT, "special_tokens_map.json": "\ufeff{}"},
        {"do_lower_case": False},
    ),
}
"""By name: the `model_type`, the files, and tokenizer_config.json."""


def write_folder(folder: Path, files: dict[str, Any]) -> None:
    """Write files: bytes, a text, or an object as JSON."""
    for name, content in files.items():
        if not isinstance(content, str | bytes):
            content = json.dumps(content, ensure_ascii=False)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def files_of(name: str) -> dict[str, Any]:
    """Return the files of a case."""
    model_type, files, settings = CASES[name]
    config = {"tokenizer_config.json": settings} if settings else {}
    return {"config.json": {"model_type": model_type}, **files, **config}


def read_theirs(name: str) -> dict[str, Any]:
    """Return what `transformers` makes of a case."""
    files = files_of(name)
    # Its reader takes a byte order mark for text.
    plain = {
        key: each.removeprefix("\ufeff") if isinstance(each, str) else each
        for key, each in files.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), plain)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [theirs(text)["input_ids"] for text in TEXTS]
    return {
        "ids": ids,
        "decoded": [theirs.decode(each, skip_special_tokens=True) for each in ids],
        "end": theirs.eos_token_id,
        "special": sorted({*theirs.all_special_ids} - {theirs.unk_token_id}),
        "tokens": len(theirs),
    }


def read_ours(name: str) -> dict[str, Any]:
    """Return the same with the tokenizer of this project."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), files_of(name))
        ours = Tokenizer.load(folder)
    before, after = ours.added_token_ids
    ids = [np.concatenate([before, ours.encode(text), after]).tolist() for text in TEXTS]
    return {
        "ids": ids,
        "decoded": [ours.decode(each) for each in ids],
        "end": ours.eos_token_id,
        "special": sorted(ours.special_token_ids - {ours.vocabulary.get("[UNK]")}),
        "tokens": ours.num_tokens,
    }


def compare(name: str) -> tuple[str, bool]:
    """Return a line of the table, and whether all is equal."""
    theirs, ours = read_theirs(name), read_ours(name)
    same = [a == b for a, b in zip(theirs["ids"], ours["ids"], strict=True)]
    decoded = [a == b for a, b in zip(theirs["decoded"], ours["decoded"], strict=True)]
    end = theirs["end"] in (ours["end"], None)
    special, count = {*theirs["special"]} <= {*ours["special"]}, theirs["tokens"] == ours["tokens"]
    good = all(same) and all(decoded) and end and special and count
    words = ("no", "yes")
    counts = f"{sum(same)}/{len(same)} {sum(decoded):3}/{len(decoded)}"
    flags = f"{words[end]:>5} {words[special]:>8} {words[count]:>7}"
    return f"{name:22} {counts} {flags}" + ("" if good else "  differs"), good


def write_fixtures() -> None:
    """Write the folders and what `transformers` makes of them."""
    records = [{"name": name, "files": files_of(name), **read_theirs(name)} for name in CASES]
    for record in records:
        for name, content in record["files"].items():
            if isinstance(content, bytes):
                record["files"][name] = {"base64": base64.b64encode(content).decode()}
    lines = [json.dumps(each, ensure_ascii=False, separators=(",", ":")) for each in records]
    head = json.dumps(TEXTS, ensure_ascii=False)
    path = FIXTURES / "tokenizer_folders.jsonl"
    path.write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")


def main() -> int:
    """Print the table; return 1 if a case differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--fixtures", action="store_true")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if given.fixtures:
        write_fixtures()
        return 0
    versions = f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}"
    lines = [versions, f"{'folder':22} texts decoded  end  special  tokens"]
    results = [compare(name) for name in CASES]
    lines += [line for line, _ in results]
    print("\n".join(lines))
    if given.output:
        given.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(not all(good for _, good in results))


if __name__ == "__main__":
    sys.exit(main())
