"""What a model says about a mixer of the user's own that is wrong, or lacks an ability."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.transformer.formulas import normal
from tests.transformer.mixers import make_mixer
from transformer import (
    MIXERS,
    Abilities,
    BlockConfig,
    Classifier,
    EncoderConfig,
    EncoderDecoder,
    LanguageModel,
    Mixer,
    MixerConfig,
    MixerInputs,
    MixerOutput,
    TransformerConfig,
)
from transformer.attention.masks import Mask
from transformer.attention.mixer import MixerError
from transformer.attention.projections import MultiHeadConfig, project_qkv
from transformer.attention.rope import RoPE, apply_rope
from transformer.attention.variants.routing_attention import RoutingAttentionConfig

TOKENS = jnp.zeros((2, 5), jnp.int32)
PACKED = jnp.array([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]])


@dataclasses.dataclass(frozen=True)
class OwnConfig(MixerConfig):
    kind: ClassVar[str] = "own"
    segments: bool = False
    cross: bool = True
    weights: bool = True
    fault: str = ""


class Own(Mixer):
    """Mean over the row, which ignores the mask."""

    config: OwnConfig

    @staticmethod
    def abilities(config: OwnConfig) -> Abilities:
        return Abilities(segments=config.segments, cross=config.cross, weights=config.weights)

    @staticmethod
    def constants(config: OwnConfig, layer: int, width: int) -> Any:
        by_layer: dict[int, Any] = {}
        return by_layer[layer] if config.fault == "constants" else None

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        raise NotImplementedError("no\ncache")

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        if self.config.fault == "refuses":
            raise ValueError("mixer own: is tired; wait")
        if self.config.fault == "shapes":
            x = x @ x
        return MixerOutput(x.mean(1, keepdims=True) + x, None, {})


@dataclasses.dataclass(frozen=True)
class HeadsConfig(MultiHeadConfig):
    kind: ClassVar[str] = "heads"


class Heads(Mixer):
    """Projections alone."""

    config: HeadsConfig

    @staticmethod
    def abilities(config: HeadsConfig) -> Abilities:
        return Abilities()

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        raise NotImplementedError

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> Any:
        return project_qkv(self, x, inputs.positions)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "own", Own)
    monkeypatch.setitem(MIXERS, "heads", Heads)


def config_with(mixer: MixerConfig, *, causal: bool = True) -> TransformerConfig:
    block = BlockConfig(mixer=mixer)
    return TransformerConfig(7, 6, layer_pattern=(block,), causal=causal)


def apply(model: Any, **inputs: Any) -> None:
    def run(key: jax.Array) -> Any:
        return model.apply({"params": model.init(key, TOKENS)["params"]}, TOKENS, **inputs)

    jax.eval_shape(run, jax.random.key(0))


def test_segments_are_refused_without_the_ability() -> None:
    refusal = r"^mixer own: would mix the documents .* set data.document_masking to False"
    model = LanguageModel(config_with(OwnConfig()))
    apply(model)
    with pytest.raises(MixerError, match=refusal):
        apply(model, segments=PACKED)
    padded = Classifier(config_with(OwnConfig(), causal=False), num_classes=3)
    with pytest.raises(MixerError, match=refusal):
        apply(padded, segments=PACKED)
    apply(LanguageModel(config_with(OwnConfig(segments=True))), segments=PACKED)
    # Balanced clusters take padding, though not packed documents.
    balanced = config_with(RoutingAttentionConfig(num_heads=2, balanced=True), causal=False)
    apply(Classifier(balanced, num_classes=3), segments=jnp.minimum(PACKED, 1))


def test_weights_are_refused_without_the_ability() -> None:
    refusal = r"^mixer own: has no attention weights; leave `weights` out of `outputs`"
    with pytest.raises(MixerError, match=refusal):
        apply(LanguageModel(config_with(OwnConfig(weights=False))), outputs=frozenset({"weights"}))


def test_memory_is_refused_without_the_ability() -> None:
    def model(cross: bool) -> EncoderDecoder:
        own = OwnConfig(segments=True)
        block = BlockConfig(mixer=own, cross_attention=dataclasses.replace(own, cross=cross))
        encoder = EncoderConfig(layer_pattern=(BlockConfig(mixer=own),))
        return EncoderDecoder(TransformerConfig(7, 6, layer_pattern=(block,), encoder=encoder))

    jax.eval_shape(model(cross=True).init, jax.random.key(0), TOKENS, TOKENS)
    with pytest.raises(MixerError, match=r"^mixer own: cannot read a memory"):
        jax.eval_shape(model(cross=False).init, jax.random.key(0), TOKENS, TOKENS)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("shapes", r"^mixer own: raises TypeError \(line \d+ of .*test_own_mixer.py\): dot_g"),
        (
            "constants",
            r"^mixer own: raises KeyError \(line \d+ of .*own_mixer.py\): 0; correct",
        ),
        ("refuses", r"^mixer own: is tired; wait"),
    ],
)
def test_errors_of_own_code_are_one_line(fault: str, message: str) -> None:
    with pytest.raises(MixerError, match=message) as found:
        apply(LanguageModel(config_with(OwnConfig(fault=fault))))
    assert "\n" not in str(found.value)


def test_error_of_an_own_cache_is_one_line() -> None:
    model = LanguageModel(config_with(OwnConfig()))
    with pytest.raises(MixerError, match=r"^mixer own: raises NotImpl.*py\): no cache; correct"):
        model.init_cache(2, 5)


def test_projections_of_own_heads_have_the_settings_of_all_heads() -> None:
    """RoPE is a setting of `MultiHeadConfig`: a mixer does not apply it."""
    positions = jnp.array([[3, 1, 4, 1, 5]])
    x = normal(0, 2, 5, 8)
    config = HeadsConfig(num_heads=2, num_kv_heads=1)
    mixer, params = make_mixer(config, 8)
    inputs = MixerInputs(positions, Mask())
    plain: Any = mixer.apply({"params": params}, x, inputs)
    rope = RoPE(theta=100.0)
    rotated_mixer = Heads(dataclasses.replace(config, position=rope), mixer.context, parent=None)
    rotated: Any = rotated_mixer.apply({"params": params}, x, inputs)
    np.testing.assert_array_equal(rotated.q, apply_rope(plain.q, positions, rope))
    np.testing.assert_array_equal(rotated.k, apply_rope(plain.k, positions, rope))
    np.testing.assert_array_equal(rotated.v, plain.v)
    assert not np.allclose(rotated.k, plain.k)
