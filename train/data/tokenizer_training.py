"""Training of a tokenizer of each kind on text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from train.data.data_config import TokenizerConfig
from train.data.tokenizer import NEWLINE_REPLACEMENT, Tokenizer, split_into_chunks
from train.data.tokenizer_files import (
    BERT_SPECIAL_TOKENS,
    GPT2_END_OF_TEXT,
    make_wordpiece_backend,
)
from train.errors import UserError
from train.runtime.stages import Stage, stage

_UNKNOWN_WORD = "<unk>"


def train_tokenizer(
    config: TokenizerConfig, texts: Iterable[str], *, num_characters: float = 0.0
) -> Tokenizer:
    """Train the tokenizer that ``config`` describes. The same texts always give the same one.

    Args:
      config: Kind and size. Kind "file" is loaded, and nothing is trained.
      texts: Read once, as far as needed: not at all for "byte" and "file", all for "character".
      num_characters: About how many characters the texts have, for progress. 0: unknown.

    Raises:
      UserError: The file of kind "file" cannot be used, or vocab_size is too small for the letters.
    """
    if config.kind == "file":
        return Tokenizer.load(config.path)
    train = {
        "byte": _byte,
        "character": _character,
        "word": _word,
        "bpe": _bpe,
        "wordpiece": _wordpiece,
    }[config.kind]
    if config.kind != "character":
        num_characters = min(num_characters, config.training_characters)
    with stage("reading text for the tokenizer", num_characters) as progress:
        return Tokenizer(train(config, texts, progress))


def _byte(config: TokenizerConfig, texts: Iterable[str], progress: Stage) -> tokenizers.Tokenizer:
    """Return the tokenizer whose token b is byte b, with 256 to separate documents."""
    symbols = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    backend = _byte_level(models.BPE(symbols, []), config)
    backend.add_special_tokens([GPT2_END_OF_TEXT])
    return backend


def _bpe(config: TokenizerConfig, texts: Iterable[str], progress: Stage) -> tokenizers.Tokenizer:
    """Train byte-level BPE as in GPT-2 (Radford et al. 2019, section 2.2)."""
    backend = _byte_level(models.BPE(), config)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[GPT2_END_OF_TEXT],
        initial_alphabet=byte_symbols(),
        show_progress=False,
    )
    backend.train_from_iterator(_first(texts, config.training_characters, progress), trainer)
    return backend


def _byte_level(model: tokenizers.models.BPE, config: TokenizerConfig) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    if config.lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _character(
    config: TokenizerConfig, texts: Iterable[str], progress: Stage
) -> tokenizers.Tokenizer:
    """Return a tokenizer of the characters by code point, then the separator."""
    normalizer = normalizers.Lowercase() if config.lowercase else None
    characters: set[str] = set()
    for text in texts:
        characters.update(normalizer.normalize_str(text) if normalizer else text)
        progress.advance(len(text))
    vocabulary = {character: number for number, character in enumerate(sorted(characters))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    if normalizer:
        backend.normalizer = normalizer
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([GPT2_END_OF_TEXT])
    return backend


def _word(config: TokenizerConfig, texts: Iterable[str], progress: Stage) -> tokenizers.Tokenizer:
    """Return a tokenizer of the most frequent words, <unk>, and <eos> for a newline (WikiText)."""
    newline = NEWLINE_REPLACEMENT.strip()
    lower = [normalizers.Lowercase()] if config.lowercase else []
    learner = tokenizers.Tokenizer(models.WordLevel(unk_token=_UNKNOWN_WORD))
    learner.normalizer = normalizers.Sequence(
        [*lower, normalizers.Replace("\n", NEWLINE_REPLACEMENT)]
    )
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(vocab_size=config.vocab_size, show_progress=False)
    learner.train_from_iterator(_first(texts, config.training_characters, progress), trainer)
    # <unk> and <eos> are words like the others: they stand in texts, and are seen in samples.
    always = [_UNKNOWN_WORD, newline]
    counted = learner.get_vocab()
    others = [word for word in sorted(counted, key=counted.__getitem__) if word not in always]
    words = [*always, *others][: config.vocab_size]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN_WORD))
    backend.normalizer, backend.pre_tokenizer = learner.normalizer, learner.pre_tokenizer
    # A space before each word but the first; the prefix means none, and no word begins with it.
    spaces = decoders.WordPiece(prefix="\n", cleanup=False)
    backend.decoder = decoders.Sequence([spaces, decoders.Replace(newline, "\n")])
    return backend


def _wordpiece(
    config: TokenizerConfig, texts: Iterable[str], progress: Stage
) -> tokenizers.Tokenizer:
    """Train WordPiece with BERT's normalizer and special tokens."""
    # The trainer numbers the letters within words in an order that changes from run to run, and
    # breaks ties by these numbers. Train twice: to find the letters, then with them in order.
    sample = list(_first(texts, config.training_characters, progress))
    letters = set(_learned_wordpieces(config, sample, vocab_size=0, first=())) - {
        *BERT_SPECIAL_TOKENS
    }
    first = [*BERT_SPECIAL_TOKENS, *sorted(letters)]
    if len(first) > config.vocab_size:
        raise UserError(
            f"data.tokenizer.vocab_size: {config.vocab_size} is too small for the {len(first)} "
            "letters and special tokens of this text; raise it, or use kind bpe"
        )
    words = _learned_wordpieces(config, sample, vocab_size=config.vocab_size, first=first)
    return make_wordpiece_backend(words, lowercase=config.lowercase)


def _learned_wordpieces(
    config: TokenizerConfig, texts: list[str], *, vocab_size: int, first: Sequence[str]
) -> dict[str, int]:
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizers.BertNormalizer(lowercase=config.lowercase)
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=list(first), show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    return learner.get_vocab()


def token_id_tokenizer(num_ids: int) -> Tokenizer:
    """Return a tokenizer of numbers, for data without text: `5 17` is the tokens 5 and 17.

    The separator of documents is one more token, `<eos>`, after the `num_ids` others.
    """
    backend = tokenizers.Tokenizer(
        models.WordLevel({str(number): number for number in range(num_ids)})
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend)


def byte_symbols() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies (GPT-2's).

    Printable bytes stand for themselves; the others take the characters from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _first(texts: Iterable[str], characters: int, progress: Stage) -> Iterator[str]:
    """Yield the first ``characters`` characters of the texts, in chunks counted in parallel."""
    for text in texts:
        for chunk in split_into_chunks([text[:characters]]):
            yield chunk
            progress.advance(len(chunk))
        characters -= len(text)
        if characters <= 0:
            break
    progress.rename("training the tokenizer")  # the trainer works on what it has counted
