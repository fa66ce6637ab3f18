"""Train word vectors on texts of your own, for a model's embeddings to begin with.

    python examples/word_vectors.py TEXTS [--output vectors.txt --words 20000 --width 128]
    python -m train fit trec --init-from vectors.txt

TEXTS is what `data.path` takes: a file or folder of text, JSON lines or tables, a pattern, a URL,
`python:library`. The output has the format of word2vec.
"""

from pathlib import Path

import numpy as np
import tyro

from train.data.data_config import TextDataConfig, TokenizerConfig
from train.data.text_splits import TextSplits
from train.data.tokenizer_training import train_tokenizer
from train.runtime.stages import show_stages
from train.warm_start.skip_gram import train_word_vectors
from train.warm_start.word_vectors import write_word_vectors


def main(
    texts: tyro.conf.Positional[str],
    output: Path = Path("vectors.txt"),
    words: int = 20_000,
    width: int = 128,
    steps: int = 10_000,
    lowercase: bool = False,
) -> None:
    """Write word vectors, and print the words nearest to a few.

    Args:
      texts: Texts, as `data.path` takes them.
      output: File to write.
      words: The most frequent words get a vector.
      width: Numbers of a vector.
      steps: Steps of 4,096 pairs of words.
      lowercase: Take words in lower case.
    """
    splits = TextSplits.find(TextDataConfig(path=texts))
    documents = [each.text for name in splits.names for each in splits.documents(name)]
    tokenizer = train_tokenizer(
        TokenizerConfig("word", vocab_size=words, lowercase=lowercase), documents
    )
    [unknown] = tokenizer.encode("<unk>")
    encoded = [each[each != unknown] for each in tokenizer.encode_documents(documents)]
    with show_stages():
        vectors = train_word_vectors(encoded, len(tokenizer.vocabulary), width, steps=steps)
    write_word_vectors(output, tokenizer.vocabulary, vectors)
    print(f"{output}: vectors of {len(vectors):,} words, from {sum(map(len, encoded)):,} words")

    names = {row: word for word, row in tokenizer.vocabulary.items()}
    directions = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    frequent = np.argsort(-np.bincount(np.concatenate(encoded), minlength=len(names)))
    for row in frequent[100:500:50]:
        nearest = np.argsort(-(directions @ directions[row]))[1:6]
        print(f"{names[int(row)]}: {', '.join(names[int(each)] for each in nearest)}")


if __name__ == "__main__":
    tyro.cli(main)
