"""Small experiments behind the claims of docs/claims.md, and the figures of the documentation."""

from bench.entries import Entry

_RUN = "a trained run"
_DATA = "data in $TRANSFORMER_DATA"

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "rank_collapse",
        "How fast do layers of attention alone make all tokens equal?",
        0.3,
        "claims.architecture:rank_collapse",
    ),
    Entry(
        "norm_placement",
        "How do gradients differ between layers with pre- and post-norm?",
        2,
        "claims.architecture:norm_placement",
    ),
    Entry(
        "gradient_distance",
        "How far back does a gradient reach in recurrences and in attention?",
        0.3,
        "claims.architecture:gradient_distance",
    ),
    Entry(
        "ablations",
        "What does one change at a time do to the loss of the quickstart's model?",
        60,
        "claims.architecture:ablations",
    ),
    Entry("sinusoids", "What do sinusoidal positions look like?", 0, "claims.positions:sinusoids"),
    Entry(
        "positions",
        "Which position encodings hold beyond the length of training?",
        60,
        "claims.positions:positions",
    ),
    Entry(
        "context_extension",
        "Which rule extends RoPE to longer contexts?",
        90,
        "claims.positions:context_extension",
    ),
    Entry(
        "head_patterns",
        "How different is what the heads of a layer attend to?",
        1,
        "claims.heads:head_patterns",
        _RUN,
    ),
    Entry(
        "distant_phrases",
        "Do heads lead from a verb to its distant complement?",
        1,
        "claims.heads:distant_phrases",
        _RUN,
    ),
    Entry("patterns", "Which query sees which key?", 1, "claims.patterns:patterns"),
    Entry(
        "performer_error",
        "How close do random features come to softmax?",
        1,
        "claims.patterns:performer_error",
    ),
    Entry(
        "long_range",
        "What do variants of attention reach on tasks of the Long Range Arena?",
        45,
        "claims.long_range:long_range",
        "SST-2 in $TRANSFORMER_DATA for byte_text",
    ),
    Entry(
        "senses",
        "From which layer on do hidden states tell the senses of a word apart?",
        1,
        "claims.words:senses",
        _RUN,
    ),
    Entry(
        "articles",
        "Does a translator look at the noun before it writes the article?",
        2,
        "claims.words:articles",
        _RUN,
    ),
    Entry(
        "word_vectors",
        "What do pretrained word vectors add to a classifier?",
        20,
        "claims.words:word_vectors",
        _DATA,
    ),
    Entry(
        "treebank_phrases",
        "Writes the labeled phrases of a treebank, for sst2:bag.",
        0,
        "claims.words:treebank_phrases",
        "the Stanford Sentiment Treebank",
    ),
    Entry(
        "baselines",
        "What do models that only count reach?",
        8,
        "claims.baselines:baselines",
        _DATA,
    ),
    Entry(
        "explanations",
        "Draws the figures of docs/explanation.",
        0.2,
        "claims.figures:explanations",
    ),
    Entry(
        "pictures",
        "Draws activations, learning rates, float formats and a spike.",
        1,
        "claims.figures:pictures",
    ),
    Entry(
        "trace_figure",
        "What does a trace show if the device waits for its batches?",
        2,
        "claims.figures:trace_figure",
    ),
)
