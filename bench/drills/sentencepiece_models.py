"""SentencePiece models as we read them, beside the `sentencepiece` package.

    python -m bench.drills.sentencepiece_models DATA [--output FILE] [--fixtures]

DATA holds `wikitext-2/` and `multi30k/raw/`. Models of every kind are trained on 10,000 lines of
English and German: unigram and BPE, with and without normalization, byte fallback, a dummy prefix,
user-defined and control pieces. The table has the lines of other splits whose ids or whose decoded
texts differ, and the same for texts made to break it: runs of spaces, special tokens spelled out,
scripts that no model has seen, combining characters. `--fixtures` writes two small models and what
the package makes of some texts, for tests that do without it.

It needs the extra `hf` and no network.
"""

import argparse
import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from train.data.sentencepiece_model import make_backend, read_model

MODELS: dict[str, dict[str, Any]] = {
    "unigram, as T5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "vocab_size": 4000},
    "unigram, bytes": {"byte_fallback": True, "character_coverage": 0.995},
    "unigram, user-defined": {
        "user_defined_symbols": ["<sep>", "foo bar", "of the"],
        "control_symbols": ["<ctl>"],
    },
    "unigram, lowercase": {
        "normalization_rule_name": "nmt_nfkc_cf",
        "split_by_whitespace": False,
    },
    "BPE, as Llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "character_coverage": 0.99995,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
    },
    "BPE, as Gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\n", "\n\n", "<start_of_turn>", "<b>", "▁▁", "▁▁▁"],
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
    },
    "BPE, unknown": {"model_type": "bpe", "character_coverage": 0.99},
}
"""Settings of the trainer."""

ODD_TEXTS = [
    "",
    "   ",
    "  two  spaces  ",
    "a\nb\n\nc",
    "tab\there",
    "<s>",
    "x</s> y",
    "<unk> <0x0A> <pad>",
    "▁a ▁ b▁",
    "日本語 emoji 🎉🏳️‍🌈 한국어",
    "ﬁne ① ｆｕｌｌ　ｗｉｄｔｈ Ⅷ ½ ™",
    "e\u0301 é ñ n\u0303",
    "a\u0300\u0301\u0302 x",
    "\uff21\u3099 か\u3099",
    "<sep>a<sep> foo bar of the end<ctl>",
    "\u200b zero \xa0 wide",
    "<start_of_turn>user\nhi<b>bold",
    "    indented\n        more",
    "STRASSE Straße ẞ",
    "12345 3.14",
]

FIXTURES = Path(__file__).parents[2] / "tests" / "train" / "data" / "sentencepiece"
IN_FIXTURES: dict[str, dict[str, Any]] = {
    "unigram": {
        "model_type": "unigram",
        "vocab_size": 300,
        "normalization_rule_name": "identity",
        "user_defined_symbols": ["<sep>"],
    },
    "bpe": MODELS["BPE, as Llama"] | {"vocab_size": 420, "character_coverage": 0.98},
}
FIXTURE_LINES = 30
"""Lines of WikiText-2 in the fixtures; the odd texts are added."""


def read_lines(path: Path, limit: int) -> list[str]:
    """Return the first lines of a text file, which may be compressed."""
    open_file: Any = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line, _ in zip(file, range(limit), strict=False)]


def train(lines: list[str], settings: dict[str, Any], folder: str) -> bytes:
    """Train a model with the package; return its file."""
    corpus, prefix = Path(folder) / "corpus.txt", Path(folder) / "trained"
    corpus.write_text("\n".join(line for line in lines if line.strip()), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(prefix),
        minloglevel=2,
        num_threads=1,
        **{"vocab_size": 3000, **settings},
    )
    return Path(f"{prefix}.model").read_bytes()


def count_differences(data: bytes, texts: list[str]) -> tuple[int, int]:
    """Return for how many texts the ids and the decoded texts differ."""
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    ours = tokenizers.Tokenizer.from_str(make_backend(read_model(data)).to_str())
    ours.encode_special_tokens = True
    ids = [(theirs.encode(text), ours.encode(text, add_special_tokens=False).ids) for text in texts]
    decoded = [(theirs.decode(expected), ours.decode(expected)) for expected, _ in ids]
    return sum(a != b for a, b in ids), sum(a != b for a, b in decoded)


def write_fixtures(lines: list[str]) -> None:
    """Write two models, and the ids and decoded texts of the package."""
    FIXTURES.mkdir(exist_ok=True)
    texts = [line for line in lines if line.strip()][:FIXTURE_LINES] + ODD_TEXTS
    for name, settings in IN_FIXTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            data = train(lines, settings, folder)
        theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
        ids = [theirs.encode(text) for text in texts]
        records = [
            {"text": text, "ids": each, "decoded": theirs.decode(each)}
            for text, each in zip(texts, ids, strict=True)
        ]
        (FIXTURES / f"{name}.model").write_bytes(data)
        lines_out = [json.dumps(record, separators=(",", ":")) for record in records]
        (FIXTURES / f"{name}.jsonl").write_text("\n".join(lines_out) + "\n", encoding="utf-8")


def main() -> int:
    """Print the table; return 1 if an ordinary line differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--fixtures", action="store_true")
    given = parser.parse_args()
    wikitext, multi30k = given.data / "wikitext-2", given.data / "multi30k" / "raw"
    if given.fixtures:
        write_fixtures(read_lines(wikitext / "train.txt", 3000))
        return 0
    corpus = [
        *read_lines(wikitext / "train.txt", 6000),
        *read_lines(multi30k / "train.en.gz", 2000),
        *read_lines(multi30k / "train.de.gz", 2000),
    ]
    held_out = [
        *read_lines(wikitext / "valid.txt", 700),
        *read_lines(wikitext / "test.txt", 700),
        *(
            line
            for name in ("test_2016_flickr", "test_2018_flickr")
            for language in ("en", "de")
            for line in read_lines(multi30k / f"{name}.{language}.gz", 300)
        ),
    ]
    lines = [
        f"sentencepiece {sentencepiece.__version__}, tokenizers {tokenizers.__version__}",
        f"{len(held_out):,} lines of WikiText-2 and Multi30k, {len(ODD_TEXTS)} odd texts",
        f"{'model':22} {'ids differ':>10} {'texts differ':>12} {'odd: ids':>9} {'texts':>6}",
    ]
    failures = 0
    for name, settings in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            data = train(corpus, settings, folder)
        ids, texts = count_differences(data, held_out)
        odd_ids, odd_texts = count_differences(data, ODD_TEXTS)
        failures += bool(ids or texts)
        lines.append(f"{name:22} {ids:10} {texts:12} {odd_ids:9} {odd_texts:6}")
    print("\n".join(lines))
    if given.output:
        given.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
