"""Tiny models trained on any mesh, and the collectives of their compiled steps."""

import dataclasses
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tests.train.parallel.hlo import Collective, find_collectives
from tests.train.support import random_rows, tiny
from train.assembly import make_engine_on
from train.data.bitext import BitextDataConfig
from train.experiment import Experiment
from train.parallel.mesh import MeshConfig, make_mesh
from train.tasks.translation import Translation
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    FeedForwardConfig,
    Hardware,
    NoPosition,
    RoPE,
)
from transformer.attention.variants.sliding_window import SlidingWindowConfig
from transformer.layers.moe import MoEConfig

VOCAB, STEPS, ROWS, LENGTH = 30, 20, 8, 16

KINDS = {
    "data": {"all-reduce"},
    "fsdp": {"all-gather", "all-reduce"},
    "expert": {"all-gather", "all-reduce"},
    "context": {"all-reduce", "collective-permute"},
    "tensor": {"all-reduce"},
}
"""Collectives that each axis of the mesh needs. XLA's CPU compiler has no reduce-scatter."""


class Outcome(NamedTuple):
    """Results of training a model on a mesh."""

    losses: np.ndarray  # [STEPS]
    collectives: list[Collective]
    mesh: Mesh
    params: Any  # shapes


def mixture(capacity: float) -> MoEConfig:
    gated = FeedForwardConfig(24, "silu", gated=True)
    return MoEConfig(4, 2, gated, load_balance_loss_weight=0.1, capacity_factor=capacity)


def an_experiment(
    folder: Path,
    model: str,
    mesh: MeshConfig,
    *,
    width: int = 16,
    sequence_length: int = LENGTH,
    mixer: Any = None,
    feed_forward: Any = None,
    **attention: Any,
) -> Experiment:
    """Return an experiment of three layers without dropout, two KV heads, and packed documents."""
    attention = {"num_heads": 4, "num_kv_heads": 2, "position": RoPE(), "bias": False, **attention}
    mixer = mixer or AttentionConfig(**attention)
    if model == "windows":
        shared = {field.name for field in dataclasses.fields(SlidingWindowConfig)}
        settings = {name: getattr(mixer, name) for name in shared if hasattr(mixer, name)}
        mixer = SlidingWindowConfig(window=3, dilation=2, **settings)
    feed_forward_config = {"experts": mixture(0), "capacity": mixture(1.5)}.get(
        model, FeedForwardConfig(24)
    )
    block = BlockConfig(mixer=mixer, feed_forward=feed_forward or feed_forward_config)
    experiment = tiny(folder, mesh=mesh)
    config = dataclasses.replace(
        experiment.model,
        d_model=width,
        num_layers=3,
        layer_pattern=(block,),
        position_embedding=NoPosition(),
        embedding_dropout=0.0,
        vocab_size=VOCAB,
        layer_loop="scan",
        causal=model != "capacity",
        share_layers=model == "shared",
    )
    data: Any = dataclasses.replace(
        experiment.text_data, sequence_length=sequence_length, document_masking=True
    )
    changes: dict[str, Any] = {}
    if model == "encoder-decoder":
        cross = dataclasses.replace(block, cross_attention=AttentionConfig(num_heads=4, bias=False))
        config = dataclasses.replace(
            config,
            layer_pattern=(cross,),
            encoder=EncoderConfig(num_layers=2, layer_pattern=(block,)),
        )
        data = BitextDataConfig(max_length=LENGTH)
        changes = {"task": Translation(), "batch_size": 8}
    return dataclasses.replace(experiment, model=config, data=data, **changes)


def rows_of(model: str, cursor: int) -> dict[str, np.ndarray]:
    """Return a batch with two documents in each row, whose positions restart at 0."""
    rows = random_rows(ROWS, VOCAB, length=LENGTH, cursor=cursor)
    rows["weights"] = np.ones_like(rows["weights"])
    first = 5
    rows["segments"] = np.tile(np.arange(LENGTH) >= first, (ROWS, 1)).astype(np.int32) + 1
    places = [*range(first), *range(LENGTH - first)]
    rows["positions"] = np.tile(np.array(places, np.int32), (ROWS, 1))
    if model == "encoder-decoder":
        rows["source"] = rows["tokens"][:, ::-1].copy()
        rows["source_segments"] = np.ones_like(rows["segments"])
        rows["segments"] = np.ones_like(rows["segments"])
    return rows


def train(folder: Path, model: str, mesh: MeshConfig | None) -> Outcome:
    """Train from the same weights on the same batches; without a mesh, on one device."""
    devices = jax.devices()[:1] if mesh is None else jax.devices()
    experiment = an_experiment(folder, model, mesh or MeshConfig())
    placed = make_mesh(experiment.mesh, devices)
    engine = make_engine_on(placed, experiment, Hardware(count=len(devices)))
    state, losses = engine.init(), []
    batch = engine.put_batch(rows_of(model, 0))
    step = engine.lower_step(state, batch).compile()
    for cursor in range(STEPS):
        state, metrics = step(state, engine.put_batch(rows_of(model, cursor)), engine.frozen)
        losses.append(float(metrics["loss"]))
    text = step.as_text() or ""
    return Outcome(
        np.array(losses), find_collectives(text, placed), placed, engine.abstract_state().params
    )


def kinds_by_axis(found: Iterable[Collective]) -> dict[str, set[str]]:
    """Return the kinds of collectives along each axis."""
    kinds: dict[str, set[str]] = {}
    for one in found:
        for axis in one.axes:
            kinds.setdefault(axis, set()).add(one.kind)
    return kinds


def largest_weight(outcome: Outcome) -> int:
    """Return the bytes of the largest weight of a layer, or table, that fsdp gathers."""
    sizes = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(outcome.params):
        layered = "layers" in jax.tree_util.keystr(path)
        shard = math.prod(leaf.sharding.shard_shape(leaf.shape)) * outcome.mesh.shape["fsdp"]
        sizes.append(4 * shard // (leaf.shape[0] if layered else 1))
    return max(sizes)


def sixteen() -> None:
    """Check, in its own process, that a mesh of sixteen devices equals one device."""
    jax.config.update("jax_num_cpu_devices", 16)
    jax.config.update("jax_disable_most_optimizations", True)
    with tempfile.TemporaryDirectory() as folder:
        for model, mesh in (
            ("decoder", MeshConfig(data=2, fsdp=2, context=2, tensor=2)),
            ("experts", MeshConfig(data=1, fsdp=2, expert=4, tensor=2)),
        ):
            expected = train(Path(folder), model, None).losses
            actual = train(Path(folder), model, mesh).losses
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
