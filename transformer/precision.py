"""Precision policies: the dtype of parameters, of products, and of what must not lose digits."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast, get_args

from transformer.hardware import Hardware

DType = Literal["float32", "bfloat16", "float16"]


AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Precision:
    """Which dtype is used where. `Precision.named("bfloat16")` makes the usual ones."""

    parameters: DType = "float32"
    """What weights are kept in; gradients and moments of optimizers are in float32."""
    compute: DType = "float32"
    """What products of matrices and the residual stream are computed in. In the policy `auto` it is
    not decided yet: `track` decides it for some hardware."""
    softmax: DType = "float32"
    """Attention's softmax."""
    norm: DType = "float32"
    """Means and variances of LayerNorm and RMSNorm."""
    loss: DType = "float32"
    """Logits' log-sum-exp and the sum of the loss."""
    cache: DType | Literal["compute"] = "compute"
    """Stored keys and values of decoding; `compute`: as they are computed."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            undecided = (field.name, value) in (("compute", AUTO), ("cache", "compute"))
            if value not in get_args(DType) and not undecided:
                raise ValueError(
                    f"precision.{field.name} {value}: is no dtype of a policy; "
                    f"give one of {', '.join(get_args(DType))}"
                )

    def resolve(self, hardware: Hardware) -> Precision:
        """Return the policy for some hardware: `auto` is replaced, any other stays as it is.

        `auto` computes in float32 on a CPU, in bfloat16 on TPUs and GPUs, and in float16 on NVIDIA
        GPUs older than Ampere (T4, V100), whose tensor cores have no bfloat16.
        """
        if self.compute != AUTO:
            return self
        return dataclasses.replace(self, compute=hardware.compute_dtype)

    @property
    def cache_dtype(self) -> DType:
        """Storage dtype of key-value caches."""
        return self.compute if self.cache == "compute" else self.cache

    @property
    def needs_loss_scale(self) -> bool:
        """float16 has five bits of exponent: small gradients vanish unless the loss is scaled."""
        return "float16" in (self.compute, self.parameters)

    @property
    def name(self) -> str:
        """The policy's name, or all its parts as `part=dtype,...`: what `parse` reads back."""
        for name, policy in (*POLICIES.items(), (AUTO, AUTO_POLICY)):
            if policy == self:
                return name
        parts = dataclasses.asdict(self)
        if self.cache == "compute":  # the default, which policies saved earlier do not name
            del parts["cache"]
        return ",".join(f"{part}={dtype}" for part, dtype in parts.items())

    @staticmethod
    def parse(text: str) -> Precision:
        """Reads a policy's name, or parts such as `compute=bfloat16,softmax=bfloat16`."""
        if text == AUTO:
            return AUTO_POLICY
        if text in POLICIES:
            return POLICIES[text]
        parts = dict(part.partition("=")[::2] for part in text.split(","))
        known = {field.name for field in dataclasses.fields(Precision)}
        if unknown := set(parts) - known:
            raise ValueError(
                f"precision {text}: {', '.join(sorted(unknown))} is not known; give one of "
                f"{', '.join(POLICIES)}, {AUTO}, or PART=DTYPE,... with parts "
                f"{', '.join(sorted(known))}"
            )
        chosen: dict[str, Any] = dict(parts)
        return Precision(**chosen)


POLICIES: dict[str, Precision] = {
    "float32": Precision(),
    "bfloat16": Precision(compute="bfloat16"),
    "pure_bfloat16": Precision(parameters="bfloat16", compute="bfloat16"),
    "float16": Precision(compute="float16"),
}


AUTO_POLICY = Precision(compute=cast(DType, AUTO))
"""The policy `auto`: not one to compute in until `Precision.track` decides it."""


def finfo_min(dtype: Any) -> Any:
    """The most negative finite number: a mask that, unlike -inf, never makes NaN."""
    import jax.numpy as jnp

    return jnp.finfo(dtype).min
