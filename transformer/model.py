"""The decoder-only language model."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta

from transformer.config import TransformerConfig
from transformer.dropout import dropout, fold
from transformer.hardware import Hardware
from transformer.linear import apply_matrix
from transformer.masks import Mask, Pattern
from transformer.mixers import Want, mixer_type
from transformer.norms import Norm
from transformer.positions import LearnedPositions
from transformer.precision import lowest
from transformer.shared import Constrain, Shared, unconstrained
from transformer.stack import Stack
from transformer.weights import axes_of, weight

LOGITS: Want = frozenset({"logits"})


class ModelOutput(NamedTuple):
    """What a model makes of tokens."""

    logits: jax.Array | None  # [B, T, V padded], when wanted; padded words have the lowest number
    hidden: jax.Array  # [B, T, D] after the final norm
    cache: Any  # as it came in, with the new tokens
    aux: Any  # of each place of the pattern, stacked over its layers


class LanguageModel(nn.Module):
    """Embeddings, a causal stack, and logits over the vocabulary (Radford et al. 2018).

    `model.init(key, tokens)["params"]` are plain nested dicts of arrays.
    """

    config: TransformerConfig
    hardware: Hardware = Hardware()
    constrain: Constrain = unconstrained

    @nn.nowrap
    def init(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.init`, with plain arrays; `axes` tells what their axes are called."""
        return meta.unbox(super().init(*args, **kwargs))

    @nn.nowrap
    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> ModelOutput:
        """As `nn.Module.apply`; the arguments are those of `__call__`."""
        output: Any = super().apply(variables, *args, **kwargs)
        return output

    @nn.nowrap
    def axes(self) -> Any:
        """The logical axes of every parameter: a tree of `Axes` like that of the parameters."""
        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        boxed = jax.eval_shape(super().init, jax.random.key(0), token)
        axes: dict[str, Any] = axes_of(boxed["params"])
        return axes

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,  # [B, T]
        *,
        positions: jax.Array | None = None,  # [B, T]; None: 0 to T - 1
        segments: jax.Array | None = None,  # [B, T] documents, from 1; 0 is padding
        cache: tuple[Any, ...] | None = None,  # from `init_cache`: positions says where tokens go
        keys: jax.Array | None = None,  # [B] random keys of the examples: training. None: not
        want: Want = LOGITS,
    ) -> ModelOutput:
        """Raises ValueError for inputs longer than a table of learned positions."""
        config, shared = self.config, self.shared
        _check(tokens, positions, segments, cache, config)
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None, :]
        embed = {"embed": config.width}
        embedding = self.table("embedding", {"vocab": config.vocab_rows}, embed)
        # Rows may be split over devices, but not the vectors in them: tokens pick whole ones.
        rows = shared.constrain(embedding, ("vocab", None))
        x = self.embed(rows[tokens], positions)
        x = dropout(x, config.dropout, fold(keys, shared.layers))
        x = shared.constrain(x, ("batch", "length", None))
        mask = Mask(Pattern(causal=True), positions=positions, segments=segments)
        stack = Stack(config.pattern, shared, config.loop, config.remat, name="layers")
        output = stack(x, positions=positions, mask=mask, cache=cache, keys=keys, want=want)
        hidden = output.x
        if config.final_norm is not None:
            hidden = Norm(config.final_norm, config.precision, name="final_norm")(hidden)
        logits = None
        matrix = embedding.T
        if not config.tied:
            matrix = self.table("output", embed, {"vocab": config.vocab_rows})
        if "logits" in want:
            flatten = self.hardware.flattens_tokens
            logits = apply_matrix(hidden, matrix.astype(hidden.dtype), 1, flatten)
            logits = without_padding(logits, config.vocab_size)
        return ModelOutput(logits, hidden, output.cache, output.aux)

    @property
    def shared(self) -> Shared:
        config = self.config
        return Shared(
            width=config.width,
            layers=config.layers,
            precision=config.precision,
            initialization=config.initialization,
            hardware=self.hardware,
            constrain=self.constrain,
        )

    def embed(
        self,
        x: jax.Array,  # [B, T, D] embedded tokens
        positions: jax.Array,  # [B or 1, T]
    ) -> jax.Array:  # [B, T, D]
        """Adds what the embeddings are to know of positions."""
        config = self.config
        if isinstance(config.position, LearnedPositions):
            rows = {"positions": config.position.length}
            x = x + self.table("positions", rows, {"embed": config.width})[positions]
        return x.astype(config.precision.compute)

    def table(self, name: str, inputs: dict[str, int], outputs: dict[str, int]) -> jax.Array:
        config = self.config
        init, dtype = config.initialization.table(), config.precision.parameters
        return weight(self, name, inputs=inputs, outputs=outputs, init=init, dtype=dtype)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> tuple[Any, ...]:
        """An empty cache for `batch` examples of up to `length` tokens: one entry a layer."""
        mixers = [block.mixer for block in self.config.pattern]
        made = [mixer_type(mixer)(mixer, self.shared, parent=None) for mixer in mixers]
        layers = range(self.config.layers)
        return tuple(made[layer % len(made)].init_cache(batch, length) for layer in layers)


def output_matrix(
    params: dict[str, Any],
    config: TransformerConfig,
) -> jax.Array:  # [D, V padded]
    """The matrix from hidden states to logits, taken from a model's parameters."""
    matrix: jax.Array = params["embedding"].T if config.tied else params["output"]
    return matrix


def without_padding(
    logits: jax.Array,  # [..., V padded]
    vocab_size: int,  # V
) -> jax.Array:  # [..., V padded]
    """The lowest number in place of the logits of words that are not there."""
    if logits.shape[-1] == vocab_size:
        return logits
    real = jnp.arange(logits.shape[-1]) < vocab_size
    real = real.reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.where(real, logits, lowest(logits.dtype))


def _check(
    tokens: jax.Array,
    positions: jax.Array | None,
    segments: jax.Array | None,
    cache: Any,
    config: TransformerConfig,
) -> None:
    if tokens.ndim != 2:
        raise ValueError(f"tokens of shape {tokens.shape}: give [batch, length]")
    limit = config.max_length
    if limit is not None and tokens.shape[1] > limit:
        raise ValueError(
            f"{tokens.shape[1]} tokens: the table of learned positions has {limit} rows; "
            "give shorter inputs or a longer table"
        )
    if cache is not None and positions is None:
        raise ValueError("a cache without positions: say where the new tokens stand")
    if cache is not None and segments is not None:
        raise ValueError("a cache with segments: decode one document for each example")
