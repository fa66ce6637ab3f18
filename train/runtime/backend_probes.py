"""Detection of attention kernels that cannot be compiled on the local devices.

With a jaxlib and a libtpu (or a CUDA plugin and a driver) that do not match, everything may run but
kernels: "Failed to deserialize the Mosaic module ... expected version <= 7 but got 8". Such kernels
are marked as broken before training, and `auto` chooses another backend.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from train.errors import short_reason
from train.runtime.xla_flags import requested_determinism
from transformer.attention.full import AttentionConfig
from transformer.attention.masks import Mask, MaskPattern
from transformer.attention.reference import ScoreSpec
from transformer.hardware import Hardware
from transformer.models.config import TransformerConfig
from transformer.parameter_counts import layer_mixers


def _compile_gradient(attend: Callable[..., jax.Array], shape: tuple[int, ...]) -> None:
    """Compile a kernel's forward and backward pass for the first device. Nothing is run."""

    def total(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(attend(*arrays).astype(jnp.float32))

    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3
    jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*arrays).compile()


def _compile_splash() -> None:
    from transformer.attention.backends.splash import attend_splash

    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        return attend_splash(q, k, v, Mask(MaskPattern(causal=True)), ScoreSpec(1.0))

    _compile_gradient(attend, (1, 128, 1, 128))


def _compile_cudnn() -> None:
    from transformer.attention.backends.cudnn import attend_cudnn

    # XLA compiles this small program under the flag, and ends inside the compilation of a training
    # step (`IndexError: raw_hash_map::at`): seen on an H200 with jax 0.11.2. openxla/xla#46500 has
    # a cause that fits; once it is released, try whether training steps compile.
    if flag := requested_determinism():
        raise RuntimeError(f"XLA fails on training steps with it under {flag}")
    causal = MaskPattern(causal=True)
    # The second is given to the kernel as an array.
    for mask in (Mask(causal), Mask(causal, segments=jnp.ones((1, 128), jnp.int32))):

        def attend(q: Any, k: Any, v: Any, mask: Mask = mask) -> jax.Array:
            return attend_cudnn(q, k, v, mask, ScoreSpec(1.0))

        _compile_gradient(attend, (1, 128, 1, 64))


KERNEL_PROBES: dict[str, Callable[[], None]] = {"splash": _compile_splash, "cudnn": _compile_cudnn}
"""Functions that compile a small case of a kernel, by the name of its attention backend."""


def mark_broken_kernels(
    model: TransformerConfig, length: int, hardware: Hardware, *, segments: bool, on_mesh: bool
) -> Hardware:
    """Return the hardware with `broken_kernels` set to those that fail to compile.

    Tries only the kernels that the model would use on sequences of `length` tokens, which may hold
    several documents (`segments`): on a CPU, none. `on_mesh`: several devices share an array.
    """
    broken = []
    used = _used_backends(model, length, hardware, segments=segments, on_mesh=on_mesh)
    for name in sorted(used & KERNEL_PROBES.keys()):
        try:
            KERNEL_PROBES[name]()
        except Exception as error:  # noqa: BLE001 (compilers raise many types)
            broken.append((name, short_reason(error)))
    return dataclasses.replace(hardware, broken_kernels=tuple(broken)) if broken else hardware


def _used_backends(
    model: TransformerConfig, length: int, hardware: Hardware, *, segments: bool, on_mesh: bool
) -> set[str]:
    """Return the attention backends that layers of the model choose on the hardware."""
    backends: set[str] = set()
    for layer in layer_mixers(model):
        # A mixer that asks for itself, such as a sliding window, is taken for full attention.
        num_heads = getattr(layer.mixer, "num_heads", None)
        if num_heads is not None and not isinstance(layer.mixer, AttentionConfig):
            layer = layer._replace(mixer=AttentionConfig(num_heads))
        choice = layer.backend_choice(
            model, length, hardware=hardware, segments=segments, mesh_known=on_mesh
        )
        if choice is not None:
            backends.add(choice.backend)
    return backends
