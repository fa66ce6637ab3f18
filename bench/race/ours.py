"""Our side of the races: the harness starts `python -m bench.race.ours NAME SETTINGS`."""

import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from bench.race.protocol import Work, peak_resident_bytes, resident_bytes, serve, status_bytes
from train.assembly import make_engine
from train.data.corpus import prepare_text
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import Experiment
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.runtime.local_hardware import local_hardware
from train.runtime.startup import restart_with_huge_pages
from transformer import BigBirdConfig, Initialization, LongformerConfig, Mask, MaskPattern
from transformer.attention.attend import attend
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.full import AttentionConfig
from transformer.attention.mixer import MixerConfig, MixerInputs, mixer_class
from transformer.attention.reference import ScoreSpec
from transformer.generation.generate import generate
from transformer.generation.sampling import SamplingConfig
from transformer.interop.pretrained import read_model
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.position_embedding import LearnedPositions
from transformer.model_context import ModelContext
from transformer.models import unstacked
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig
from transformer.models.language_model import LanguageModel
from transformer.parameter_counts import count_parameters
from transformer.precision import Precision

VERSIONS: dict[str, int | str] = {"jax": jax.__version__, "flax": flax.__version__}
GREEDY = SamplingConfig(temperature=0)


def peak_bytes() -> int:
    """Return the peak of the device's allocator, or of this process where there is none."""
    return _statistic("peak_bytes_in_use", peak_resident_bytes())


def bytes_in_use() -> int:
    """Return the memory in use now, by the same counter."""
    return _statistic("bytes_in_use", resident_bytes())


def _statistic(name: str, of_process: int) -> int:
    statistics = jax.local_devices()[0].memory_stats() or {}
    return int(statistics.get(name, of_process))


# A training step ----------------------------------------------------------------------------------


def experiment_of(settings: dict[str, Any]) -> Experiment:
    """Return a GPT-2 in the requested shape."""
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=settings["heads"]),
        feed_forward=FeedForwardConfig(activation=settings["activation"]),
    )
    beta1, beta2 = settings["betas"]
    return Experiment(
        model=TransformerConfig(
            vocab_size=settings["vocabulary"],
            d_model=settings["width"],
            num_layers=settings["layers"],
            layer_pattern=(block,),
            position_embedding=LearnedPositions(settings["context"]),
            precision=Precision.parse(settings["precision"]),
        ),
        data=TextDataConfig(sequence_length=settings["context"], document_masking=False),
        optimizer=AdamW(
            beta1=beta1,
            beta2=beta2,
            weight_decay=settings["weight_decay"],
            max_grad_norm=settings["clip"],
        ),
        schedule=ScheduleConfig("constant", settings["learning_rate"], warmup_steps=0),
        batch_size=settings["batch"],
    )


def step(settings: dict[str, Any]) -> Work:
    """Build an experiment's engine and state, as `fit` does; a step takes new random tokens."""
    engine = make_engine(experiment_of(settings), local_hardware())
    state = engine.init()
    batch, context = settings["batch"], settings["context"]
    generator, firsts = np.random.default_rng(0), itertools.count(step=batch)

    def train() -> jax.Array:
        nonlocal state
        size, first = (batch, context + 1), next(firsts)
        tokens = generator.integers(settings["vocabulary"], size=size, dtype=np.int32)
        rows = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": np.ones((batch, context), np.float32),
            "examples": np.arange(first, first + batch, dtype=np.uint32),
        }
        state, metrics = engine.step(state, engine.put_batch(rows))
        return metrics["loss"]

    def run(steps: int) -> float:
        for _ in range(steps - 1):
            train()
        loss = float(train())
        jax.block_until_ready(state)
        return loss

    facts = {**VERSIONS, "parameters": count_parameters(engine.model).total}
    return Work(run, facts, peak_bytes)


def products(settings: dict[str, Any]) -> Work:
    """Return the products with weights of a training step, and nothing else.

    Their time is the floor of the step on this machine with XLA's matrix products. The program is
    the gradient of a network without norms, attention and activations, with the matrices of GPT-2.
    """
    width, layers = settings["width"], settings["layers"]
    tokens = settings["batch"] * settings["context"]
    dtype = jnp.dtype(settings["precision"])
    keys = iter(jax.random.split(jax.random.key(0), 9 * layers + 2))

    def matrix(*shape: int) -> jax.Array:
        return (jax.random.normal(next(keys), shape) * shape[0] ** -0.5).astype(dtype)

    x, table = matrix(tokens, width), matrix(width, settings["vocabulary"])
    stack = [
        {name: matrix(width, width) for name in ("query", "key", "value", "output")}
        | {"up": matrix(width, 4 * width), "down": matrix(4 * width, width)}
        # Without them the gradients of the three projections would be one product.
        | {"key_gain": matrix(width), "value_gain": matrix(width)}
        for _ in range(layers)
    ]

    def loss(stack: list[dict[str, jax.Array]], table: jax.Array, x: jax.Array) -> jax.Array:
        for w in stack:
            mixed = x @ w["query"] + x @ w["key"] * w["key_gain"] + x @ w["value"] * w["value_gain"]
            x = mixed @ w["output"] @ w["up"] @ w["down"]
        return 0.5 * jnp.sum(jnp.square((x @ table).astype(jnp.float32)))

    # Of the input too: in a model it is the gradient of the layer before.
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    def run(steps: int) -> None:
        for _ in range(steps):
            jax.block_until_ready(gradients(stack, table, x))

    return Work(run, VERSIONS, peak_bytes)


# Decoding -----------------------------------------------------------------------------------------


def decode(settings: dict[str, Any]) -> Work:
    """Build GPT-2 in the requested shape with random weights; a step continues new prompts."""
    config = TransformerConfig(
        vocab_size=settings["vocabulary"],
        d_model=settings["width"],
        num_layers=settings["layers"],
        layer_pattern=(BlockConfig(mixer=AttentionConfig(num_heads=settings["heads"])),),
        position_embedding=LearnedPositions(settings["context"]),
        precision=Precision(parameters=settings["precision"], compute=settings["precision"]),
    )
    if settings.get("stacked"):
        unstacked.free_bytes = lambda device: 0  # as on a device that has no room for copies
    model = LanguageModel(config, local_hardware())
    token = jnp.zeros((1, 1), jnp.int32)
    params = jax.block_until_ready(jax.jit(model.init)(jax.random.key(0), token)["params"])
    generator, count = np.random.default_rng(0), settings["new_tokens"]

    def run(steps: int) -> None:
        for _ in range(steps):
            size = (settings["batch"], settings["prompt"])
            prompts = list(generator.integers(settings["vocabulary"], size=size))
            made = generate(model, params, prompts, max_new_tokens=count, sampling=GREEDY)
            assert all(len(tokens) == count for tokens in made.tokens)

    return Work(run, {**VERSIONS, "parameters": count_parameters(model).total}, peak_bytes)


# Attention ----------------------------------------------------------------------------------------


def attention(settings: dict[str, Any]) -> Work:
    """Compile `attend` with the requested backend; a step ends with the gradients of q, k, v."""
    batch, length, width = settings["batch"], settings["length"], settings["head_dim"]
    shape = (4, batch, length, settings["num_heads"], width)
    drawn = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    q, k, v, cotangent = (jnp.asarray(each, settings["precision"]) for each in drawn)
    token = jnp.arange(length, dtype=jnp.int32)[None]
    if settings["padding"]:
        filled = jnp.linspace(length // 2, length, batch)[:, None]
        mask = Mask(segments=(token < filled).astype(jnp.int32))
    else:
        mask = Mask(MaskPattern(causal=True, window=settings["window"]))
    if settings["segments"]:
        ids = 1 + token * settings["segments"] // length
        mask = mask.replace(segments=jnp.broadcast_to(ids, (batch, length)))
    backend, hardware = settings["backend"], local_hardware()
    tile = int(backend.removeprefix("blockwise") or 0) if backend.startswith("blockwise") else 0

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> Any:
        def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            spec = ScoreSpec(1 / math.sqrt(width))
            if tile:
                return attend_blockwise(q, k, v, mask, spec, block_size=tile).y
            return attend(q, k, v, mask, spec, backend=backend, hardware=hardware).y

        _, vjp = jax.vjp(attended, q, k, v)
        return vjp(cotangent)

    program = jax.jit(gradients).lower(q, k, v, mask).compile()
    before = bytes_in_use()

    def run(steps: int) -> float:
        for _ in range(steps - 1):
            program(q, k, v, mask)
        results = program(q, k, v, mask)
        return float(sum(jnp.abs(each.astype(jnp.float32)).mean() for each in results))

    return Work(run, VERSIONS, lambda: peak_bytes() - before)


def long_attention(settings: dict[str, Any]) -> Work:
    """Compile the mixer `longformer` or `bigbird` on one row; a step is a forward pass."""
    width, heads, length = settings["width"], settings["heads"], settings["length"]
    config: MixerConfig
    if settings["mixer"] == "longformer":
        config = LongformerConfig(num_heads=heads, one_sided_window=settings["window"])
    else:
        block = settings["block"]
        config = BigBirdConfig(num_heads=heads, block_size=block, random_block_span=length)
    shared = ModelContext(width, 1, Precision(), Initialization(), local_hardware())
    mixer = mixer_class(config)(config, shared, parent=None)
    positions = jnp.arange(length)[None, :]
    mask = Mask(positions=positions)
    if settings["mixer"] == "longformer":  # as in training: any row might be padded
        mask = mask.replace(segments=jnp.ones((1, length), jnp.int32))
    inputs = MixerInputs(positions, mask, constants=mixer.constants(config, 0, width))
    x = jax.random.normal(jax.random.key(0), (1, length, width))
    params = jax.jit(lambda key: mixer.init(key, x, inputs))(jax.random.key(1))

    def forward(params: Any, x: jax.Array, mask: Mask) -> jax.Array:
        output: Any = mixer.apply(params, x, inputs.replace(mask=mask))
        return output.y

    program = jax.jit(forward).lower(params, x, mask).compile()
    before = resident_bytes()

    def run(steps: int) -> None:
        for _ in range(steps):
            jax.block_until_ready(program(params, x, mask))

    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    # The system counts both a little late: the difference may be below zero.
    growth = lambda: max(0, peak_resident_bytes() - before)  # noqa: E731
    return Work(run, {**VERSIONS, "parameters": count}, growth)


# Files --------------------------------------------------------------------------------------------


def data(settings: dict[str, Any]) -> Work:
    """Train a byte-level BPE on a file and write its tokens, as `fit` does before it trains."""
    facts: dict[str, int] = {}

    def run(steps: int) -> None:
        for _ in range(steps):
            with tempfile.TemporaryDirectory() as folder:
                config = TextDataConfig(
                    path=settings["path"],
                    tokenizer=TokenizerConfig("bpe", vocab_size=settings["vocabulary"]),
                    cache_dir=folder,
                )
                corpus = prepare_text(config)
                facts["tokens"] = sum(len(stream.tokens) for stream in corpus.streams.values())

    return Work(run, facts)


def read_weights(settings: dict[str, Any]) -> Work:
    """Read a model in Hugging Face's format, in bfloat16, sharded over the devices here."""
    jax.devices()
    before, facts = resident_bytes(), dict[str, int | str](VERSIONS)

    def shardings(model: Any) -> Any:
        mesh = jax.make_mesh((jax.device_count(),), ("model",))

        def shard(axes: Any) -> jax.NamedSharding:
            split = next((n for n in axes.names if n in ("mlp", "heads", "vocab")), None)
            split = split or next((n for n in axes.names if n == "kv_heads"), None)
            names = ["model" if n == split else None for n in axes.names]
            return jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*names))

        is_axes = lambda node: hasattr(node, "stack")  # noqa: E731
        return jax.tree.map(shard, model.logical_axes(), is_leaf=is_axes)

    def run(steps: int) -> None:
        _, params = read_model(
            settings["folder"],
            precision=Precision.parse("pure_bfloat16"),
            shardings=shardings if jax.device_count() > 1 else None,
        )
        by_device: dict[Any, int] = {}
        for leaf in jax.tree.leaves(jax.block_until_ready(params)):
            for piece in leaf.addressable_shards:
                by_device[piece.device] = by_device.get(piece.device, 0) + piece.data.nbytes
        facts["device"] = max(by_device.values())
        facts["anonymous"] = status_bytes("RssAnon") - anonymous_before

    anonymous_before = status_bytes("RssAnon")
    return Work(run, facts, lambda: peak_resident_bytes() - before)


WORK: Mapping[str, Callable[[dict[str, Any]], Work]] = {
    "step": step,
    "products": products,
    "decode": decode,
    "attention": attention,
    "long_attention": long_attention,
    "data": data,
    "read_weights": read_weights,
}

if __name__ == "__main__":
    if sys.argv[1] not in ("products", "read_weights"):  # measured without, for their figures
        restart_with_huge_pages()  # as `python -m train` does
    serve(WORK[sys.argv[1]])
