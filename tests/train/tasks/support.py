"""Tiny experiments of every task, each with its own small file."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import jax

from tests.train.support import LENGTH, tiny, write_text
from train.data.bitext import BitextDataConfig
from train.data.data_config import TokenizerConfig
from train.data.question_answers import QuestionAnsweringDataConfig
from train.data.text_labels import ClassificationDataConfig
from train.data.token_labels import TokenLabelDataConfig
from train.experiment import EvaluationConfig, Experiment
from train.tasks.classification import Classification, Tagging
from train.tasks.masked_language_modeling import MaskedLanguageModeling
from train.tasks.question_answering import QuestionAnswering
from train.tasks.translation import Translation
from transformer import AttentionConfig, EncoderConfig

ANIMALS = {"cat": "Katze", "fish": "Fisch", "dog": "Hund"}
TOOLS = {"saw": "Säge", "drill": "Bohrer", "axe": "Axt"}
OTHERS = {"the": "das", "a": "ein", "red": "rotes", "by": "von", "and": "und"}


def large_params(model: Any, factor: float) -> Any:
    """Return initial weights with matrices so large that answers differ, by one program."""

    @jax.jit
    def draw(key: jax.Array) -> Any:
        scale = lambda leaf: leaf * (factor if leaf.ndim > 1 else 1)  # noqa: E731
        return jax.tree.map(scale, model.init_params(key))

    return draw(jax.random.key(0))


def rng(seed: int) -> random.Random:
    return random.Random(seed)


def write_labeled_texts(path: Path, *, lines: int, seed: int) -> Path:
    """Write texts of 6 words, one of which determines the label."""
    drawn = rng(seed)
    rows = []
    for _ in range(lines):
        label, words = ("animal", ANIMALS) if drawn.random() < 0.5 else ("tool", TOOLS)
        text = [drawn.choice(list(OTHERS)) for _ in range(5)]
        text.insert(drawn.randrange(len(text)), drawn.choice(list(words)))
        rows.append(f"{label}\t{' '.join(text)}\n")
    path.write_text("label\ttext\n" + "".join(rows))
    return path


def write_tagged_words(path: Path, *, sentences: int, seed: int) -> Path:
    """Write sentences of 6 words in which animals are spans, some preceded by "red"."""
    drawn = rng(seed)
    result = []
    for _ in range(sentences):
        words, before = [], "the"
        for _ in range(6):
            word = drawn.choice(["the", "red", *ANIMALS])
            inside = before == "red" and word in ANIMALS
            tag = "O" if word == "the" else "I-ANIMAL" if inside else "B-ANIMAL"
            words.append(f"{word} {tag}\n")
            before = word
        result.append("".join(words))
    path.write_text("\n".join(result))
    return path


def write_questions(path: Path, *, questions: int, seed: int) -> Path:
    """Write questions for the animal or the tool of texts of 6 or 14 words; a third has none."""
    drawn = rng(seed)
    rows = []
    for number in range(questions):
        kind, names = drawn.choice([("animal", ANIMALS), ("tool", TOOLS)])
        words = [drawn.choice(list(OTHERS)) for _ in range(14 if number % 4 == 0 else 6)]
        answers: dict[str, list[object]] = {"text": [], "answer_start": []}
        if number % 3:
            place, name = drawn.randrange(len(words)), drawn.choice(list(names))
            answers = {"text": [name], "answer_start": [len(" ".join([*words[:place], ""]))]}
            words[place] = name
        row = {"question": f"which {kind}", "context": " ".join(words), "answers": answers}
        rows.append(json.dumps(row) + "\n")
    path.write_text("".join(rows))
    return path


def write_bitext(stem: Path, *, pairs: int, seed: int) -> Path:
    """Write sentences of 2 or 5 words, and the same word by word in a kind of German."""
    drawn, words = rng(seed), ANIMALS | OTHERS
    chosen = [
        [drawn.choice(list(words)) for _ in range(2 if number % 2 else 5)]
        for number in range(pairs)
    ]
    sides = {"en": chosen, "de": [[words[word] for word in each] for each in chosen]}
    for language, sentences in sides.items():
        lines = "".join(f"{' '.join(each)}\n" for each in sentences)
        stem.with_name(f"{stem.name}.{language}").write_text(lines, encoding="utf-8")
    return stem


def encoder(experiment: Experiment) -> Experiment:
    """Return the experiment with a bidirectional model."""
    model = dataclasses.replace(experiment.model, causal=False)
    return dataclasses.replace(experiment, model=model)


def tiny_language(folder: Path, **changes: Any) -> Experiment:
    text = write_text(folder / "test.txt", lines=30, seed=5)
    experiment = tiny(folder, num_layers=1)
    data = dataclasses.replace(experiment.text_data, test_path=str(text))
    return dataclasses.replace(experiment, data=data, **changes)


def tiny_masked(folder: Path, **changes: Any) -> Experiment:
    experiment = tiny_language(folder)
    model = dataclasses.replace(experiment.model, causal=False)
    return dataclasses.replace(
        experiment, task=MaskedLanguageModeling(mlm_probability=0.3), model=model, **changes
    )


def tiny_classifier(folder: Path, *, dropout: float = 0.1, **changes: Any) -> Experiment:
    data = ClassificationDataConfig(
        path=str(write_labeled_texts(folder / "train.tsv", lines=200, seed=0)),
        test_path=str(write_labeled_texts(folder / "test.tsv", lines=21, seed=1)),
        max_length=LENGTH,
        tokenizer=TokenizerConfig("word"),
    )
    return dataclasses.replace(
        encoder(tiny(folder, num_layers=1, dropout=dropout)),
        task=Classification(pooling="mean"),
        data=data,
        **changes,
    )


def tiny_tagger(folder: Path, **changes: Any) -> Experiment:
    data = TokenLabelDataConfig(
        path=str(write_tagged_words(folder / "train.txt", sentences=200, seed=0)),
        test_path=str(write_tagged_words(folder / "test.txt", sentences=21, seed=1)),
        max_length=LENGTH,
        tokenizer=TokenizerConfig("word"),
    )
    return dataclasses.replace(
        encoder(tiny(folder, num_layers=1)), task=Tagging(), data=data, **changes
    )


def tiny_answerer(folder: Path, **changes: Any) -> Experiment:
    data = QuestionAnsweringDataConfig(
        path=str(write_questions(folder / "train.jsonl", questions=200, seed=0)),
        test_path=str(write_questions(folder / "test.jsonl", questions=21, seed=1)),
        max_length=LENGTH,
        overlap=4,
        tokenizer=TokenizerConfig("word"),
    )
    experiment = encoder(tiny(folder, num_layers=1))
    model = dataclasses.replace(experiment.model, num_token_types=2)
    return dataclasses.replace(
        experiment, task=QuestionAnswering(), data=data, model=model, **changes
    )


def tiny_translator(folder: Path, **changes: Any) -> Experiment:
    data = BitextDataConfig(
        path=str(write_bitext(folder / "train", pairs=200, seed=0)),
        test_path=str(write_bitext(folder / "test", pairs=21, seed=1)),
        max_length=LENGTH,
        batch_tokens=80,
        tokenizer=TokenizerConfig("word", lowercase=True),
    )
    experiment = tiny(folder, num_layers=1)
    [block] = experiment.model.layer_pattern
    model = dataclasses.replace(
        experiment.model,
        encoder=EncoderConfig(num_layers=1, layer_pattern=(block,)),
        layer_pattern=(dataclasses.replace(block, cross_attention=AttentionConfig(num_heads=2)),),
    )
    return dataclasses.replace(
        experiment,
        task=Translation(num_beams=2, extra_length=3),
        data=data,
        model=model,
        evaluation=EvaluationConfig(every=0, num_batches=1),
        **{"batch_size": 0, **changes},
    )


TINY = {
    "language": tiny_language,
    "masked": tiny_masked,
    "classification": tiny_classifier,
    "tagging": tiny_tagger,
    "answers": tiny_answerer,
    "translation": tiny_translator,
}
