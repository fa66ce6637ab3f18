"""Corpora of several sources of running text, or of streams, with one tokenizer."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from train.data.batches import TextTrainingBatches
from train.data.corpus import (
    TextCorpus,
    load_or_train_tokenizer,
    prepare_held_out,
    prepare_text,
    prepare_tokenizer,
)
from train.data.data_config import SourceConfig, TextDataConfig
from train.data.files import SPLITS, Notes
from train.data.source_mixing import MixedBatches, MixedTrainingBatches, MixtureSchedule
from train.data.stream_batches import StreamedTrainingBatches
from train.data.streaming import StreamedText, StreamReader
from train.data.text_files import Document
from train.data.text_splits import DocumentSplits, TextSplits, find_sources
from train.data.token_file import TokenStream
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError
from train.files import cache_folder, cache_key


@dataclasses.dataclass(frozen=True, eq=False)
class MixedSource:
    """One source of a mixture."""

    name: str
    config: SourceConfig
    corpus: TextCorpus
    """Token streams of its splits. Of a streamed source, those that are held out."""
    text: StreamedText | None = None
    """Training text of a streamed source."""

    @property
    def size(self) -> str:
        """Amount of training data, as text."""
        if self.text is None:
            return f"{len(self.corpus.split('train').tokens):,} tokens"
        return f"streamed from {len(self.text.files):,} files"


@dataclasses.dataclass(frozen=True, eq=False)
class MixedCorpus:
    """A tokenizer and several sources of text, which training mixes by weight.

    Attributes:
      tokenizer: Tokenizer of all sources.
      sources: The sources, in the order of the settings.
      digest: Digest of texts, splits and tokens: equal for equal data.
      labels: Empty: running text has no labels.
      notes: What the user should know of how the data were read.
    """

    tokenizer: Tokenizer
    sources: tuple[MixedSource, ...]
    digest: str
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def streams(self) -> Mapping[str, TokenStream]:
        """Token streams by split and source: `train/wiki`."""
        return {
            f"{split}/{source.name}": source.corpus.streams[split]
            for split in SPLITS
            for source in self.sources
            if split in source.corpus.streams
        }

    @property
    def shares(self) -> dict[str, float]:
        """Share of the training tokens of each source, by name."""
        total = sum(source.config.weight for source in self.sources)
        return {source.name: source.config.weight / total for source in self.sources}

    def parts(self, split: str) -> list[tuple[MixedSource, float]]:
        """Return the sources that have a split, each with its share of the tokens.

        Raises:
          UserError: None has it.
        """
        having = [each for each in self.sources if split in each.corpus.streams]
        if not having:
            self.sources[0].corpus.split(split)  # raises
        total = sum(each.config.weight for each in having)
        return [(each, each.config.weight / total) for each in having]

    def describe(self) -> str:
        """Return the amount of training data as text."""
        if len(self.sources) == 1:
            return f"{self.sources[0].name} {self.sources[0].size}"
        parts = ", ".join(
            f"{source.name} {share:.3g} ({source.size})"
            for source, share in zip(self.sources, self.shares.values(), strict=True)
        )
        return f"a mixture of {len(self.sources)} sources: {parts}"

    def training_batches(
        self, config: TextDataConfig, *, batch_size: int, seed: int, steps: int
    ) -> MixedBatches:
        """Return batches of windows of all sources, mixed by weight.

        Raises:
          UserError: A source is shorter than a window, or too short for the run.
        """
        if config.streaming.enabled:
            return self._streamed_batches(config, batch_size=batch_size, seed=seed)
        windows = {
            source.name: TextTrainingBatches(
                dataclasses.replace(source.corpus.split("train"), name=f"train/{source.name}"),
                batch_size=batch_size,
                sequence_length=config.sequence_length,
                # Sources of the same length must not have the same order.
                seed=int(np.random.SeedSequence((seed, number)).generate_state(1)[0]),
                document_masking=config.document_masking,
            )
            for number, source in enumerate(self.sources)
        }
        return MixedTrainingBatches(
            windows,
            MixtureSchedule([each.config.weight for each in self.sources], seed),
            batch_size=batch_size,
            max_examples=steps * batch_size,
            max_epochs=[each.config.max_epochs for each in self.sources],
        )

    def _streamed_batches(
        self, config: TextDataConfig, *, batch_size: int, seed: int
    ) -> StreamedTrainingBatches:
        streaming = config.streaming

        def make_reader(number: int, group: int) -> StreamReader:
            source = self.sources[number]
            assert source.text is not None
            return StreamReader(
                source.text,
                self.tokenizer,
                files=range(group, len(source.text.files), streaming.readers),
                seeds=(seed, number, group),
                shuffle_window=streaming.shuffle_window,
                sequence_length=config.sequence_length,
                document_masking=config.document_masking,
                max_epochs=source.config.max_epochs,
            )

        return StreamedTrainingBatches(
            [each.name for each in self.sources],
            [each.config.weight for each in self.sources],
            make_reader,
            batch_size=batch_size,
            readers=streaming.readers,
            seed=seed,
        )


def prepare_any_text(
    config: TextDataConfig, *, tokenizer: Tokenizer | None = None
) -> TextCorpus | MixedCorpus:
    """Read, split and tokenize one source of text (`prepare_text`) or several.

    Raises UserError as `prepare_text` does, and for names of sources that are not distinct.
    """
    if not config.is_mixed:
        return prepare_text(config, tokenizer=tokenizer)
    tokenizer = tokenizer or prepare_any_tokenizer(config)
    sources = []
    for section, name, source in listed_sources(config):
        own = source_data(config, source)
        if config.streaming.enabled:
            text = StreamedText.find(section, name, source, config.streaming)
            splits = StreamedSplits(text, own, section)
            corpus = prepare_held_out(own, splits, tokenizer, text.identity())
        else:
            text, corpus = None, prepare_text(own, tokenizer=tokenizer, section=section)
        sources.append(MixedSource(name, source, corpus, text))
    digest = cache_key(tokenizer.digest, [each.corpus.digest for each in sources])
    notes = tuple(note for each in sources for note in each.corpus.notes)
    return MixedCorpus(tokenizer, tuple(sources), digest, notes=notes)


def prepare_any_tokenizer(config: TextDataConfig) -> Tokenizer:
    """Return the configured tokenizer of one source of text or of several.

    One that is trained reads the training texts of all sources, each in proportion to its weight.
    """
    if not config.is_mixed:
        return prepare_tokenizer(config)
    if config.streaming.enabled and config.tokenizer.kind == "character":
        raise UserError(
            "data.tokenizer.kind character: needs all characters of the text, and a stream is not "
            "read whole; choose byte, bpe or file"
        )
    splits = MixedSplits(config)
    return load_or_train_tokenizer(
        config.tokenizer, splits, splits.fingerprint(), cache_folder(config.cache_dir)
    )


def source_data(config: TextDataConfig, source: SourceConfig) -> TextDataConfig:
    """Return the settings of a source as those of a corpus of its own."""
    return dataclasses.replace(
        config,
        path=source.path,
        validation_path=source.validation_path,
        test_path=source.test_path,
        text_field=source.text_field,
        max_bytes=source.max_bytes,
        sources=(),
    )


class ListedSource(NamedTuple):
    """A source of the settings."""

    section: str
    """Its settings, for error messages: `data.sources.0`, or `data` for a single stream."""
    name: str
    config: SourceConfig


def listed_sources(config: TextDataConfig) -> list[ListedSource]:
    """Return the sources with their names.

    Raises:
      UsageError: Two have the same name, or there is a path beside them that would not be read.
    """
    if not config.sources:
        fields = ("path", "validation_path", "test_path", "text_field", "max_bytes")
        only = SourceConfig(**{name: getattr(config, name) for name in fields})
        return [ListedSource("data", _name_of_path(config.path) or "text", only)]
    for field in ("path", "validation_path", "test_path"):
        if value := getattr(config, field):
            raise UsageError(
                f"data.{field} {value}: is ignored when data.sources is set; set it to '', or "
                "make it one of the sources"
            )
    for field in ("text_field", "max_bytes"):
        value, default = getattr(config, field), getattr(SourceConfig, field)
        if value != default:
            raise UsageError(
                f"data.{field} {value}: is ignored when data.sources is set; set it to "
                f"{default!r}, and data.sources.0.{field} in its place"
            )
    listed: list[ListedSource] = []
    for number, source in enumerate(config.sources):
        name = source.name or _name_of_path(source.path) or f"source{number}"
        if any(name == each.name for each in listed):
            raise UsageError(
                f"data.sources.{number}.name: {name!r} is already the name of another source; "
                "give another"
            )
        listed.append(ListedSource(f"data.sources.{number}", name, source))
    return listed


def _name_of_path(path: str) -> str:
    """Return the last part of a path that has letters or digits, without its endings."""
    for part in reversed(pathlib.PurePosixPath(path).parts):
        if name := re.sub(r"[^\w-]+", "_", part.split(".")[0]).strip("_"):
            return name
    return ""


class StreamedSplits:
    """Documents of the splits of a streamed source.

    Attributes:
      names: The splits: "train", "validation" and, if there is one, "test".
      notes: What the user should know of how the data are read.
    """

    def __init__(self, text: StreamedText, config: TextDataConfig, section: str):
        self._text = text
        self.notes = Notes()
        self._sources = find_sources(config, section, self.notes)
        del self._sources["train"]
        self.names = tuple(dict.fromkeys(["train", "validation", *self._sources]))

    def documents(self, split: str) -> Iterator[Document]:
        """Yield the documents of a split."""
        if split in self._sources:
            return self._sources[split].documents()
        return self._text.documents(held_out=split == "validation", notes=self.notes)

    def estimate_characters(self, split: str) -> float:
        """Return the size of a split that has files of its own; 0 for the stream."""
        return self._sources[split].estimate_characters() if split in self._sources else 0.0

    def fingerprint(self) -> dict[str, object]:
        """Return JSON values that change if a split may have changed."""
        facts: dict[str, object] = {"stream": self._text.fingerprint()}
        return facts | {split: each.fingerprint() for split, each in self._sources.items()}


class MixedSplits:
    """Documents of all sources, each in proportion to its weight, to train a tokenizer on.

    Attributes:
      names: The splits: "train", "validation" and, if a source has one, "test".
      notes: None: the sources have their own.
    """

    def __init__(self, config: TextDataConfig):
        self.notes = Notes()
        listed = listed_sources(config)
        self._weights = [each.config.weight for each in listed]
        self._splits: list[DocumentSplits] = []
        for section, name, source in listed:
            own = source_data(config, source)
            if config.streaming.enabled:
                text = StreamedText.find(section, name, source, config.streaming)
                self._splits.append(StreamedSplits(text, own, section))
            else:
                self._splits.append(TextSplits(own, section))
        names = {name for splits in self._splits for name in splits.names}
        self.names = tuple(name for name in SPLITS if name in names)

    def documents(self, split: str) -> Iterator[Document]:
        """Yield the documents of a split: always of the source that is furthest behind its share.

        A source that ends leaves its share to the others.
        """
        readers = {
            number: splits.documents(split)
            for number, splits in enumerate(self._splits)
            if split in splits.names
        }
        return interleave_documents(readers, self._weights)

    def estimate_characters(self, split: str) -> float:
        """Return the size of a split in all sources; 0 if that of one is not known."""
        sizes = [each.estimate_characters(split) for each in self._splits if split in each.names]
        return sum(sizes) if all(sizes) else 0.0

    def fingerprint(self) -> dict[str, object]:
        """Return JSON values that change if a split may have changed."""
        prints = [splits.fingerprint() for splits in self._splits]
        return {"weights": self._weights, "sources": prints}


def interleave_documents(
    readers: dict[int, Iterator[Document]], weights: Sequence[float]
) -> Iterator[Document]:
    """Yield documents of several readers so that their characters are in proportion to weights."""
    characters = dict.fromkeys(readers, 0)
    readers = dict(readers)
    while readers:
        number = min(readers, key=lambda each: (characters[each] / weights[each], each))
        document = next(readers[number], None)
        if document is None:
            del readers[number]
            continue
        characters[number] += document.num_characters
        yield document


def combine_metrics(
    metrics: Mapping[str, dict[str, float]], shares: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of a mixture, and of each source as `NAME/SOURCE`.

    A metric per token is the mean over tokens of the mixture. Bits per byte are weighted by the
    bytes that the tokens of each source stand for.

    Args:
      metrics: Metrics of each source by name. They include the `loss`, in nats a token.
      shares: Share of the tokens of each source.
    """
    names = list(dict.fromkeys(name for each in metrics.values() for name in each))
    combined: dict[str, float] = {}
    for name in names:
        having = {source: each[name] for source, each in metrics.items() if name in each}
        weights = {source: shares[source] for source in having}
        if name.startswith("bits_per_byte"):
            # bytes/token = nats/token / (bits/byte * ln 2), and ln 2 is common to all.
            weights = {
                source: shares[source] * metrics[source]["loss"] / metrics[source]["bits_per_byte"]
                for source in having
            }
        total = sum(weights.values())
        combined[name] = sum(weights[source] * x for source, x in having.items()) / total
    if "perplexity" in combined:
        combined["perplexity"] = float(np.exp(min(combined["loss"], 700.0)))
    for name in names:
        if name != "perplexity":  # exp(loss): the loss of each source says it
            combined |= {f"{name}/{source}": x[name] for source, x in metrics.items() if name in x}
    return combined
