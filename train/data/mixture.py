"""Corpora of several sources of running text: one tokenizer, and the splits of each source."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from train.data.batches import TextTrainingBatches
from train.data.config import SourceConfig, TextDataConfig, TokenizerConfig
from train.data.corpus import (
    SPLITS,
    TextCorpus,
    TextSplits,
    load_or_train_tokenizer,
    prepare_text,
    prepare_tokenizer,
)
from train.data.disk_cache import cache_folder, cache_key
from train.data.mixing import MixedTrainingBatches, MixtureSchedule
from train.data.streams import TokenStream
from train.data.text_files import Document
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError


@dataclasses.dataclass(frozen=True, eq=False)
class MixedSource:
    """One source of a mixture."""

    name: str
    config: SourceConfig
    corpus: TextCorpus
    """Token streams of its splits."""


@dataclasses.dataclass(frozen=True, eq=False)
class MixedCorpus:
    """A tokenizer and several sources of text, which training mixes by weight.

    Attributes:
      tokenizer: Tokenizer of all sources.
      sources: The sources, in the order of the settings.
      digest: Digest of texts, splits and tokens: equal for equal data.
      labels: Empty: running text has no labels.
      notes: Empty.
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
        parts = ", ".join(
            f"{name} {share:.3g} ({len(source.corpus.split('train').tokens):,} tokens)"
            for source, (name, share) in zip(self.sources, self.shares.items(), strict=True)
        )
        return f"a mixture of {len(self.sources)} sources: {parts}"

    def training_batches(
        self, config: TextDataConfig, *, batch_size: int, seed: int, steps: int
    ) -> MixedTrainingBatches:
        """Return batches of windows of all sources, mixed by weight.

        Raises:
          UserError: A source is shorter than a window, or too short for the run.
        """
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
    for number, (name, source) in enumerate(named_sources(config).items()):
        corpus = prepare_text(
            source_data(config, source), tokenizer=tokenizer, section=f"data.sources.{number}"
        )
        sources.append(MixedSource(name, source, corpus))
    digest = cache_key(tokenizer.digest, [each.corpus.digest for each in sources])
    return MixedCorpus(tokenizer, tuple(sources), digest)


def prepare_any_tokenizer(config: TextDataConfig) -> Tokenizer:
    """Return the configured tokenizer of one source of text or of several.

    One that is trained reads the training texts of all sources, each in proportion to its weight.
    """
    if not config.is_mixed:
        return prepare_tokenizer(config)
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


def named_sources(config: TextDataConfig) -> dict[str, SourceConfig]:
    """Return the sources by name.

    Raises:
      UsageError: Two have the same name, or there is a path beside them that would not be read.
    """
    for field in ("path", "validation_path", "test_path"):
        if value := getattr(config, field):
            raise UsageError(
                f"data.{field} {value}: is not read beside data.sources; set it to '', or make it "
                "one of the sources"
            )
    named: dict[str, SourceConfig] = {}
    for number, source in enumerate(config.sources):
        name = source.name or _name_of_path(source.path) or f"source{number}"
        if name in named:
            raise UsageError(
                f"data.sources.{number}.name: {name!r} is the name of another source; give a name "
                "of its own"
            )
        named[name] = source
    return named


def _name_of_path(path: str) -> str:
    """Return the last part of a path that has letters or digits, without its endings."""
    for part in reversed(pathlib.PurePosixPath(path).parts):
        if name := re.sub(r"[^\w-]+", "_", part.split(".")[0]).strip("_"):
            return name
    return ""


class MixedSplits:
    """Documents of all sources, each in proportion to its weight, to train a tokenizer on.

    Attributes:
      names: The splits: "train", "validation" and, if a source has one, "test".
    """

    def __init__(self, config: TextDataConfig):
        self._weights = [each.weight for each in config.sources]
        self._splits = [
            TextSplits(source_data(config, source), f"data.sources.{number}")
            for number, source in enumerate(named_sources(config).values())
        ]
        found = {name for splits in self._splits for name in splits.names}
        self.names = tuple(name for name in SPLITS if name in found)

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
        characters[number] += len(document.text)
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


def check_tokenizer_for_streams(config: TokenizerConfig) -> None:
    """Raise UserError for a tokenizer that would read a stream to its end."""
    if config.kind == "character":
        raise UserError(
            "data.tokenizer.kind character: needs all characters of the text, and a stream is not "
            "read whole; choose byte, bpe or file"
        )
