"""What a token costs beyond products with weights: a formula for each kind of mixer.

Products of queries, keys and values, and of features and buckets made of them; a multiplication and
an addition are two operations.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from transformer.attention import AttentionConfig
from transformer.heads import HeadsConfig
from transformer.positions import RelativePositions
from transformer.recurrent import ChengConfig
from transformer.variants.bigbird import BigBirdConfig
from transformer.variants.keys_seen import (
    KeysSeen,
    in_bigbird,
    in_groups,
    in_longformer,
    in_sparse,
    in_window,
)
from transformer.variants.linear_attention import LinearAttentionConfig
from transformer.variants.linformer import LinformerConfig
from transformer.variants.longformer import LongformerConfig
from transformer.variants.performer import PerformerConfig
from transformer.variants.primer import PrimerConfig
from transformer.variants.reformer import ReformerConfig
from transformer.variants.routing_attention import RoutingConfig
from transformer.variants.sliding_window import SlidingWindowConfig
from transformer.variants.sparse import SparseConfig
from transformer.variants.top_k import TopKConfig


class ScoreFlops(NamedTuple):
    """Of one token in one layer."""

    full: int
    causal: int


def _attention_scores(mixer: AttentionConfig, width: int, length: int) -> ScoreFlops:
    """An additive score is one product too: of its hidden layer and a vector, for each key."""
    both = mixer.meeting_width(width) + (mixer.value_width or mixer.query_width(width))
    each, once = mixer.heads * both, 0  # multiplications with one key, and with none
    if isinstance(mixer.position, RelativePositions):
        each += mixer.heads * 2 * mixer.position.distances
        once = mixer.heads * both * mixer.position.distances
    return ScoreFlops(full=2 * (each * length + once), causal=each * (length + 1) + 2 * once)


def _no_scores(mixer: Any, width: int, length: int) -> ScoreFlops:
    return ScoreFlops(full=0, causal=0)


def _primer_scores(mixer: PrimerConfig, width: int, length: int) -> ScoreFlops:
    each = mixer.heads * 2 * mixer.width_of_heads(width)
    return ScoreFlops(full=2 * each * length, causal=each * (length + 1))


def _window_scores(mixer: SlidingWindowConfig, width: int, length: int) -> ScoreFlops:
    return _with_keys(mixer, width, in_window(mixer, length))


def _sparse_scores(mixer: SparseConfig, width: int, length: int) -> ScoreFlops:
    return _with_keys(mixer, width, in_sparse(mixer, length))


def _longformer_scores(mixer: LongformerConfig, width: int, length: int) -> ScoreFlops:
    return _with_keys(mixer, width, in_longformer(mixer, length))


def _bigbird_scores(mixer: BigBirdConfig, width: int, length: int) -> ScoreFlops:
    return _with_keys(mixer, width, in_bigbird(mixer, length))


def _with_keys(mixer: HeadsConfig, width: int, seen: KeysSeen) -> ScoreFlops:
    """A product of a query and a key, and a share of a value, for each key seen."""
    each = 4 * mixer.heads * mixer.query_width(width)
    return ScoreFlops(full=round(each * seen.all), causal=round(each * seen.causal))


def _kernel_scores(
    mixer: PerformerConfig | LinearAttentionConfig, width: int, length: int
) -> ScoreFlops:
    """Features, their sums with values, and what a query reads of them, at whatever length."""
    head = mixer.query_width(width)
    features, drawn = head, 0
    if isinstance(mixer, PerformerConfig):
        features, drawn = mixer.features, mixer.directions
    each = (mixer.heads + mixer.key_heads) * (drawn * head + features * (head + 1))
    return ScoreFlops(full=2 * each, causal=2 * each)


def _linformer_scores(mixer: LinformerConfig, width: int, length: int) -> ScoreFlops:
    """A key and a value into `rank` others, which a query meets; of one document a row."""
    each = 2 * (mixer.heads + mixer.key_heads) * mixer.query_width(width) * mixer.rank
    return ScoreFlops(full=2 * each, causal=2 * each)


def _top_k_scores(mixer: TopKConfig, width: int, length: int) -> ScoreFlops:
    """Scores of all keys, values of those chosen."""
    each = 2 * mixer.heads * mixer.query_width(width)
    averaged = round(each * in_groups(mixer.chosen, length).causal)
    return ScoreFlops(
        full=each * (length + min(mixer.chosen, length)),
        causal=each * (length + 1) // 2 + averaged,
    )


def _routing_scores(mixer: RoutingConfig, width: int, length: int) -> ScoreFlops:
    """Products with centroids, and with the members of a cluster, at most `window`."""
    each, vectors = 2 * mixer.heads * mixer.query_width(width) * mixer.clusters, 1 + mixer.balanced
    if mixer.balanced:
        size = min(mixer.window, length)
        members = 2 * each * size * size // length
        return ScoreFlops(full=vectors * each + members, causal=vectors * each + members)
    found = _with_keys(mixer, width, in_groups(mixer.window, length))
    return ScoreFlops(full=each + found.full, causal=each + found.causal)


def _reformer_scores(mixer: ReformerConfig, width: int, length: int) -> ScoreFlops:
    """Of each round, products with the rotation and with the members of a bucket, at most."""
    each = mixer.heads * mixer.query_width(width) * mixer.buckets
    found = _with_keys(mixer, width, in_groups(mixer.window, length))
    return ScoreFlops(*(mixer.rounds * (each + keys) for keys in found))


def _cheng_scores(mixer: ChengConfig, width: int, length: int) -> ScoreFlops:
    """Scores, and averages of hidden states and of cells, over the tokens before."""
    each = (mixer.score or width) + 2 * width
    return ScoreFlops(full=2 * each * length, causal=each * (length - 1))


def _memory_scores(mixer: Any, width: int, length: int) -> ScoreFlops:
    """A recurrence that looks at all of a memory at each step, causal or not."""
    both = mixer.widths(width)[1] + width  # a score, and its share of the average
    return ScoreFlops(full=2 * both * length, causal=2 * both * length)


WITHOUT_SCORES = ("identity", "convolution", "elman", "lstm", "seq2seq", "gnmt_encoder")

SCORES: dict[str, Callable[[Any, int, int], ScoreFlops]] = {
    AttentionConfig.kind: _attention_scores,
    **dict.fromkeys(WITHOUT_SCORES, _no_scores),
    PrimerConfig.kind: _primer_scores,
    SlidingWindowConfig.kind: _window_scores,
    SparseConfig.kind: _sparse_scores,
    LongformerConfig.kind: _longformer_scores,
    BigBirdConfig.kind: _bigbird_scores,
    PerformerConfig.kind: _kernel_scores,
    LinearAttentionConfig.kind: _kernel_scores,
    LinformerConfig.kind: _linformer_scores,
    TopKConfig.kind: _top_k_scores,
    RoutingConfig.kind: _routing_scores,
    ReformerConfig.kind: _reformer_scores,
    ChengConfig.kind: _cheng_scores,
    **dict.fromkeys(("bahdanau", "luong", "gnmt_decoder"), _memory_scores),
}
"""By `kind`: (a mixer's configuration, D, T) -> a token's operations that take no weights."""
