"""The mixer contract passes for every mixer and detects each planted fault."""

import dataclasses
import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from transformer import (
    MIXERS,
    Abilities,
    AttentionConfig,
    BlockConfig,
    Hardware,
    LanguageModel,
    Mask,
    Mixer,
    MixerOutput,
    Precision,
    ReformerConfig,
    TransformerConfig,
)
from transformer.attention.full import Attention
from transformer.attention.masks import dense_mask
from transformer.attention.mixer import MixerConfig, MixerInputs
from transformer.attention.projections import QKV
from transformer.layers.basic import apply_linear
from transformer.testing.contract import (
    ABILITY_CHECKS,
    UNSUPPORTED_CALLS,
    check_any_length,
    check_bfloat16,
    check_causal,
    check_constants,
    check_dropout,
    check_in_model,
    check_mixer,
    check_output,
    check_rejected,
)
from transformer.testing.mixer_under_test import (
    Trial,
    check_select,
    make_trial,
    reference_softmax_attention,
)


@pytest.mark.full
@pytest.mark.parametrize("kind", sorted(MIXERS))
def test_every_mixer_passes(kind: str) -> None:
    # The length is just above a power of two, where blockwise backends have a partial block.
    # Unoptimized, a call of Reformer takes a second: two rounds of its four will do.
    mixer = ReformerConfig(num_hashes=2) if kind == "reformer" else kind
    check_mixer(mixer, length=67, lengths=(1, 257))


BLOCKS = "bigbird full linear longformer performer routing sliding_window sparse top_k"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", BLOCKS.split())
def test_mixer_with_blocks_passes_at_longer_lengths(kind: str) -> None:
    """Several blocks, the last of them partial, in every check.

    Reformer has a test with smaller blocks, and the other mixers have none.
    """
    check_mixer(kind)


def test_every_ability_has_a_check_and_unsupported_calls() -> None:
    abilities = {field.name for field in dataclasses.fields(Abilities)}
    assert set(ABILITY_CHECKS) == abilities
    # The others are refused for all mixers (test_own_mixer.py).
    assert set(UNSUPPORTED_CALLS) == abilities - {"cross", "segments", "weights"}


def test_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^mixer unheard-of: is not known; give one of .*full"):
        check_mixer("unheard-of")


@dataclasses.dataclass(frozen=True)
class FaultyConfig(AttentionConfig):
    """Full attention with a fault, and without the abilities in `lacks`."""

    kind: ClassVar[str] = "faulty"
    fault: str = ""
    lacks: tuple[str, ...] = ()


class Faulty(Mixer):
    config: FaultyConfig

    @staticmethod
    def abilities(config: FaultyConfig) -> Abilities:
        return Abilities(**dict.fromkeys(config.lacks, False))

    @staticmethod
    def constants(config: FaultyConfig, layer: int, width: int) -> Any:
        return np.zeros(layer) if config.fault == "ragged constants" else None

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        return self.inner().init_cache(batch, length)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> Any:
        return self.inner().init_memory_cache(batch, length)

    @nn.nowrap
    def inner(self, **kwargs: Any) -> Attention:
        config = AttentionConfig(num_heads=self.config.num_heads, dropout=self.config.dropout)
        return Attention(config, self.context, **(kwargs or dict(parent=None)))

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        kwargs = before(self.config.fault, x, inputs)
        output = self.inner(name="inner")(x, kwargs)
        if self.config.fault == "learns positions":
            self.param("positions", nn.initializers.zeros, x.shape[1:])
        return after(self.config.fault, x, output, inputs)


CALLS: list[str] = []
"""Traces of the mixer that depends on how often it was traced."""


def before(fault: str, x: jax.Array, inputs: MixerInputs) -> MixerInputs:
    """Return the inputs of the inner mixer."""
    mask, rngs = inputs.mask, inputs.dropout_rngs
    if fault.startswith("refuses") and inputs.cache is not None:
        raise ValueError(fault)
    if fault == "mixes documents":
        return inputs.replace(mask=mask.replace(segments=None))
    if fault == "mistakes positions":
        return inputs.replace(mask=mask.replace(positions=jnp.arange(x.shape[1])[None] // 2))
    if fault == "is deaf":
        return inputs.replace(memory=None, mask=Mask())
    if fault == "sees padding of the memory":
        return inputs.replace(mask=mask.replace(key_lengths=None))
    if fault == "drops by the batch" and rngs is not None:
        return inputs.replace(dropout_rngs=jnp.broadcast_to(rngs[:1], rngs.shape))
    if fault == "drops nothing":
        return inputs.replace(dropout_rngs=None)
    return inputs


def after(fault: str, x: jax.Array, output: MixerOutput, inputs: MixerInputs) -> MixerOutput:
    """Return the output, changed from that of the inner mixer."""
    y, cache, aux = output
    if fault == "leaks by a maximum":
        y = y + 1e-3 * x.max(axis=1, keepdims=True)
    if fault == "says nothing":
        y = jnp.zeros_like(y)
    if fault == "forgets":
        cache = inputs.cache
    if fault == "grows its cache" and cache is not None:
        cache = jax.tree.map(lambda each: jnp.concatenate([each, each], axis=1), cache)
    if fault == "goes by the length":
        y = y * x.shape[1]
    if fault == "weighs twice":
        aux = {name: 2 * each for name, each in aux.items()}
    if fault == "weighs what is hidden":
        aux = {name: jnp.full_like(each, 1 / each.shape[-1]) for name, each in aux.items()}
    if fault == "keeps its weights":
        aux = {}
    if fault == "widens":
        y = y.astype(jnp.float32)
    if fault == "looks back":  # not a fault
        y = jnp.pad(y, [(0, 0), (1, 0), (0, 0)])[:, :-1]
    if fault == "has no gradient":
        y = y + jnp.sqrt(0 * x)
    if fault == "counts its calls":
        CALLS.append(fault)
        y = y * len(CALLS)
    wrong: dict[str, Any] = {
        "returns an array": y,
        "returns one number a token": MixerOutput(y[..., :1], cache, aux),
        "returns no dict": MixerOutput(y, cache, ()),  # type: ignore[arg-type]
    }
    return wrong.get(fault, MixerOutput(y, cache, aux))


LENGTH = 17


@pytest.fixture(scope="module")
def sound() -> Trial:
    """Return a trial of the mixer without a fault; other trials share its weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MIXERS, "faulty", Faulty)
        return make_trial(FaultyConfig(num_heads=2), 6, LENGTH, (1, LENGTH, 23), Hardware())


def faulty(sound: Trial, fault: str, lacks: tuple[str, ...] = ()) -> Trial:
    config = FaultyConfig(num_heads=2, fault=fault, lacks=lacks)
    return dataclasses.replace(sound, mixer=Faulty(config, sound.mixer.context, parent=None))


@pytest.mark.parametrize(
    ("ability", "fault", "message"),
    [
        ("causal", "leaks by a maximum", "outputs up to position 0 changed"),
        ("causal", "says nothing", "outputs after position 0 do not depend"),
        ("cached", "forgets", "3 tokens from position 11 differ"),
        ("cached", "grows its cache", "the returned cache has other shapes"),
        ("segments", "mixes documents", "document 1 depends on another document"),
        ("segments", "mistakes positions", "document 2 gives other results in a packed row"),
        ("cross", "is deaf", "a query's result depends on other queries"),
        ("cross", "says nothing", "the result does not depend on the memory"),
        ("cross", "sees padding of the memory", "padding of the memory changes the result"),
        ("cross", "forgets", "results from the cached memory differ"),
        ("cross", "grows its cache", "the returned cache of the memory has other shapes"),
        ("any_length", "goes by the length", "1 tokens give other results than at"),
        ("weights", "weighs twice", "rows do not sum to 1"),
        ("weights", "weighs what is hidden", "keys that the mask hides have a weight"),
        ("weights", "keeps its weights", "are not in aux though they were requested"),
    ],
)
def test_faults_are_detected(sound: Trial, ability: str, fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=f"^mixer faulty: {ability}: {message}"):
        ABILITY_CHECKS[ability](faulty(sound, fault))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("drops by the batch", "the rest of the batch changes the result"),
        ("drops nothing", "other random keys change nothing"),
    ],
)
def test_faulty_dropout_is_detected(sound: Trial, fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=f"^mixer faulty: dropout: {message}"):
        check_dropout(faulty(sound, fault))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("has no gradient", "training step: gradients are not finite"),
        ("counts its calls", "stacked layers: a scan over layers and a loop give diff"),
    ],
)
def test_faults_inside_a_model_are_detected(
    sound: Trial, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    monkeypatch.setitem(MIXERS, "faulty", Faulty)
    with pytest.raises(AssertionError, match=f"^mixer faulty: {message}"):
        check_in_model(faulty(sound, fault))


def test_results_in_bfloat16_stay_in_bfloat16(sound: Trial) -> None:
    check_bfloat16(sound)
    with pytest.raises(
        AssertionError, match=r"^mixer faulty: bfloat16: inputs in bfloat16 give fl"
    ):
        check_bfloat16(faulty(sound, "widens"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("returns an array", "is of type ShapeDtypeStruct; return MixerOutput(y, cache, aux)"),
        ("returns one number a token", "y has shape (3, 17, 1), its input (3, 17, 6); return"),
        ("returns no dict", "aux is not a dict; return MixerOutput(y, cache, aux)"),
    ],
)
def test_faulty_outputs_are_detected(
    sound: Trial, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    check_output(sound)
    with pytest.raises(AssertionError, match=f"^mixer faulty: output: {re.escape(message)}"):
        check_output(faulty(sound, fault))
    if fault == "returns no dict":
        return
    monkeypatch.setitem(MIXERS, "faulty", Faulty)
    block = BlockConfig(FaultyConfig(num_heads=2, fault=fault))
    model = LanguageModel(TransformerConfig(vocab_size=5, d_model=6, layer_pattern=(block,)))
    with pytest.raises(ValueError, match=r"^mixer faulty: returns .*; give MixerOutput\(y, cache"):
        jax.eval_shape(model.init_params, jax.random.key(0))


def test_output_of_another_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As layers of Flax give without `dtype`: in float32 for bfloat16."""
    monkeypatch.setitem(MIXERS, "faulty", Faulty)
    block = BlockConfig(FaultyConfig(num_heads=2, fault="widens"))
    config = TransformerConfig(5, 6, layer_pattern=(block,), precision=Precision.parse("bfloat16"))
    with pytest.raises(
        ValueError, match=r"returns y in float32 for x in bfloat16; .* dtype=x.dtyp"
    ):
        jax.eval_shape(LanguageModel(config).init_params, jax.random.key(0))


def test_last_output_may_depend_on_earlier_tokens_alone(sound: Trial) -> None:
    check_causal(faulty(sound, "looks back"))


def test_weights_of_the_length_of_the_inputs_are_detected(sound: Trial) -> None:
    trial = dataclasses.replace(
        faulty(sound, "learns positions"),
        params=sound.params | {"positions": np.zeros((LENGTH, 6), np.float32)},
    )
    with pytest.raises(AssertionError, match=r'^mixer faulty: any_length: .*"positions" in "/"'):
        check_any_length(trial)


def test_constants_must_be_stackable(sound: Trial) -> None:
    check_constants(sound)
    with pytest.raises(AssertionError, match="constants: differ in shape between layers"):
        check_constants(faulty(sound, "ragged constants"))


@pytest.mark.parametrize("ability", UNSUPPORTED_CALLS)
def test_undeclared_abilities_must_be_rejected(sound: Trial, ability: str) -> None:
    message = f"{ability}: is neither declared nor rejected by a ValueError"
    with pytest.raises(AssertionError, match=message):
        check_rejected(faulty(sound, "", (ability,)), ability)


def test_rejections_must_be_one_line(sound: Trial) -> None:
    check_rejected(faulty(sound, "refuses in one line", ("cached",)), "cached")
    with pytest.raises(AssertionError, match="cached: is rejected, but not in one line: refuses"):
        check_rejected(faulty(sound, "refuses\nin two", ("cached",)), "cached")


@dataclasses.dataclass(frozen=True)
class StridedConfig(MixerConfig):
    """Heads of width 3 that see every `stride`-th key."""

    kind: ClassVar[str] = "strided"
    stride: int = 3
    says: int = 3
    """Stride that `select` reports."""


class Strided(Mixer):
    """Minimal mixer with a sparse pattern."""

    config: StridedConfig

    @staticmethod
    def abilities(config: StridedConfig) -> Abilities:
        return Abilities(cached=False, cross=False, segments=False, weights=False)

    @staticmethod
    def constants(config: StridedConfig, layer: int, width: int) -> Any:
        return {"offset": np.array(layer)}

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        raise ValueError("mixer strided: has no cache; use mixer full to decode")

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        mask, length = inputs.mask, x.shape[1]
        refused = inputs.memory is not None or mask.segments is not None
        if refused or "weights" in inputs.outputs:
            raise ValueError("mixer strided: does that not; use mixer full")
        q, k, v = self.project(x, inputs)
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / 3**0.5
        chosen = self.strided(length, self.config.stride, inputs.constants)
        visible = chosen & dense_mask(mask, length, length)[:, None]
        weights = (
            jax.nn.softmax(jnp.where(visible, scores, -1e9), axis=-1) * visible.any(-1)[..., None]
        )
        y = jnp.einsum("BNTS,BSNH->BTNH", weights, v)
        heads, embed = {"heads": 2, "head": 3}, {"embed": x.shape[-1]}
        y = apply_linear(self, "output", y, heads, embed, self.context, bias=True)
        return MixerOutput(y, None, {})

    def project(self, x: jax.Array, inputs: MixerInputs) -> QKV:
        heads, embed = {"heads": 2, "head": 3}, {"embed": x.shape[-1]}
        q, k = (
            apply_linear(self, name, x, embed, heads, self.context, bias=False)
            for name in ("query", "key")
        )
        gain = self.param("gain", nn.initializers.ones, (3,))
        v = nn.DenseGeneral((2, 3), dtype=x.dtype, name="value")(x)
        return QKV(q, k, v * gain.astype(x.dtype)[None, None, None])

    def select(self, heads: QKV, inputs: MixerInputs) -> jax.Array:
        return self.strided(heads.q.shape[1], self.config.says, inputs.constants)

    def strided(self, length: int, stride: int, constants: Any) -> jax.Array:  # [1, 1, T, S]
        index = jnp.arange(length) + constants["offset"]
        return (index[:, None] % stride == index[None, :] % stride)[None, None]


@pytest.mark.full
def test_parameters_of_flax_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their axes have no names."""
    monkeypatch.setitem(MIXERS, "strided", Strided)
    check_mixer(StridedConfig(), d_model=5, length=7, lengths=(1, 7))


@pytest.mark.full
def test_select_is_compared_with_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "strided", Strided)
    trial = make_trial(StridedConfig(), 5, 7, (7,), Hardware())
    check_select(trial)
    mixer = Strided(StridedConfig(says=2), trial.mixer.context, parent=None)
    with pytest.raises(AssertionError, match=r"^mixer strided: select: the result is not softmax"):
        check_select(dataclasses.replace(trial, mixer=mixer))


def test_reference_softmax_attention_matches_hand_computed_values() -> None:
    """Scores 0 and ln 3 give weights 1/4 and 3/4; a query may also see one key, or none."""
    q, k = np.ones((1, 3, 1, 1)), np.array([0, np.log(3), 7]).reshape(1, 3, 1, 1)
    v = np.array([[4.0, 8.0], [12.0, 16.0], [100.0, 200.0]]).reshape(1, 3, 1, 2)
    visible = np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0]], bool)[None, None]
    y = reference_softmax_attention(q, k, v, visible)
    assert y[0, :, 0] == pytest.approx(np.array([[10.0, 14.0], [100.0, 200.0], [0.0, 0.0]]))
