"""Texts and tokens beside `transformers` and `sentencepiece`, case by case.

    python -m bench tokenizer_files [--only WORD] [--fixtures]
    python -m bench sentencepiece_models --data FOLDER [--fixtures]
    python -m bench chat_templates

`tokenizer_files`: each case is a small folder as models are published in: config.json, vocabularies
without a tokenizer.json (or with one), and settings. Compared with `AutoTokenizer` are the tokens
of texts, those before and after them included, what is decoded, the end token and the special
tokens.

`sentencepiece_models`: models of every kind are trained on 10,000 lines of English and German (the
folder holds `wikitext-2/` and `multi30k/raw/`): unigram and BPE, with and without normalization,
byte fallback, a dummy prefix, user-defined and control pieces. The table has the lines of other
splits whose ids or whose decoded texts differ from those of the package, and the same for texts
made to break it.

`chat_templates`: templates in the style of published models (written here, from descriptions of
their formats) are rendered for conversations with and without a system message, with line ends,
quotes and other scripts, with tools, calls of them, reasoning and variables, here and by
`apply_chat_template`. For templates with `{% generation %}` the mask of the assistant's tokens is
compared too; for "tools, reasoning" it is that of the same template with these blocks.

With `--fixtures` the first two write what the tests compare with. They need the extra `hf` (the
first two sentencepiece and protobuf too), and no network.
"""

import base64
import dataclasses
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

from bench.drills._reference_table import TESTS, Options, compare_cases, train_byte_level, versions
from train.data.chat_template import DEFAULT_TEMPLATE, NO_VARIABLES, ChatTemplate, encode_chat
from train.data.sentencepiece_model import make_backend, read_model
from train.data.tokenizer import Tokenizer

FIXTURES = TESTS / "train" / "data"

# ---------------------------------------------------------------------------
# SentencePiece models
# ---------------------------------------------------------------------------

SENTENCEPIECE_MODELS: dict[str, dict[str, Any]] = {
    "unigram, as T5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "vocab_size": 4000},
    "unigram, bytes": {"byte_fallback": True, "character_coverage": 0.995},
    "unigram, user-defined": {
        "user_defined_symbols": ["<sep>", "foo bar", "of the"],
        "control_symbols": ["<ctl>"],
    },
    "unigram, lowercase": {"normalization_rule_name": "nmt_nfkc_cf", "split_by_whitespace": False},
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

SENTENCEPIECE_FIXTURES: dict[str, dict[str, Any]] = {
    "unigram": {
        "model_type": "unigram",
        "vocab_size": 300,
        "normalization_rule_name": "identity",
        "user_defined_symbols": ["<sep>"],
    },
    "bpe": SENTENCEPIECE_MODELS["BPE, as Llama"] | {"vocab_size": 420, "character_coverage": 0.98},
}
FIXTURE_LINES = 30
"""Lines of WikiText-2 in the fixtures; the odd texts are added."""


def read_lines(path: Path, limit: int) -> list[str]:
    """Return the first lines of a text file, which may be compressed."""
    open_file: Any = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line, _ in zip(file, range(limit), strict=False)]


def train_sentencepiece(lines: list[str], settings: dict[str, Any], folder: str) -> bytes:
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


def write_sentencepiece_fixtures(lines: list[str]) -> None:
    """Write two models, and the ids and decoded texts of the package."""
    texts = [line for line in lines if line.strip()][:FIXTURE_LINES] + ODD_TEXTS
    for name, settings in SENTENCEPIECE_FIXTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            data = train_sentencepiece(lines, settings, folder)
        theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
        ids = [theirs.encode(text) for text in texts]
        records = [
            {"text": text, "ids": each, "decoded": theirs.decode(each)}
            for text, each in zip(texts, ids, strict=True)
        ]
        (FIXTURES / "sentencepiece" / f"{name}.model").write_bytes(data)
        _write_lines(FIXTURES / "sentencepiece" / f"{name}.jsonl", records)


def _write_lines(path: Path, records: list[Any], **settings: Any) -> None:
    lines = [json.dumps(each, separators=(",", ":"), **settings) for each in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePieceOptions(Options):
    """Command line of `sentencepiece_models`."""

    data: Path
    """Folder with `wikitext-2/` and `multi30k/raw/`."""


def compare_sentencepiece(options: SentencePieceOptions) -> int:
    """Print the table of models trained by the package."""
    wikitext, multi30k = options.data / "wikitext-2", options.data / "multi30k" / "raw"
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

    def compare(name: str, settings: dict[str, Any]) -> tuple[str, bool]:
        with tempfile.TemporaryDirectory() as folder:
            data = train_sentencepiece(corpus, settings, folder)
        ids, texts = count_differences(data, held_out)
        odd_ids, odd_texts = count_differences(data, ODD_TEXTS)
        return f"{name:22} {ids:10} {texts:12} {odd_ids:9} {odd_texts:6}", not (ids or texts)

    return compare_cases(
        options,
        SENTENCEPIECE_MODELS,
        compare,
        head=[
            versions("sentencepiece", "tokenizers"),
            f"{len(held_out):,} lines of WikiText-2 and Multi30k, {len(ODD_TEXTS)} odd texts",
            f"{'model':22} {'ids differ':>10} {'texts differ':>12} {'odd: ids':>9} {'texts':>6}",
        ],
        write_fixtures=lambda _: write_sentencepiece_fixtures(corpus[:3000]),
    )


# ---------------------------------------------------------------------------
# Tokenizers from the files beside a model
# ---------------------------------------------------------------------------

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


def without_template(files: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json of vocab.json and merges.txt that puts nothing around a text."""
    merges = [each.split() for each in files["merges.txt"].splitlines()[1:]]
    backend = tokenizers.Tokenizer(models.BPE(files["vocab.json"], [(a, b) for a, b in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return {"tokenizer.json": str(backend.to_str())}


def train_t5() -> bytes:
    """Return a small SentencePiece model with T5's special pieces."""
    settings = SENTENCEPIECE_MODELS["unigram, as T5"] | {
        "vocab_size": 105,
        "normalization_rule_name": "identity",
    }
    with tempfile.TemporaryDirectory() as folder:
        return train_sentencepiece(
            [*TEXTS, "".join(map(chr, range(33, 127)))] * 3, settings, folder
        )


def word_level(template: str = "", special: tuple[str, ...] = ("<s>", "</s>")) -> dict[str, Any]:
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
    return {"tokenizer.json": str(backend.to_str())}


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "low", "##er", "##est", "Low", "e", "é", "a"]
VOCABULARY = [*WORDS, "世", "界", "世界", "new", ",", "!", "'", "s", "b", "c", "<", ">"]
BERT = {"vocab.txt": "\n".join(VOCABULARY) + "\n"}
ROBERTA = byte_level("<s>", "<pad>", "</s>", "<unk>", last=("<mask>",))
GPT2 = byte_level("<|endoftext|>")
NEXT = len(GPT2["vocab.json"])
CHAT_TOKENS = {
    "added_tokens.json": {"<|im_end|>": NEXT, "<b>": NEXT + 1},
    "special_tokens_map.json": {"eos_token": "<|im_end|>"},
}
LLAMA = {"tokenizer.model": (FIXTURES / "sentencepiece" / "bpe.model").read_bytes()}
T5 = {"spiece.model": train_t5()}
OPT_TOKENS = dict(bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>")
LONG_END = "<｜end▁of▁sentence｜>"


def added(token_id: int, text: str, **flags: bool) -> dict[str, Any]:
    """Return an entry of `added_tokens_decoder`."""
    names = ("lstrip", "normalized", "rstrip", "single_word", "special")
    return {str(token_id): {"content": text} | dict.fromkeys(names, False) | flags}


ADDED = added(NEXT, "<b>", rstrip=True) | added(NEXT + 1, "<x>", special=True)


def folder(model_type: str, files: dict[str, Any], kind: str = "", **settings: Any) -> Any:
    """Return the files of a folder: config.json, some files, and tokenizer_config.json."""
    if kind:
        settings = {"tokenizer_class": f"{kind}Tokenizer", **settings}
    config = {"tokenizer_config.json": settings} if settings else {}
    return {"config.json": {"model_type": model_type}, **files, **config}


FOLDERS: dict[str, dict[str, Any]] = {
    "BERT": folder("bert", BERT, do_lower_case=True),
    "BERT, cased": folder("bert", BERT, do_lower_case=False),
    "BERT, accents": folder("bert", BERT, do_lower_case=True, strip_accents=False),
    "BERT, Chinese words": folder("bert", BERT, do_lower_case=False, tokenize_chinese_chars=False),
    "BERT, added": folder(
        "bert", BERT | {"added_tokens.json": {"<b>": len(VOCABULARY)}}, do_lower_case=False
    ),
    "DistilBERT": folder("distilbert", BERT, "DistilBert", do_lower_case=True),
    "GPT-2": folder("gpt2", GPT2),
    "GPT-2, space first": folder("gpt2", GPT2, add_prefix_space=True),
    "GPT-2, bos": folder("gpt2", GPT2, add_bos_token=True),
    "GPT-2, chat tokens": folder("gpt2", GPT2 | CHAT_TOKENS),
    "GPT-2, added": folder("gpt2", GPT2, added_tokens_decoder=ADDED),
    "RoBERTa": folder("roberta", ROBERTA),
    "RoBERTa, classes": folder("roberta", ROBERTA, cls_token="<pad>"),
    "Longformer": folder("longformer", ROBERTA, "Longformer"),
    "BART": folder("bart", ROBERTA, "Bart"),
    "OPT": folder("opt", ROBERTA, "GPT2", add_bos_token=True, **OPT_TOKENS),
    "Qwen2": folder("qwen2", GPT2, "Qwen2"),
    "GPT-NeoX": folder("gpt_neox", GPT2, pad_token="<|endoftext|>"),
    "Llama, bos": folder("llama", LLAMA, "Llama", add_bos_token=True, add_eos_token=False),
    "Llama, eos": folder("llama", LLAMA, "Llama", add_bos_token=False, add_eos_token=True),
    "Llama, neither": folder("llama", LLAMA, "Llama"),
    "T5": folder("t5", T5),
    "T5, sentinels": folder("t5", T5, extra_ids=7),
    "words": folder("llama", word_level("<s> $A"), eos_token="</s>"),
    "words, flags": folder(
        "llama", word_level(), bos_token="<s>", eos_token="</s>", add_bos_token=True
    ),
    "words, other end": folder("llama", word_level(special=(LONG_END,)), eos_token=LONG_END),
    "ModernBERT": folder(
        "modernbert", word_level("[CLS] $A [SEP]"), cls_token="[CLS]", sep_token="[SEP]"
    ),
    "RoBERTa, no template": folder("roberta", without_template(ROBERTA)),
    "byte order marks": folder(
        "bert",
        {"vocab.txt": "\ufeff" + BERT["vocab.txt"], "special_tokens_map.json": "\ufeff{}"},
        do_lower_case=False,
    ),
}


def write_folder(folder: Path, files: dict[str, Any]) -> None:
    """Write files: bytes, a text, or an object as JSON."""
    for name, content in files.items():
        if not isinstance(content, str | bytes):
            content = json.dumps(content, ensure_ascii=False)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def read_theirs(files: dict[str, Any]) -> dict[str, Any]:
    """Return what `transformers` makes of a folder."""
    # Its reader takes a byte order mark for text.
    plain = {
        key: each.removeprefix("\ufeff") if isinstance(each, str) else each
        for key, each in files.items()
    }
    with tempfile.TemporaryDirectory() as root:
        write_folder(Path(root), plain)
        theirs = transformers.AutoTokenizer.from_pretrained(root)
    ids = [theirs(text)["input_ids"] for text in TEXTS]
    return {
        "ids": ids,
        "decoded": [theirs.decode(each, skip_special_tokens=True) for each in ids],
        "end": theirs.eos_token_id,
        "special": sorted({*theirs.all_special_ids} - {theirs.unk_token_id}),
        "tokens": len(theirs),
    }


def read_ours(files: dict[str, Any]) -> dict[str, Any]:
    """Return the same with the tokenizer of this project."""
    with tempfile.TemporaryDirectory() as root:
        write_folder(Path(root), files)
        ours = Tokenizer.load(root)
    before, after = ours.added_token_ids
    ids = [np.concatenate([before, ours.encode(text), after]).tolist() for text in TEXTS]
    return {
        "ids": ids,
        "decoded": [ours.decode(each) for each in ids],
        "end": ours.eos_token_id,
        "special": sorted(ours.special_token_ids - {ours.vocabulary.get("[UNK]")}),
        "tokens": ours.num_tokens,
    }


def compare_folder(name: str, files: dict[str, Any]) -> tuple[str, bool]:
    """Return a line of the table, and whether all is equal."""
    theirs, ours = read_theirs(files), read_ours(files)
    same = [a == b for a, b in zip(theirs["ids"], ours["ids"], strict=True)]
    decoded = [a == b for a, b in zip(theirs["decoded"], ours["decoded"], strict=True)]
    end = theirs["end"] in (ours["end"], None)
    special, count = {*theirs["special"]} <= {*ours["special"]}, theirs["tokens"] == ours["tokens"]
    words = ("no", "yes")
    counts = f"{sum(same)}/{len(same)} {sum(decoded):3}/{len(decoded)}"
    flags = f"{words[end]:>5} {words[special]:>8} {words[count]:>7}"
    passed = all(same) and all(decoded) and end and special and count
    return f"{name:22} {counts} {flags}", passed


def write_folders(cases: dict[str, dict[str, Any]]) -> None:
    """Write the folders and what `transformers` makes of them."""
    records = []
    for name, files in cases.items():
        as_json = {
            key: {"base64": base64.b64encode(each).decode()} if isinstance(each, bytes) else each
            for key, each in files.items()
        }
        records.append({"name": name, "files": as_json, **read_theirs(files)})
    _write_lines(FIXTURES / "tokenizer_folders.jsonl", [TEXTS, *records], ensure_ascii=False)


def compare_folders(options: Options) -> int:
    """Print the table of folders."""
    return compare_cases(
        options,
        FOLDERS,
        compare_folder,
        head=[
            versions("transformers", "tokenizers"),
            f"{'folder':22} texts decoded  end  special  tokens",
        ],
        write_fixtures=write_folders,
    )


# ---------------------------------------------------------------------------
# Chat templates
# ---------------------------------------------------------------------------

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]")

TOOLS = (
    "{%- set last = namespace(user=0) -%}"
    "{%- for message in messages if message.role == 'user' -%}"
    "{%- set last.user = messages.index(message) -%}{%- endfor -%}"
    "{%- if today -%}Today is {{ today }}. {% endif -%}"
    "{%- if tools -%}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor -%}"
    "<|im_end|>\n{% endif -%}"
    "{%- for message in messages -%}"
    "<|im_start|>{{ message.role + ((' ' + message.name) if message.name else '') }}\n"
    "{% if message.role == 'assistant' %}{% generation %}"
    "{%- if loop.index0 > last.user and (loop.last or message.reasoning_content) -%}"
    "<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif -%}"
    "{{ message.content }}"
    "{%- for call in message.tool_calls -%}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>"
    "{%- endfor -%}{{ '<|im_end|>\n' }}{% endgeneration %}"
    "{%- else -%}{{ message.content + '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""Reasoning is written after the last question alone, and in the last turn an empty one too."""

TEMPLATES = {
    "tools, reasoning, marked": TOOLS,
    "tools, reasoning": TOOLS.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
    "default": DEFAULT_TEMPLATE,
    "chatml": (
        "{% for message in messages %}\n"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n"
    ),
    "chatml, marked": (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}"
        "{% endgeneration %}{{ '\\n' }}{% else %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "instruct tags": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
        "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
        "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
    ),
    "namespace, loop controls": (
        "{%- set ns = namespace(turns=0) -%}\n"
        "{%- for message in messages -%}\n"
        "    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}\n"
        "    {%- set ns.turns = ns.turns + 1 -%}\n"
        "    {{- loop.index0 ~ ':' ~ ns.turns ~ ' ' ~ message | tojson -}}\n"
        "{%- endfor -%}\n"
    ),
}

CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "user", "content": "  Two lines\nof <b>text</b> & 'quotes' "},
        {"role": "assistant", "content": "Grüße, 世界 🙂\n"},
    ],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "First answer."},
        {"role": "user", "content": "And two?"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "{{ messages }} {% raw %}"},
        {"role": "assistant", "content": "Second answer, with <|im_end|> in it."},
    ],
)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "zwölf"}}}
WITH_TOOLS: tuple[list[dict[str, Any]], ...] = (
    [
        {"role": "user", "content": "2 + 12?", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "14", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is 14.", "reasoning": "The tool said so."},
    ],
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1", "reasoning_content": "Counting."},
        {"role": "user", "content": "And two?"},
        {"role": "assistant", "content": "2", "thinking": "More\ncounting."},
    ],
)
"""Conversations for templates that write their fields."""

VARIABLES: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "add", "description": "a < b"}}],
    "today": "1 May",
}


def make_tokenizer(folder: Path) -> Tokenizer:
    """Write a byte-level BPE tokenizer of a few merges; return it."""
    texts = [each["content"] for messages in CONVERSATIONS for each in messages]
    train_byte_level(texts * 4, 400, SPECIAL).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}'
    )
    return Tokenizer.load(str(folder))


def compare_template(name: str, source: str, ours: Tokenizer, theirs: Any) -> tuple[str, bool]:
    """Return a line of the table, and whether all is equal."""
    template = ChatTemplate.of_tokenizer(ours, source)
    chats = [(messages, NO_VARIABLES) for messages in CONVERSATIONS]
    if "tools" in name:
        chats += [(messages, VARIABLES) for messages in WITH_TOOLS]
    marked_source = TOOLS if name == "tools, reasoning" else source
    has_masks = "generation %}" in marked_source
    same_text = same_tokens = same_mask = 0
    for messages, variables in chats:
        for prompt in (False, True):
            expected = theirs.apply_chat_template(
                messages,
                chat_template=source,
                tokenize=False,
                add_generation_prompt=prompt,
                **variables,
            )
            text = template.render(messages, add_generation_prompt=prompt, variables=variables)
            same_text += text == expected
            tokens = theirs(expected, add_special_tokens=False)["input_ids"]
            same_tokens += ours.encode_with_special_tokens(text)[0].tolist() == tokens
        if has_masks:
            marked = theirs.apply_chat_template(
                messages,
                chat_template=marked_source,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **variables,
            )
            chat = template.render_with_spans(messages, variables=variables)
            is_completion = encode_chat(ours, chat).is_completion
            same_mask += np.array_equal(is_completion, np.array(marked["assistant_masks"], bool))
    count = len(chats)
    masks = f"{same_mask}/{count}" if has_masks else "-"
    passed = same_text == same_tokens == 2 * count and (same_mask == count or not has_masks)
    return f"{name:26} {same_text}/{2 * count:<4} {same_tokens}/{2 * count:<4} {masks}", passed


def compare_templates(options: Options) -> int:
    """Print the table of templates."""
    with tempfile.TemporaryDirectory() as name:
        ours = make_tokenizer(Path(name))
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(name)
    return compare_cases(
        options,
        TEMPLATES,
        lambda name, source: compare_template(name, source, ours, theirs),
        head=[versions("transformers"), f"{'template':26} text  tokens answers"],
    )
