"""Compare every supported family with `transformers`: tiny models, random weights, both ways.

    python -m bench.drills.huggingface [--only WORD] [--output FILE]
    python -m bench.drills.huggingface --fixtures [--only WORD]      # write the test fixtures

Each model is created and saved by transformers, read here, written again and opened there. The
table
has the largest differences of logits, of hidden states of every layer, and of the gradient of the
loss (relative to max(1, largest reference)), the number of greedy tokens that agree, and whether
the tensors of the written files equal those read, bit for bit.

It needs torch and transformers (the extra `hf`) and no network.
"""

import fnmatch
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from bench.drills._huggingface_models import END, VARIANTS, VOCAB, Variant
from bench.drills._reference_table import run_drill
from transformer.generation.generate import generate
from transformer.generation.sampling import SamplingConfig
from transformer.inspection import layer_values
from transformer.interop.pretrained import PretrainedConfig, read_model, write_model
from transformer.interop.weight_map import arrays_by_path, model_leaves, model_tensors
from transformer.models.encoder_decoder import EncoderDecoder

Array = np.ndarray[Any, Any]

FIXTURES = Path(__file__).parents[2] / "tests" / "transformer" / "interop" / "fixtures"
IN_FIXTURES = (
    "gpt2-tied",
    "llama-grouped",
    "llama-llama3",
    "mistral-window",
    "mixtral-experts",
    "qwen2-window",
    "qwen3-qknorm",
    "phi3-partial",
    "phi3-long",
    "gptoss-clamped",
    "gemma-scaled",
    "gemma2-tight",
    "gemma3-linear",
    "starcoder2-window",
    "smollm3-window",
    "granite-factors",
    "olmo2-joint",
    "olmo3-window",
    "nemotron-partial",
    "stablelm-norms",
    "qwen3moe-plain",
    "qwen2moe-shared",
    "exaone4-window",
    "neox-parallel",
    "bloom-alibi",
    "opt-tied",
    "gptj-partial",
    "phi-normed",
    "falcon-grouped",
    "cohere-normed",
    "cohere2-kinds",
    "gpt-neo-local",
    "mpt-clipped",
    "glm4-partial",
    "bert-mlm",
    "bert-classifier",
    "bert-untied",
    "bert-answers",
    "modernbert-local",
    "longformer-mlm",
    "bigbird-mlm",
    "roberta-mlm",
    "mpnet-mlm",
    "electra-mlm",
    "albert-mlm",
    "distilbert-tagger",
    "distilbert-classifier",
    "modernbert-mean",
    "gpt2-classifier",
    "t5-gated",
    "mt5-gated",
    "umt5-gated",
    "bart-scaled",
    "mbart-classifier",
    "mbart-untied",
    "m2m-odd-width",
    "pegasus-odd-width",
    "marian-separate",
    "led-odd-width",
)
"""Models whose files and outputs are committed, for tests without torch."""

LOGITS, GRADIENT = 1e-4, 1e-3
"""Largest differences that pass."""
NEW_TOKENS, MARGIN = 64, 1e-3
"""Tokens of a greedy continuation, and the margin of two logits above which both must agree."""


class Reference(NamedTuple):
    """Inputs of a model and the outputs of transformers."""

    source: Array  # [B, S]; unused without an encoder
    tokens: Array  # [B, T]
    logits: Array
    hidden: Array  # [L + 1, B, T, D] embeddings, then the states after each layer
    gradient: (
        Array  # [V, D] of the token embedding, to which all paths through the model contribute
    )
    greedy: Array  # [B, T + 64] prompt and continuation; empty for models that do not generate


def make_model(variant: Variant) -> Any:
    """Return a model with random weights, including biases and gains."""
    torch.manual_seed(0)
    config = getattr(transformers, variant.config_class)(**variant.settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, variant.model_class)(config).eval()
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.2)
        if variant.own_head:
            head = model.get_output_embeddings()
            head.weight = torch.nn.Parameter(head.weight + torch.randn_like(head.weight) * 0.2)
        if variant.model_class == "MarianMTModel":
            model.final_logits_bias.add_(torch.randn_like(model.final_logits_bias) * 0.2)
    return model


class Inputs(NamedTuple):
    """Inputs of a model."""

    arrays: tuple[Array, ...]
    """[source [B, S],] tokens [B, T]."""
    tensors: dict[str, Any]
    """The same for transformers."""


def draw_inputs(variant: Variant) -> Inputs:
    """Return random inputs."""
    draw = np.random.RandomState(0)
    source, tokens = (draw.randint(3, VOCAB, (2, length)) for length in (11, 14))
    arrays = (source, tokens) if variant.is_seq2seq else (tokens,)
    if variant.ends:
        tokens[:, variant.ends] = END
    names = ("input_ids", "decoder_input_ids")
    tensors = {name: torch.tensor(each) for name, each in zip(names, arrays, strict=False)}
    if variant.config_class in ("LongformerConfig", "LEDConfig"):
        # The first token is global, as the imported configs say.
        is_first = torch.arange(arrays[0].shape[1]) == 0
        tensors["global_attention_mask"] = is_first.expand(2, -1).int()
    return Inputs(arrays, tensors)


def logits_of(output: Any) -> Any:
    """Return the logits of an output of transformers; those of tokens where there are others."""
    if "start_logits" in output:
        return torch.stack([output["start_logits"], output["end_logits"]], dim=-1)
    return output["prediction_logits" if "prediction_logits" in output else "logits"]


def compute_reference(variant: Variant, model: Any) -> Reference:
    """Run a model of transformers."""
    inputs = draw_inputs(variant)
    source, tokens = inputs.arrays[0], inputs.arrays[-1]
    output = model(**inputs.tensors, output_hidden_states=True)
    has_decoder = "decoder_hidden_states" in output
    states = output.decoder_hidden_states if has_decoder else output.hidden_states
    logits = logits_of(output)
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        torch.tensor(_targets(logits.shape)).reshape(-1),
    )
    loss.backward()
    # Source and target may have tables of their own: that of the target.
    decoder = model.get_decoder() if has_decoder else model
    embedding = decoder.get_input_embeddings()
    gradient = embedding.weight.grad.numpy().copy()
    greedy = np.zeros((0, 0), int)
    if variant.generates:
        greedy = _greedy(variant, model, source, tokens)
    return Reference(
        source,
        tokens,
        logits.detach().numpy(),
        np.stack([state.detach().numpy() for state in states]),
        gradient,
        greedy,
    )


def _targets(shape: tuple[int, ...]) -> Array:
    return np.random.RandomState(1).randint(0, shape[-1], shape[:-1])


def _greedy(variant: Variant, model: Any, source: Array, tokens: Array) -> Array:
    text = torch.tensor(tokens)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            given: dict[str, Any] = {"input_ids": text}
            if variant.is_seq2seq:
                given = draw_inputs(variant).tensors | {"decoder_input_ids": text}
            logits = model(**given, use_cache=False).logits[:, -1]
            text = torch.cat([text, logits.argmax(-1, keepdim=True)], dim=1)
    return text.numpy()


class Result(NamedTuple):
    """Largest differences of one model, and what else was checked."""

    logits: float
    hidden: float
    gradient: float
    greedy: str
    """Greedy tokens that agree, of one pass over the text."""
    cached: str
    """Greedy tokens that agree, generated here one by one."""
    identical: bool
    reopened: float

    @property
    def passed(self) -> bool:
        """True if all differences are within their bounds."""
        within = max(self.logits, self.hidden) <= LOGITS and self.gradient <= GRADIENT
        return (
            within
            and self.identical
            and self.reopened == 0
            and "no" not in self.greedy + self.cached
        )


def difference(actual: Any, reference: Array) -> float:
    """Return max |actual - reference| / max(1, max |reference|)."""
    gap = np.abs(np.asarray(actual) - reference).max()
    return float(gap / max(1, np.abs(reference).max()))


def compare(
    pretrained: PretrainedConfig, params: Any, reference: Reference, theirs: Any
) -> tuple[float, float, float, str, str]:
    """Return the differences of logits, hidden states and gradients, and the greedy agreement."""
    model: Any = pretrained.make_model()
    inputs: tuple[Array, ...] = (reference.tokens,)
    if isinstance(model, EncoderDecoder):
        inputs = (reference.source, reference.tokens)
    output = model.apply({"params": params}, *inputs, outputs={"logits", "residual_pre"})
    # transformers normalizes the last hidden state, so only the inputs of layers are compared.
    entering = np.asarray(layer_values(output, "residual_pre"))
    hidden = difference(entering, reference.hidden[: len(entering)])

    def loss(params: Any) -> jax.Array:
        logits = model.apply({"params": params}, *inputs).logits
        targets = jnp.asarray(_targets(logits.shape))[..., None]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=-1)
        return -jnp.mean(picked)

    return (
        difference(output.logits, reference.logits),
        hidden,
        _gradient_difference(pretrained, model, jax.grad(loss)(params), theirs),
        _agreement(model, params, reference),
        _cached_agreement(model, params, reference),
    )


def _gradient_difference(
    pretrained: PretrainedConfig, model: Any, gradients: Any, theirs: Any
) -> float:
    """Return the largest difference of a gradient, relative to the tensor's largest entry.

    Some gradients are zero up to rounding (a bias of keys shifts all scores equally), so the
    denominator
    is at least a thousandth of the largest entry of all tensors.
    """
    expected = {
        name: parameter.grad.numpy()
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    largest = max(float(np.abs(each).max()) for each in expected.values())
    rules = pretrained.family.rules(pretrained.architecture)
    tensors = model_tensors(rules, model_leaves(model), model.config)
    arrays = arrays_by_path(gradients)
    gradient = {name: tensor.join(arrays) for name, tensor in tensors.items()}
    common = expected.keys() & gradient.keys()
    assert len(common) > 5
    return max(
        float(np.abs(gradient[name] - expected[name]).max())
        / max(float(np.abs(expected[name]).max()), 1e-3 * largest)
        for name in common
    )


def _agreement(model: Any, params: Any, reference: Reference) -> str:
    """Return how many greedy tokens agree where the margin is clear: one pass over the text."""
    if not reference.greedy.size:
        return "-"
    text, start = reference.greedy, reference.tokens.shape[1]
    inputs = (text[:, :-1],) if model.config.encoder is None else (reference.source, text[:, :-1])
    logits = np.asarray(model.apply({"params": params}, *inputs).logits)[:, start - 1 :]
    ordered = np.sort(logits, axis=-1)
    clear = ordered[..., -1] - ordered[..., -2] > MARGIN
    agree = logits.argmax(-1) == text[:, start:]
    if not np.all(agree | ~clear):
        return f"no ({int(np.sum(clear & ~agree))} differ)"
    return f"{int(np.sum(agree))}/{agree.size}"


def _cached_agreement(model: Any, params: Any, reference: Reference) -> str:
    """Return how many tokens `generate` gives, with a cache, before a margin is not clear.

    After a token with a small margin the two may rightly differ. Decoders only.
    """
    if not reference.greedy.size or model.config.encoder is not None:
        return "-"
    text, start = reference.greedy, reference.tokens.shape[1]
    logits = np.sort(np.asarray(model.apply({"params": params}, text[:, :-1]).logits), axis=-1)
    clear = (logits[..., -1] - logits[..., -2] > MARGIN)[:, start - 1 :]
    try:
        generated = generate(
            model,
            params,
            list(reference.tokens),
            max_new_tokens=text.shape[1] - start,
            sampling=SamplingConfig(temperature=0.0),
        )
    except ValueError:  # longrope beyond its original length has no cache
        return "refused"
    agreed = 0
    for row, tokens in enumerate(generated.tokens):
        certain = int(np.argmin(clear[row])) if not clear[row].all() else clear.shape[1]
        if list(text[row, start : start + certain]) != list(tokens[:certain]):
            return "no"
        agreed += certain
    return f"{agreed}/{clear.size}"


def run_variant(variant: Variant) -> Result:
    """Compare one model, both ways."""
    theirs = make_model(variant)
    reference = compute_reference(variant, theirs)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        theirs.save_pretrained(first)
        pretrained, params = read_model(first)
        model = pretrained.make_model()
        compared = compare(pretrained, params, reference, theirs)
        # The length of training's examples must not replace the rows of a table of positions.
        given = {"max_position_embeddings": 128, "eos_token_id": 2, "pad_token_id": 1}
        write_model(second, model, params, family=pretrained.family.model_type, fields=given)
        files = [load_file(Path(each) / "model.safetensors") for each in (first, second)]
        names = [
            {name for name in file if not _is_unused(name, variant, pretrained)} for file in files
        ]
        identical = names[0] == names[1] and all(
            files[0][name].tobytes() == files[1][name].tobytes() for name in names[0]
        )
        reopened = getattr(transformers, variant.model_class).from_pretrained(
            second, attn_implementation="eager"
        )
        with torch.no_grad():
            again = logits_of(reopened.eval()(**draw_inputs(variant).tensors)).numpy()
    return Result(*compared, identical, difference(again, reference.logits))


def _is_unused(name: str, variant: Variant, pretrained: PretrainedConfig) -> bool:
    """Return True for tensors without effect: poolers of masked language models, buffers."""
    if name in variant.unused:
        return True
    head = {weight.theirs for weight in pretrained.architecture.head}
    patterns = pretrained.family.ignored if name not in head else ()
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def write_fixtures(only: str) -> None:
    """Write the files and outputs of some models for the tests."""
    for variant in VARIANTS:
        if variant.name in IN_FIXTURES and only in variant.name:
            model = make_model(variant)
            reference = compute_reference(variant, model)
            folder = FIXTURES / variant.name
            folder.mkdir(parents=True, exist_ok=True)
            model.save_pretrained(folder)
            (folder / "generation_config.json").unlink(missing_ok=True)
            np.savez_compressed(folder / "reference.npz", **reference._asdict())


def main() -> int:
    """Print the table; return 1 if a model does not pass."""
    versions = (
        f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    )
    columns = (
        f"{'model':20} {'logits':>8} {'hidden':>8} {'gradient':>8} {'greedy':>9} {'cached':>9}"
    )
    head = [
        f"{versions}, jax {jax.__version__}, CPU, float32",
        f"{columns}  there and back  reopened",
    ]
    return run_drill(VARIANTS, run_line, head=head, write_fixtures=write_fixtures)


def run_line(variant: Variant) -> tuple[str, bool]:
    """Compare one model; return its line, and if it passed."""
    result = run_variant(variant)
    same = "identical" if result.identical else "DIFFERENT"
    line = (
        f"{variant.name:20} {result.logits:8.1e} {result.hidden:8.1e} {result.gradient:8.1e} "
        f"{result.greedy:>9} {result.cached:>9}  {same:14}  {result.reopened:.0e}"
    )
    return line, result.passed


if __name__ == "__main__":
    sys.exit(main())
