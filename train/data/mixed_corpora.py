"""Corpora of several sources of running text, or of streams, with one tokenizer."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from train.data.batches import TextTrainingBatches, TrainingBatches
from train.data.corpus import (
    TextCorpus,
    load_or_train_tokenizer,
    prepare_text,
    read_token_arrays,
    tokenize_splits,
    tokenizer_of_arrays,
)
from train.data.data_config import SourceConfig, TextDataConfig
from train.data.files import SPLITS, Notes
from train.data.source_mixing import MixedTrainingBatches, MixtureSchedule
from train.data.streaming import StreamedText, StreamedTrainingBatches, StreamReader
from train.data.text_files import Document
from train.data.text_splits import TextSource, TextSplits, find_sources
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
    """A tokenizer and several sources of text, which training mixes by weight."""

    tokenizer: Tokenizer
    sources: tuple[MixedSource, ...]
    """The sources, in the order of the settings."""
    digest: str
    """Digest of texts, splits and tokens: equal for equal data."""
    labels: tuple[str, ...] = ()
    """Empty: running text has no labels."""
    notes: tuple[str, ...] = ()
    """What the user should know of how the data were read."""

    @property
    def streams(self) -> Mapping[str, TokenStream]:
        """Token streams by split and source: `train/wiki`."""
        return {
            f"{split}/{source.name}": source.corpus.streams[split]
            for split in SPLITS
            for source in self.sources
            if split in source.corpus.streams
        }

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
        total = sum(source.config.weight for source in self.sources)
        parts = ", ".join(
            f"{source.name} {source.config.weight / total:.3g} ({source.size})"
            for source in self.sources
        )
        return f"a mixture of {len(self.sources)} sources: {parts}"

    def training_batches(
        self, config: TextDataConfig, *, batch_size: int, seed: int, steps: int
    ) -> TrainingBatches:
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
    tokenizer = tokenizer or prepare_tokenizer(config)
    sources = []
    for section, name, source in listed_sources(config):
        own = source_data(config, source)
        if config.streaming.enabled:
            text = StreamedText.find(section, name, source, config.streaming)
            splits = streamed_splits(text, own, section)
            held_out = {name: each for name, each in splits.sources.items() if name != "train"}
            splits = dataclasses.replace(splits, sources=held_out)
            corpus = tokenize_splits(splits, tokenizer, cache_folder(config.cache_dir))
            # The digest tells the stream from others.
            digest = cache_key(corpus.digest, text.identity())
            corpus = dataclasses.replace(corpus, digest=digest)
        else:
            text, corpus = None, prepare_text(own, tokenizer=tokenizer, section=section)
        sources.append(MixedSource(name, source, corpus, text))
    digest = cache_key(tokenizer.digest, [each.corpus.digest for each in sources])
    notes = tuple(note for each in sources for note in each.corpus.notes)
    return MixedCorpus(tokenizer, tuple(sources), digest, notes=notes)


def prepare_tokenizer(config: TextDataConfig) -> Tokenizer:
    """Return the configured tokenizer of one source of text or of several.

    One that is trained reads the training texts of all sources, each in proportion to its weight.
    """
    if (arrays := read_token_arrays(config)) is not None:
        return tokenizer_of_arrays(config, arrays)
    if config.streaming.enabled and config.tokenizer.kind == "character":
        raise UserError(
            "data.tokenizer.kind character: needs all characters of the text, and a stream is not "
            "read whole; choose byte, bpe or file"
        )
    splits = mixed_splits(config) if config.is_mixed else TextSplits.find(config)
    return load_or_train_tokenizer(config.tokenizer, splits, cache_folder(config.cache_dir))


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


def listed_sources(config: TextDataConfig) -> list[tuple[str, str, SourceConfig]]:
    """Return the section of the settings of each source, its name, and its settings.

    Raises:
      UsageError: Two have the same name, or there is a path beside them that would not be read.
    """
    fields = ("path", "validation_path", "test_path", "text_field", "max_bytes")
    if not config.sources:
        only = SourceConfig(**{name: getattr(config, name) for name in fields})
        return [("data", _name_of_path(config.path) or "text", only)]
    for field in fields:
        value, default = getattr(config, field), getattr(SourceConfig, field)
        if value != default:
            raise UsageError(
                f"data.{field} {value}: is ignored when data.sources is set; set it to "
                f"{default!r}, and data.sources.0.{field} in its place"
            )
    listed: list[tuple[str, str, SourceConfig]] = []
    for number, source in enumerate(config.sources):
        name = source.name or _name_of_path(source.path) or f"source{number}"
        if any(name == other for _, other, _ in listed):
            raise UsageError(
                f"data.sources.{number}.name: {name!r} is already the name of another source; "
                "give another"
            )
        listed.append((f"data.sources.{number}", name, source))
    return listed


def _name_of_path(path: str) -> str:
    """Return the last part of a path that has letters or digits, without its endings."""
    for part in reversed(pathlib.PurePosixPath(path).parts):
        if name := re.sub(r"[^\w-]+", "_", part.split(".")[0]).strip("_"):
            return name
    return ""


def streamed_splits(text: StreamedText, config: TextDataConfig, section: str) -> TextSplits:
    """Return the splits of a streamed source: held-out text is of other files, or of its start."""
    notes = Notes()
    sources = find_sources(config, section, notes)
    for split in ("train", *(() if "validation" in sources else ("validation",))):
        documents = functools.partial(text.documents, held_out=split == "validation", notes=notes)
        sources[split] = TextSource(documents, text.fingerprint)
    return TextSplits({split: sources[split] for split in SPLITS if split in sources}, notes)


def mixed_splits(config: TextDataConfig) -> TextSplits:
    """Return the splits of all sources, each in proportion to its weight, to train a tokenizer."""
    listed = listed_sources(config)
    weights = [source.weight for *_, source in listed]
    every: list[TextSplits] = []
    for section, name, source in listed:
        own = source_data(config, source)
        if config.streaming.enabled:
            text = StreamedText.find(section, name, source, config.streaming)
            every.append(streamed_splits(text, own, section))
        else:
            every.append(TextSplits.find(own, section))

    def mixed(split: str) -> TextSource:
        having = {n: each.sources[split] for n, each in enumerate(every) if split in each.sources}

        def num_characters() -> float:
            sizes = [each.num_characters() for each in having.values()]
            return sum(sizes) if all(sizes) else 0.0

        return TextSource(
            lambda: interleave_documents({n: x.documents() for n, x in having.items()}, weights),
            lambda: [weights, {n: each.fingerprint() for n, each in having.items()}],
            num_characters,
        )

    names = {name for splits in every for name in splits.names}
    return TextSplits({split: mixed(split) for split in SPLITS if split in names}, Notes())


def interleave_documents(
    readers: dict[int, Iterator[Document]], weights: Sequence[float]
) -> Iterator[Document]:
    """Yield documents of several readers so that their characters are in proportion to weights.

    The next is always of the reader that is furthest behind; one that ends leaves its share.
    """
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
