"""What a token costs: operations, and bytes moved.

Only products of matrices are counted, a multiplication and an addition as two operations: norms,
softmax and activation functions are some percent more.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.core import meta

from transformer.attention.base import MixerInputs, ScoreFlops, mixer_class
from transformer.attention.config import AttentionConfig
from transformer.attention.masks import Mask, MaskPattern
from transformer.config import TransformerConfig
from transformer.hardware import Hardware
from transformer.layers.block import Memory
from transformer.layers.stack import Stack
from transformer.layers.stack_weights import layer_constants
from transformer.models.base import Model
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.parameter_counts import (
    LayerMixer,
    ParameterLeaf,
    abstract_parameters,
    count_active_entries,
    count_padding_entries,
    layer_mixers,
)


@dataclasses.dataclass(frozen=True)
class TokenFlops:
    """Floating-point operations of one token's forward pass, in a sequence of T tokens.

    Of an encoder-decoder: of one token of the source and one of the target, each T long.
    """

    sequence_length: int
    """T."""
    projections: int
    """The mixers' products with weights."""
    scores: int
    """Products of queries, keys and values, each query with all keys of its mixer's pattern.

    With full attention T keys: 2 N T (H + H of values).
    """
    scores_causal: int
    """The same with the keys that a causal mask leaves, of T keys (T + 1) / 2 on average."""
    feed_forward: int
    vocabulary: int
    """Logits of the V words, padding left out, of the share of tokens of which a word is told, and
    the layer that leads to them, if there is one. What tells classes or tags is left out."""
    uncounted: tuple[str, ...] = ()
    """Mixers whose scores have no formula (`Mixer.score_flops` returns None)."""

    def total(self, *, causal: bool) -> int:
        """The sum, with scores in full or as a causal mask leaves them."""
        scores = self.scores_causal if causal else self.scores
        return self.projections + scores + self.feed_forward + self.vocabulary

    def feed_forward_fraction(self) -> float:
        """Of the layers' operations (without the vocabulary), scores in full."""
        return self.feed_forward / (self.projections + self.scores + self.feed_forward)


def count_token_flops(
    model: Model, length: int, predicted_fraction: float | None = None
) -> TokenFlops:
    """Of one token's forward pass in sequences of `length` tokens, by part.

    `predicted_fraction` is the share of the tokens of which a word is told in training; None: the model's own.
    """
    predicted_fraction = (
        model.predicted_fraction if predicted_fraction is None else predicted_fraction
    )
    return _counted(
        model,
        length,
        predicted_fraction,
        abstract_parameters(model).leaves(),
        layer_mixers(model.config),
    )


def count_decode_step_flops(model: Model, length: int) -> TokenFlops:
    """Of a decoding step from a cache of `length` tokens, and of as many of a source."""
    leaves = (leaf for leaf in abstract_parameters(model).leaves() if _in_step(leaf, model))
    decoder = dataclasses.replace(model.config, encoder=None)
    return _counted(model, length, model.predicted_fraction, leaves, layer_mixers(decoder))


def _counted(
    model: Model,
    length: int,
    told: float,
    leaves: Iterable[ParameterLeaf],
    mixers: Iterable[LayerMixer],
) -> TokenFlops:
    """Of products with these parameters, and of the scores of these mixers."""
    config = model.config
    weights = {"mixer": 0, "feed_forward": 0, "head": 0, "vocabulary": 0}
    for leaf in leaves:
        if (place := _product(leaf, model)) is not None:
            weights[place] += count_active_entries(leaf, config) - count_padding_entries(
                leaf, config
            )
    scores: list[tuple[LayerMixer, ScoreFlops]] = []
    uncounted = set()
    for layer in mixers:
        count = mixer_class(layer.mixer).score_flops(layer.mixer, config.d_model, length)
        if count is None:
            uncounted.add(layer.mixer.kind)
        else:
            scores.append((layer, count))
    return TokenFlops(
        sequence_length=length,
        projections=2 * weights["mixer"],
        scores=sum(count.full for _, count in scores),
        scores_causal=sum(count.causal if layer.causal else count.full for layer, count in scores),
        feed_forward=2 * weights["feed_forward"],
        vocabulary=round(2 * told * weights["vocabulary"]) + 2 * weights["head"],
        uncounted=tuple(sorted(uncounted)),
    )


def estimate_training_flops(config: TransformerConfig, parameters: int, length: int) -> int:
    """6 N + 12 L D T operations to train on one token (Chowdhery et al. 2022, appendix B)."""
    return 6 * parameters + 12 * config.num_layers * config.d_model * length


def _product(leaf: ParameterLeaf, model: Model) -> str | None:
    """In which product tokens meet this matrix; None for biases, gains and look-ups."""
    if leaf.path == (("embedding",) if model.config.tie_embeddings else ("output",)):
        return "vocabulary" if model.predicted_fraction else None
    if leaf.path[0] == "head" and model.predicted_fraction and leaf.axes.is_matrix:
        return "head"
    if leaf.path_in_side[0] != "layers" or not leaf.axes.is_matrix:
        return None
    return "feed_forward" if leaf.path_in_side[2] == "feed_forward" else "mixer"


def decode_step_weight_bytes(model: Model) -> int:
    """What decoding one token reads of the weights: all of them, but of look-up tables a row.

    Of an encoder-decoder all that meets the token: nothing of the encoder, and nothing that only
    the source meets, as the cache has been filled.
    """
    read = 0
    for leaf in abstract_parameters(model).leaves():
        if not _in_step(leaf, model):
            continue
        table = leaf.path_in_side[0] in ("embedding", "positions")
        whole = _product(leaf, model) is not None or not table
        read += leaf.num_bytes if whole else leaf.num_bytes // leaf.shape[0]
    return read


def _in_step(leaf: ParameterLeaf, model: Model) -> bool:
    """Whether a decoding step meets this parameter, once the cache holds what it needs."""
    if not isinstance(model, EncoderDecoder):
        return True
    if leaf.path_in_side[0] == "layers":
        return leaf.path[0] == "decoder" and leaf.path[2:] in _step_layers(model)
    return leaf.path[0] not in ("encoder", "source_embedding")


@functools.lru_cache(maxsize=8)
def _step_layers(model: EncoderDecoder) -> frozenset[tuple[str, ...]]:
    """The parameters that the decoder's layers use with a cache that has read the source.

    As paths below those layers. Blocks declare what they use: here they are made without a memory,
    so cross attention declares no matrices of keys and values.
    """
    shared = dataclasses.replace(model.context, hardware=Hardware())
    stack = Stack(model.config.layer_pattern, shared, parent=None)
    places = range(min(len(stack.layer_pattern), shared.num_layers))

    def declared() -> Any:
        caches, positions = model.init_cache(1, 1, 1), jnp.zeros((1, 1), jnp.int32)
        x = jnp.zeros((1, 1, shared.d_model), shared.precision.compute)
        inputs = MixerInputs(positions, Mask(MaskPattern(causal=True), positions=positions))
        memory = Memory(None, Mask(MaskPattern(ordered=False), positions=positions))

        def place_params(place: int) -> Any:
            given = inputs.replace(
                cache=caches[place],
                constants=layer_constants(stack.layer_pattern[place], place, shared),
            )
            return stack.make_block(place).init(jax.random.key(0), x, given, memory)["params"]

        return {f"place_{place}": place_params(place) for place in places}

    shapes = meta.unbox(jax.eval_shape(declared))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return frozenset(tuple(key.key for key in path) for path, _ in leaves)


class AttentionTraffic(NamedTuple):
    """Bytes that attention moves to and from memory for one token of a forward pass."""

    plain: int
    """Scores written, read by the softmax, its weights written, and read again."""
    flash: int
    """Queries, keys, values and results alone (Dao et al. 2022); keys and values counted once."""


def attention_traffic(model: Model, length: int) -> AttentionTraffic:
    """Summed over the layers that have full attention, in sequences of `length` tokens."""
    config = model.config
    item = jnp.dtype(config.precision.compute).itemsize
    plain = flash = 0
    for mixer, _, _ in layer_mixers(config):
        if isinstance(mixer, AttentionConfig):
            value = mixer.value_head_dim or mixer.resolved_head_dim(config.d_model)
            heads = mixer.num_heads + (mixer.num_kv_heads or mixer.num_heads)
            flash += item * heads * (mixer.score_head_dim(config.d_model) + value)
            plain += item * 4 * mixer.num_heads * length
    return AttentionTraffic(plain=plain + flash, flash=flash)
