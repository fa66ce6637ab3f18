"""FLOPs and memory traffic of a model, per token.

Only matrix products are counted, a multiply-add as two FLOPs: norms, softmax and activations add a
few percent.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.attention.full import AttentionConfig
from transformer.attention.masks import Mask, MaskPattern
from transformer.attention.mixer import MixerInputs, mixer_class
from transformer.hardware import Hardware
from transformer.lora import LoRALayout
from transformer.models.block import Block, Memory, layer_constants
from transformer.models.config import TransformerConfig
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.model import Model
from transformer.models.stack import zero_shared_bias
from transformer.parameter_counts import (
    LayerMixer,
    ParameterLeaf,
    abstract_parameters,
    count_active_entries,
    count_padding_entries,
    count_uses,
    layer_mixers,
)
from transformer.validation import check_integer


@dataclasses.dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token in a sequence of T tokens: of a forward pass, or of a training step.

    For an encoder-decoder: of one source and one target token, with both sequences T long.
    """

    sequence_length: int
    """T, in tokens."""
    projections: int
    """Matrix products of mixers with weights, and of embeddings narrower than the model."""
    scores: int
    """Products of queries, keys and values over all keys of the mixer's pattern, without a causal
    mask. Full attention: 2 N T (H of keys + H of values)."""
    scores_causal: int
    """The same under a causal mask: (T + 1) / 2 keys on average for full attention."""
    feed_forward: int
    """Feed-forwards, or the experts that a token is sent to."""
    vocabulary: int
    """Vocabulary logits (without padding) of the tokens that have a prediction target, and the head
    before them. Heads of classifiers and taggers are not counted."""
    uncounted: tuple[str, ...] = ()
    """Mixers whose scores have no formula (`Mixer.score_flops` returns None)."""

    def plus(self, other: "TokenFlops") -> "TokenFlops":
        """Return the sum of two counts of the same model and length."""
        names = ("projections", "scores", "scores_causal", "feed_forward", "vocabulary")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return dataclasses.replace(self, **sums)

    def total(self, *, causal: bool) -> int:
        """Return the sum, with or without a causal mask."""
        scores = self.scores_causal if causal else self.scores
        return self.projections + scores + self.feed_forward + self.vocabulary

    def feed_forward_fraction(self) -> float:
        """Return the feed-forward's fraction of the layers' FLOPs, without vocabulary and mask."""
        layers = self.projections + self.scores + self.feed_forward
        return self.feed_forward / layers if layers else 0.0


def count_token_flops(
    model: Model,
    length: int,
    predicted_fraction: float | None = None,
    lora: LoRALayout | None = None,
) -> TokenFlops:
    """Count FLOPs of one token's forward pass, by part.

    Args:
      model: The model; only its shapes are used.
      length: Tokens of a sequence.
      predicted_fraction: Fraction of tokens with a prediction target; None: the model's default.
      lora: Matrices with a low-rank update, whose two thin products are counted with theirs.
    """
    check_integer("length", length, 1)
    return _count_flops(
        model,
        length,
        predicted_fraction,
        abstract_parameters(model).leaves(),
        layer_mixers(model.config),
        lora=lora,
    )


def count_training_flops(
    model: Model,
    length: int,
    predicted_fraction: float | None = None,
    lora: LoRALayout | None = None,
) -> TokenFlops:
    """Count FLOPs of one token's forward and backward pass, by part.

    The backward pass multiplies each matrix twice: for the gradient of its input and for its own.
    A frozen matrix has no gradient of its own, so it counts twice in place of three times. The
    gradient of the input of the first layer is counted, as programs that scan layers compute it.

    Args:
      model: As in `count_token_flops`.
      length: As in `count_token_flops`.
      predicted_fraction: As in `count_token_flops`.
      lora: Matrices that are frozen, adapted or trained in full. None: all are trained.
    """
    return _count_flops(
        model,
        length,
        predicted_fraction,
        abstract_parameters(model).leaves(),
        layer_mixers(model.config),
        lora=lora,
        training=True,
    )


def count_decode_step_flops(model: Model, length: int) -> TokenFlops:
    """Count FLOPs of one decoding step, with `length` tokens in the cache (and in the source)."""
    leaves = (leaf for leaf in abstract_parameters(model).leaves() if _in_step(leaf, model))
    decoder = dataclasses.replace(model.config, encoder=None)
    return _count_flops(model, length, model.predicted_fraction, leaves, layer_mixers(decoder))


def _count_flops(
    model: Model,
    length: int,
    predicted_fraction: float | None,
    leaves: Iterable[ParameterLeaf],
    mixers: Iterable[LayerMixer],
    *,
    lora: LoRALayout | None = None,
    training: bool = False,
) -> TokenFlops:
    """Count FLOPs of products with these parameters, and of the scores of these mixers."""
    config = model.config
    if predicted_fraction is None:
        predicted_fraction = model.predicted_fraction
    passes = 3 if training else 1  # forward; gradients of both factors of each product
    weights = {"mixer": 0, "feed_forward": 0, "head": 0, "vocabulary": 0}
    for leaf in leaves:
        if (part := _product_part(leaf, model)) is not None:
            entries = count_active_entries(leaf, config) - count_padding_entries(leaf, config)
            entries *= count_uses(leaf, config)
            is_frozen = training and lora is not None and leaf.path not in lora.trained
            weights[part] += entries * (2 if is_frozen else passes)
            if lora is not None and leaf.path in lora.adapted:
                thin = lora.rank * (leaf.fan_in + leaf.fan_out)
                weights[part] += passes * entries * thin // (leaf.fan_in * leaf.fan_out)
    scores = scores_causal = 0
    uncounted = set()
    for layer in mixers:
        count = mixer_class(layer.mixer).score_flops(layer.mixer, config.d_model, length)
        if count is None:
            uncounted.add(layer.mixer.kind)
            continue
        scores += passes * count.full
        scores_causal += passes * (count.causal if layer.causal else count.full)
    return TokenFlops(
        sequence_length=length,
        projections=2 * weights["mixer"],
        scores=scores,
        scores_causal=scores_causal,
        feed_forward=2 * weights["feed_forward"],
        vocabulary=round(2 * predicted_fraction * weights["vocabulary"]) + 2 * weights["head"],
        uncounted=tuple(sorted(uncounted)),
    )


def estimate_training_flops(config: TransformerConfig, parameters: int, length: int) -> int:
    """Return 6 N + 12 L D T FLOPs to train on one token (Chowdhery et al. 2022, appendix B)."""
    return 6 * parameters + 12 * config.num_layers * config.d_model * length


def _product_part(leaf: ParameterLeaf, model: Model) -> str | None:
    """Return the part whose matrix product uses a parameter; None for biases, gains and tables."""
    if leaf.path == (("embedding",) if model.config.tie_embeddings else ("output",)):
        return "vocabulary" if model.predicted_fraction else None
    if leaf.path[0] == "head" and model.predicted_fraction and leaf.axes.is_matrix:
        return "head"
    if leaf.path[0] == "embedding_projection":
        return "mixer"
    if leaf.path_in_side[0] != "layers" or not leaf.axes.is_matrix:
        return None
    return "feed_forward" if leaf.path_in_side[2] == "feed_forward" else "mixer"


def decode_step_weight_bytes(model: Model) -> int:
    """Return the bytes of weights that one decoding step reads: one row of lookup tables, all else.

    In an encoder-decoder, the encoder and the projections of its output are not read: the cache is
    already filled.
    """
    read = 0
    for leaf in abstract_parameters(model).leaves():
        if not _in_step(leaf, model):
            continue
        table = leaf.path_in_side[0] in ("embedding", "positions")
        is_read_fully = _product_part(leaf, model) is not None or not table
        num_bytes = leaf.num_bytes if is_read_fully else leaf.num_bytes // leaf.shape[0]
        read += num_bytes * count_uses(leaf, model.config)
    return read


def _in_step(leaf: ParameterLeaf, model: Model) -> bool:
    """Return True if a decoding step with a filled cache reads this parameter."""
    if not isinstance(model, EncoderDecoder):
        return True
    if leaf.path_in_side[0] == "layers":
        return leaf.path[0] == "decoder" and leaf.path[2:] in _step_layers(model)
    return leaf.path[0] not in ("encoder", "source_embedding")


@functools.lru_cache(maxsize=8)
def _step_layers(model: EncoderDecoder) -> frozenset[tuple[str, ...]]:
    """Return paths, below the decoder's layers, of parameters that a decoding step reads.

    Blocks declare only what they use: initialized without a memory, cross-attention declares no key
    and value projections.
    """
    context = dataclasses.replace(model.context, hardware=Hardware())
    pattern = model.config.layer_pattern

    def step_params() -> Any:
        caches, positions = model.init_cache(1, 1, 1), jnp.zeros((1, 1), jnp.int32)
        x = jnp.zeros((1, 1, context.d_model), context.precision.compute)
        inputs = MixerInputs(positions, Mask(MaskPattern(causal=True), positions=positions))
        inputs = inputs.replace(shared_bias=zero_shared_bias(pattern))
        memory = Memory(None, Mask(MaskPattern(ordered=False), positions=positions))

        def place_params(place: int) -> Any:
            block_inputs = inputs.replace(
                cache=caches[place], constants=layer_constants(pattern[place], place, context)
            )
            block = Block(pattern[place], context, parent=None)
            return block.init(jax.random.key(0), x, block_inputs, memory)["params"]

        return {f"place_{place}": place_params(place) for place in range(len(pattern))}

    shapes = jax.eval_shape(step_params)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return frozenset(tuple(key.key for key in path) for path, _ in leaves)


class AttentionTraffic(NamedTuple):
    """Bytes that attention reads and writes for one token of a forward pass."""

    plain: int
    """Unfused: also scores written and read by the softmax, and weights written and read again."""
    flash: int
    """Flash attention (Dao et al. 2022): queries, keys, values, outputs."""


def attention_traffic(model: Model, length: int) -> AttentionTraffic:
    """Sum over the layers with full attention, in sequences of `length` tokens."""
    config = model.config
    itemsize = jnp.dtype(config.precision.compute).itemsize
    plain = flash = 0
    for mixer, _, _ in layer_mixers(config):
        if isinstance(mixer, AttentionConfig):
            value = mixer.resolved_value_head_dim(config.d_model)
            # Queries and outputs have N heads, keys and values K. Queries and keys are as wide as
            # the scores need, values and outputs as wide as the values.
            heads = mixer.num_heads + (mixer.num_kv_heads or mixer.num_heads)
            flash += itemsize * heads * (mixer.score_head_dim(config.d_model) + value)
            # N rows of scores a token: written, read by the softmax, written as weights, read.
            plain += itemsize * 4 * mixer.num_heads * length
    return AttentionTraffic(plain=plain + flash, flash=flash)
