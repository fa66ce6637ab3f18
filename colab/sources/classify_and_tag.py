# %% title [markdown]
# # Classify texts and tag words
#
# Two encoders, trained on data that every Python has: one predicts which package a docstring comes from, one tags the words of program lines. Nothing is downloaded; it takes about two minutes on a CPU.

# %% setup [markdown]
# Installation

# %% settings tags=["parameters"]
CLASSIFICATION_STEPS = 150
TAGGING_STEPS = 150

# %% texts-text [markdown]
# ## 1. Docstrings of six packages
#
# A list of `(text, label)` pairs is all that a classifier needs.

# %% texts
import ast
import collections
import pathlib
import random
import sysconfig

PACKAGES = ("asyncio", "email", "importlib", "logging", "unittest", "xml")
library = pathlib.Path(sysconfig.get_path("stdlib"))


def parse_files(package):
    """Return the syntax trees and texts of a package's files, without its tests."""
    paths = sorted((library / package).rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths if "test" not in path.parts]
    return [(ast.parse(text), text) for text in texts]


parsed = {package: parse_files(package) for package in PACKAGES}
documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
pairs = []
for package, files in parsed.items():
    for tree, _ in files:
        nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
        texts = {ast.get_docstring(node) for node in nodes} - {None}
        pairs += [
            (" ".join(text.split()[:40]), package) for text in sorted(texts) if len(text) > 40
        ]
random.Random(0).shuffle(pairs)
counts = collections.Counter(label for _, label in pairs)
print(len(pairs), "texts:", dict(counts))
print(pairs[0])

# %% classify-text [markdown]
# ## 2. Train a classifier
#
# A bidirectional encoder, the mean of its outputs, and a linear layer. Three hundred pairs are held out. `run.generate` answers with the class.

# %% classify
import tempfile

import train
from train.data.data_config import TokenizerConfig
from train.data.text_labels import ClassificationDataConfig
from train.data.token_labels import TokenLabelDataConfig
from train.experiment import EvaluationConfig
from train.optim.schedules import ScheduleConfig
from train.tasks.classification import Classification, Tagging
from transformer import AttentionConfig, BlockConfig, RoPE, TransformerConfig

mixer = AttentionConfig(num_heads=4, position=RoPE())
encoder = TransformerConfig(
    d_model=64,
    num_layers=2,
    layer_pattern=(BlockConfig(mixer=mixer, residual_dropout=0.2),),
    causal=False,
    embedding_dropout=0.3,
)
experiment = train.Experiment(
    name="packages",
    task=Classification(pooling="mean"),
    model=encoder,
    data=ClassificationDataConfig(
        max_length=64,
        max_buckets=2,
        tokenizer=TokenizerConfig("word", vocab_size=4000, lowercase=True),
    ),
    schedule=ScheduleConfig("cosine", learning_rate=2e-3, warmup_steps=20),
    steps=CLASSIFICATION_STEPS,
    batch_size=32,
    evaluation=EvaluationConfig(every=50, num_batches=0),
)
data = {"train": pairs[300:], "validation": pairs[:300]}
run = train.fit(experiment, tempfile.mkdtemp() + "/packages", data=data)

most_frequent = max(counts.values()) / len(pairs)
accuracy = run.final_metrics["accuracy"]
print(f"accuracy {accuracy:.2f}; the most frequent class alone would give {most_frequent:.2f}")
assert accuracy > most_frequent + 0.2
for text in (
    "Return a handler that writes records to a file.",
    "Run the test case and collect failures.",
):
    print(f"{run.generate(text):12} {text}")

# %% confusion-text [markdown]
# **Class by class.** `evaluate` takes other examples; here are the held-out texts of each class.

# %% confusion
for package in PACKAGES:
    own = [pair for pair in data["validation"] if pair[1] == package]
    print(f"{package:12} {run.evaluate(data=own)['accuracy']:.2f} of {len(own)} texts")

# %% lines-text [markdown]
# ## 3. Tag the words of program lines
#
# Each word of a line gets a tag: keyword, name of a definition, name of a call, argument, attribute, variable. Punctuation is removed, so the tag has to be inferred from the words around. Examples are pairs of a list of words and a list of tags.

# %% lines
import io
import keyword
import tokenize


def tag_lines(text):
    """Yield (words, tags) of every line."""
    lines = collections.defaultdict(list)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if token.type != tokenize.NAME:
            continue
        if keyword.iskeyword(token.string):
            tag = "KEYWORD"
        elif before.string in ("def", "class"):
            tag = "DEFINITION"
        elif after.string == "(":
            tag = "CALL"
        elif before.string == ".":
            tag = "ATTRIBUTE"
        elif after.string == "=" and before.string in ("(", ","):
            tag = "ARGUMENT"
        else:
            tag = "VARIABLE"
        lines[token.start[0]].append((token.string, tag))
    for line in lines.values():
        if 3 <= len(line) <= 16:
            yield tuple(zip(*line, strict=True))


examples = [line for files in parsed.values() for _, text in files for line in tag_lines(text)]
random.Random(0).shuffle(examples)
examples = [(list(words), list(tags)) for words, tags in examples[:6000]]
print(len(examples), "lines")
print(*zip(*examples[1], strict=True))

# %% tag
experiment = train.Experiment(
    name="words",
    task=Tagging(),
    model=encoder,
    data=TokenLabelDataConfig(
        max_length=64, max_buckets=2, tokenizer=TokenizerConfig("bpe", vocab_size=2000)
    ),
    schedule=ScheduleConfig("cosine", learning_rate=3e-3, warmup_steps=20),
    steps=TAGGING_STEPS,
    batch_size=32,
    evaluation=EvaluationConfig(every=50, num_batches=0),
)
run = train.fit(experiment, tempfile.mkdtemp() + "/words", data=examples)

# A baseline: every word gets the tag that it has most often.
frequent = collections.defaultdict(collections.Counter)
for words, tags in examples[1000:]:
    for word, tag in zip(words, tags, strict=True):
        frequent[word][tag] += 1
held = [pair for words, tags in examples[:1000] for pair in zip(words, tags, strict=True)]
guesses = [frequent[word].most_common(1) for word, _ in held]
baseline = sum(bool(g) and g[0][0] == tag for g, (_, tag) in zip(guesses, held, strict=True)) / len(
    held
)
accuracy = run.final_metrics["accuracy"]
print(f"accuracy {accuracy:.3f}; the most frequent tag of each word gives {baseline:.3f}")
assert accuracy > baseline

# %% answer
for line in ("return self close", "def close self force False", "for key value in items"):
    print(run.generate(line))

# %% next [markdown]
# ## Next steps
#
# - `python -m train fit trec` and `ud_ewt` train on the published corpora of questions and of tagged sentences.
# - `docs/tasks.md` describes the files, the metrics, and how to add a task.
