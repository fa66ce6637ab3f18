"""Export a model as one file that serves every batch size and length, and load it without Flax.

    python examples/export.py            # needs: pip install linen-transformer[export]

`jax.export` lowers the model to StableHLO. With symbolic dimensions one program serves all shapes;
`platforms` compiles it for machines other than this one.
"""

import tempfile
from pathlib import Path

import jax
import jax.export
import numpy as np

from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LanguageModel,
    RoPE,
    TransformerConfig,
)

block = BlockConfig(
    mixer=AttentionConfig(num_heads=4, num_kv_heads=2, position=RoPE()),
    feed_forward=FeedForwardConfig(d_ff=64, activation="silu", gated=True),
)
model = LanguageModel(
    TransformerConfig(vocab_size=100, d_model=32, num_layers=2, layer_pattern=(block,))
)


def export(params, path):
    """Write the program (params, tokens [B, T]) -> logits [B, T, V] to a file."""
    batch, length = jax.export.symbolic_shape("batch, length")
    tokens = jax.ShapeDtypeStruct((batch, length), "int32")

    @jax.jit
    def logits_of(params, tokens):
        return model.apply({"params": params}, tokens).logits[..., : model.config.vocab_size]

    # A model with learned positions also needs constraints=("length <= 1024",), and layers that
    # split the tokens into blocks (Longformer, BigBird, ...) a concrete length.
    exported = jax.export.export(logits_of, platforms=("cpu", "tpu", "cuda"))(
        jax.eval_shape(lambda: params), tokens
    )
    Path(path).write_bytes(exported.serialize())


def load(path):
    """Return the exported function from a file. This needs JAX only."""
    return jax.export.deserialize(Path(path).read_bytes()).call


def main():
    """Export a model, and compare the loaded program with the model at several shapes."""
    params = model.init_params(jax.random.key(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.jaxexport"
        export(params, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes, parameters not included")
        run = load(path)
    differences = []
    for shape in ((1, 5), (3, 16)):
        tokens = np.random.default_rng(0).integers(0, 100, shape).astype(np.int32)
        expected = model.apply({"params": params}, tokens).logits[..., :100]
        differences.append(float(np.abs(run(params, tokens) - expected).max()))
        print(f"batch and length {shape}: largest difference {differences[-1]:.1e}")
    return differences


if __name__ == "__main__":
    main()
