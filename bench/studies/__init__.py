"""Studies: many runs with several seeds, which go on where they stopped."""

from bench.entries import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "scaling",
        "How does the loss fall with parameters, with tokens and with both?",
        34,
        "studies.scaling:main",
        "an H200; WikiText-2",
    ),
    Entry(
        "versus",
        "How much more compute does the Transformer of 2017 need than Transformer++?",
        160,
        "studies.versus:main",
        "an H200 for the largest; WikiText-2",
    ),
    Entry(
        "mup",
        "Is the best learning rate the same at every width, by muP and by one rate for all?",
        130,
        "studies.mup:main",
        "an H200 for the widest; WikiText-2",
    ),
    Entry(
        "lengths",
        "What does each kind of position lose beyond the trained length?",
        200,
        "studies.lengths:main",
    ),
    Entry(
        "stability",
        "Do pre- and post-norm train without warm-up, by depth?",
        130,
        "studies.stability:main",
    ),
    Entry(
        "family",
        "What do causal mixers and recurrent networks reach at equal parameters?",
        100,
        "studies.family:main",
    ),
    Entry(
        "long_recall",
        "Which mixers retrieve over 4,096 tokens, and from how far?",
        45,
        "studies.long_recall:main",
    ),
    Entry(
        "translators",
        "What BLEU do the translation systems of 2014 to 2018 reach, by source length?",
        145,
        "studies.translators:main",
        "an H200 for the recurrent ones; Multi30k",
    ),
    Entry(
        "pretraining",
        "What does masked language modeling on WikiText-2 add to TREC and SST-2?",
        150,
        "studies.pretraining:main",
        "WikiText-2, TREC, SST-2",
    ),
)
