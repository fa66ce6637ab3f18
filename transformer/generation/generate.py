"""Decoding: new tokens one after the other, from a model with a cache.

`prefill` reads prompts into a cache and `advance` adds one token to it: both give the logits of the
next token, and neither knows how it is chosen. What chooses (sampling, here) keeps its own state
beside the cache, whose every leaf has the examples as its first axis.

Prompts of different lengths are padded on the right. Keys of padding stand in the cache beyond an
example's last token, where no query sees them before they are overwritten.
"""

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer.attention.base import NO_OUTPUTS, mixer_class
from transformer.generation.decode_weights import Params, unstack_for_decoding_without_copy
from transformer.generation.sampling import ANCESTRAL_SAMPLING, SamplingConfig, sample_tokens
from transformer.layers.params import apply_matrix
from transformer.models.base import get_output_matrix, mask_padded_logits
from transformer.models.language_model import LanguageModel
from transformer.validation import check_seed

TOKENS_PER_CALL, TOKENS_PER_STREAMED_CALL = 32, 8
"""Made by one call of the compiled loop: with nobody watching, and with `on_tokens`. The fewer, the
sooner they are seen; the more, the less is lost between calls (a quarter, in a model of 2M)."""


NO_TOKEN = -1
"""Stands where an example has no new token, and for a stop token that is not given."""


PROMPT_LENGTH_MULTIPLE, CACHE_LENGTH_MULTIPLE = 32, 128
"""The lengths of padded prompts and of caches are multiples of these: see `bucket`."""


class GenerateOutput(NamedTuple):
    """What follows each prompt."""

    tokens: list[list[int]]
    """The new tokens of each prompt, without the stop token."""
    stopped: list[bool]
    """Whether the stop token came."""


class DecodingState(struct.PyTreeNode):
    """Examples in the making. The newest token of each has been drawn but is not in the cache."""

    cache: Any
    tokens: jax.Array  # [B] the newest
    positions: jax.Array  # [B] where it stands
    remaining: jax.Array  # [B] how many tokens may follow it
    rngs: jax.Array  # [B] random keys


def generate(
    model: LanguageModel,
    params: Params,
    prompts: Sequence[Sequence[int] | np.ndarray],  # B of them, of any lengths
    *,
    max_new_tokens: int,
    sampling: SamplingConfig = ANCESTRAL_SAMPLING,
    seed: int = 0,
    stop_token: int | None = None,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
) -> GenerateOutput:
    """Samples what follows each prompt, up to `max_new_tokens` tokens or the token `stop_token`.

    A sample depends on the seed, its prompt, and how many equal prompts stand before it: on nothing
    else in the batch. `on_tokens` is given the new tokens of every prompt, a few at a time, as they
    are made. What was compiled serves all later calls with as many prompts, of about the same
    lengths, for the same model and sampling.

    Beside `params` there is no second copy of the weights, but of one layer at a time: a model can
    be sampled from while it is trained. Where the weights are not trained, `for_decoding(params)`
    in place of `params` saves the copying at every token.

    Raises ValueError where `check_prompts` does, and for a seed that is not in [0, 2^32).
    """
    check_seed(seed)
    rows = [np.asarray(prompt, np.int64) for prompt in prompts]
    check_prompts(model, rows, max_new_tokens)
    if not rows:
        return GenerateOutput([], [])
    made: list[list[int]] = [[] for _ in rows]
    each = TOKENS_PER_CALL if on_tokens is None else TOKENS_PER_STREAMED_CALL
    for chunk in _chunks(model, params, rows, max_new_tokens, sampling, seed, stop_token, each):
        new = [row[row != NO_TOKEN].tolist() for row in chunk]
        for tokens, more in zip(made, new, strict=True):
            tokens += more
        if on_tokens is not None and any(new):
            on_tokens(new)
    return GenerateOutput(made, [len(tokens) < max_new_tokens for tokens in made])


def check_prompts(model: LanguageModel, prompts: Sequence[np.ndarray], max_new_tokens: int) -> None:
    """Raises ValueError unless the model can read these prompts and `max_new_tokens` more."""
    config, limit = model.config, model.config.max_length
    for mixer in {block.mixer for block in config.layer_pattern}:
        if not mixer_class(mixer).abilities(mixer).cached:
            raise ValueError(f"mixer {mixer.kind}: has no cache to decode from; choose another")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens}: give 1 or more")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {number}: is empty; begin it with the end-of-text token")
        for token in (prompt.min(), prompt.max()):
            if not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"prompt {number}: token {token} is not one of the model's "
                    f"{config.vocab_size:,}; use the tokenizer that it was trained with"
                )
        room = max_new_tokens if limit is None else limit - len(prompt)
        if room < max_new_tokens:
            raise ValueError(
                f"prompt {number}: {len(prompt):,} tokens leave no room for {max_new_tokens:,} "
                f"more among the model's {limit:,} learned positions; "
                + (f"lower max_new_tokens to {room:,}" if room > 0 else "shorten it")
            )


def prefill(
    model: LanguageModel,
    params: Params,
    tokens: jax.Array,  # [B, T] padded on the right
    lengths: jax.Array,  # [B] without the padding
    cache_length: int,  # S
) -> tuple[Any, jax.Array]:  # the cache, [B, V padded]
    """Reads prompts into a new cache; the logits of what follows each."""
    index = jnp.arange(tokens.shape[1])[None, :]
    positions = jnp.where(index < lengths[:, None], index, -1)
    cache = model.init_cache(len(tokens), cache_length)
    variables = {"params": params}
    output: Any = model.apply(
        variables, tokens, positions=positions, cache=cache, outputs=NO_OUTPUTS
    )
    last = jnp.take_along_axis(output.hidden, (lengths - 1)[:, None, None], axis=1)
    return output.cache, _logits(model, params, last)


def decode_step(
    model: LanguageModel,
    params: Params,
    cache: Any,
    tokens: jax.Array,  # [B]
    positions: jax.Array,  # [B] where the tokens stand
) -> tuple[Any, jax.Array]:  # the cache, [B, V padded]
    """Adds one token of each example to the cache; the logits of what follows it."""
    variables, positions = {"params": params}, positions[:, None]
    output: Any = model.apply(
        variables, tokens[:, None], positions=positions, cache=cache, outputs=NO_OUTPUTS
    )
    return output.cache, _logits(model, params, output.hidden)


def _logits(
    model: LanguageModel,
    params: Params,
    hidden: jax.Array,  # [B, 1, D]
) -> jax.Array:  # [B, V padded]
    matrix = get_output_matrix(params, model.config).astype(hidden.dtype)
    logits = apply_matrix(hidden, matrix, 1, model.context.flatten_tokens)
    return mask_padded_logits(logits[:, 0], model.config.vocab_size)


def bucket_length(length: int, multiple: int, limit: int | None) -> int:
    """The length rounded up to a multiple of `multiple`, beyond 8 steps to one of four an octave.

    So a few programs serve all lengths, at the price of at most a quarter more. Never over `limit`.
    """
    multiple = max(multiple, 2 ** (length - 1).bit_length() // 8)
    rounded = -(-length // multiple) * multiple
    return rounded if limit is None else min(rounded, limit)


def _chunks(
    model: LanguageModel,
    params: Params,
    prompts: list[np.ndarray],
    max_new_tokens: int,
    sampling: SamplingConfig,
    seed: int,
    stop: int | None,
    each: int,
) -> Iterator[np.ndarray]:  # each [B, some]
    """New tokens, `each` at a time; `NO_TOKEN` where an example has come to its end."""
    params, limit = unstack_for_decoding_without_copy(params), model.config.max_length
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(lengths.max())
    end = np.int32(NO_TOKEN if stop is None else stop)
    state, new = _begin(
        params,
        _padded(prompts, bucket_length(longest, PROMPT_LENGTH_MULTIPLE, limit)),
        lengths,
        np.full_like(lengths, max_new_tokens),
        _example_keys(seed, prompts),
        end,
        model=model,
        sampling=sampling,
        cache_length=bucket_length(longest + max_new_tokens, CACHE_LENGTH_MULTIPLE, limit),
    )
    yield np.asarray(new)
    while np.any(state.remaining):
        state, new = _continue(params, state, end, np.int32(each), model=model, sampling=sampling)
        yield np.asarray(new)


def _padded(prompts: list[np.ndarray], length: int) -> np.ndarray:  # [B, T]
    tokens = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens


def _example_keys(seed: int, prompts: list[np.ndarray]) -> jax.Array:  # [B]
    """A key for each example, from the seed, its prompt, and the number of equal ones before it."""
    digests = [zlib.crc32(prompt.astype("<i4").tobytes()) for prompt in prompts]
    before = [digests[:index].count(digest) for index, digest in enumerate(digests)]
    fold = jax.vmap(jax.random.fold_in)
    keys = jnp.broadcast_to(jax.random.key(seed), len(prompts))
    return fold(fold(keys, np.array(digests, np.uint32)), np.array(before, np.uint32))


def _choose(
    state: DecodingState, logits: jax.Array, sampling: SamplingConfig, stop: jax.Array
) -> tuple[DecodingState, jax.Array]:  # [B]
    """Draws what follows the newest tokens; examples that have ended stay as they are."""
    drawn = sample_tokens(logits, state.rngs, state.positions + 1, sampling)
    going = state.remaining > 0
    kept = going & (drawn != stop)
    state = state.replace(
        tokens=jnp.where(going, drawn, state.tokens),
        positions=state.positions + going,
        remaining=jnp.where(kept, state.remaining - 1, 0),
    )
    return state, jnp.where(kept, drawn, NO_TOKEN)


@functools.partial(jax.jit, static_argnames=("model", "sampling", "cache_length"))
def _begin(
    params: Params,
    tokens: jax.Array,  # [B, T]
    lengths: jax.Array,  # [B]
    limits: jax.Array,  # [B]
    keys: jax.Array,  # [B]
    stop: jax.Array,
    *,
    model: LanguageModel,
    sampling: SamplingConfig,
    cache_length: int,
) -> tuple[DecodingState, jax.Array]:  # [B, 1]
    """Reads the prompts and draws the first token of each."""
    cache, logits = prefill(model, params, tokens, lengths, cache_length)
    state = DecodingState(cache, tokens[:, 0], lengths - 1, limits, keys)
    state, new = _choose(state, logits, sampling, stop)
    return state, new[:, None]


@functools.partial(jax.jit, static_argnames=("model", "sampling"), donate_argnames="state")
def _continue(
    params: Params,
    state: DecodingState,
    stop: jax.Array,
    count: jax.Array,
    *,
    model: LanguageModel,
    sampling: SamplingConfig,
) -> tuple[DecodingState, jax.Array]:  # [B, TOKENS_PER_CALL]
    """Draws the next `count` tokens, or fewer if all examples have ended."""
    Loop = tuple[jax.Array, DecodingState, jax.Array]

    def goes_on(loop: Loop) -> jax.Array:
        index, state, _ = loop
        return (index < count) & jnp.any(state.remaining > 0)

    def one_more(loop: Loop) -> Loop:
        index, state, made = loop
        cache, logits = decode_step(model, params, state.cache, state.tokens, state.positions)
        state, new = _choose(state.replace(cache=cache), logits, sampling, stop)
        return index + 1, state, made.at[index].set(new)

    none = jnp.full((TOKENS_PER_CALL, len(state.tokens)), NO_TOKEN, jnp.int32)
    _, state, made = jax.lax.while_loop(goes_on, one_more, (jnp.int32(0), state, none))
    return state, made.T
