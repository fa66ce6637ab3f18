"""Mixed-precision policies: dtypes of parameters, matrix products and reductions."""

import dataclasses
from typing import Any, Literal, cast

from transformer.hardware import Hardware
from transformer.validation import Settings

DType = Literal["float32", "bfloat16", "float16"]

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Precision(Settings):
    """Dtype of each part of a model. `Precision.parse("bfloat16")` gives the usual policies."""

    parameters: DType = "float32"
    """Dtype of stored weights. Gradients and optimizer moments are float32 in any case."""
    compute: DType | Literal["auto"] = "float32"
    """Dtype of matrix products and of the residual stream. The policy `auto` has "auto" here until
    `resolve` replaces it."""
    softmax: DType = "float32"
    """Dtype of the attention softmax."""
    norm: DType = "float32"
    """Dtype of the statistics of LayerNorm and RMSNorm."""
    loss: DType = "float32"
    """Dtype of the log-sum-exp of logits and of the sum of losses."""
    cache: DType | Literal["compute"] = "compute"
    """Storage dtype of cached tokens: keys, values, inputs of convolutions. `compute`: the dtype
    they are computed in. Recurrent states keep their own dtypes (`transformer.attention.cache`)."""

    def resolve(self, hardware: Hardware) -> "Precision":
        """Return the policy for this hardware: `auto` is replaced, others are returned unchanged.

        `auto` computes in float32 on a CPU, in bfloat16 on TPUs and GPUs, and in float16 on NVIDIA
        GPUs older than Ampere (T4, V100), whose tensor cores have no bfloat16.
        """
        if self.compute != AUTO:
            return self
        return dataclasses.replace(self, compute=hardware.compute_dtype)

    @property
    def cache_dtype(self) -> DType:
        """Storage dtype of cached tokens."""
        return cast(DType, self.compute) if self.cache == "compute" else self.cache

    @property
    def needs_loss_scale(self) -> bool:
        """True for float16: with 5 exponent bits, small gradients underflow unless scaled."""
        return "float16" in (self.compute, self.parameters)

    @property
    def name(self) -> str:
        """Name of the policy, or `part=dtype,...` for a custom one; `parse` reads both."""
        for name, policy in (*POLICIES.items(), (AUTO, AUTO_POLICY)):
            if policy == self:
                return name
        parts = dataclasses.asdict(self)
        if self.cache == "compute":  # the default, which policies saved earlier do not name
            del parts["cache"]
        return ",".join(f"{part}={dtype}" for part, dtype in parts.items())

    @staticmethod
    def parse(text: str) -> "Precision":
        """Return the policy of a name, or of parts such as `compute=bfloat16,softmax=bfloat16`.

        Raises:
          ValueError: If a part or dtype is unknown.
        """
        if not isinstance(text, str):
            raise ValueError(f"precision of type {type(text).__name__}: give a string")
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
        fields: dict[str, Any] = dict(parts)
        return Precision(**fields)


POLICIES: dict[str, Precision] = {
    "float32": Precision(),
    "bfloat16": Precision(compute="bfloat16"),
    "pure_bfloat16": Precision(parameters="bfloat16", compute="bfloat16"),
    "float16": Precision(compute="float16"),
}
"""Policies by name. All but `pure_bfloat16` keep float32 weights."""

AUTO_POLICY = Precision(compute=cast(DType, AUTO))
"""The policy `auto`. Models need `Precision.resolve(hardware)` of it."""
