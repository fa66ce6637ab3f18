"""Compare every supported family with `transformers`: tiny models, random weights, both ways.

    python -m bench huggingface [--only WORD]
    python -m bench huggingface_multimodal
    python -m bench huggingface_defaults

`huggingface`: each model is created and saved by transformers, read here, written again and opened
there. The table has the largest differences of logits, of hidden states of every layer, and of the
gradient of the loss (relative to max(1, largest reference)), the number of greedy tokens that
agree, and whether the tensors of the written files equal those read, bit for bit.

`huggingface_multimodal`: the text part of models that also see. Each is saved with both layouts of
its tensors, that of the files on the hub and that of transformers 5; both are read here. The table
has the differences of the logits of text, and of the exported text model, opened there.

`huggingface_defaults`: a field that is absent, or null, has the default of transformers. For every
type one model is saved; then each field that transformers reads is dropped, or set to null, in its
config.json. If the shapes of all weights stay, the logits are compared; else the names and shapes
of the weights that both expect. Where transformers itself refuses a config, nothing is compared.

With `--fixtures` the first two write the fixtures of the tests. They need torch and transformers
(the extra `hf`) and no network.
"""

import fnmatch
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from bench.drills._huggingface_models import (
    MULTIMODAL,
    VARIANTS,
    Array,
    Variant,
    difference,
    logits_of,
)
from bench.drills._reference_table import TESTS, Options, compare_cases, fixture_folders, versions
from transformer.generation.generate import generate
from transformer.generation.sampling import SamplingConfig
from transformer.inspection import layer_values
from transformer.interop.fields import CONFIG_FIELDS, InteropError
from transformer.interop.pretrained import PretrainedConfig, read_config, read_model, write_model
from transformer.interop.weight_map import arrays_by_path, model_leaves, model_tensors

FIXTURES = TESTS / "transformer" / "interop" / "fixtures"
MULTIMODAL_FIXTURES = TESTS / "transformer" / "interop" / "multimodal"

LOGITS, GRADIENT = 1e-4, 1e-3
"""Largest differences that pass."""
NEW_TOKENS, MARGIN = 64, 1e-3
"""Tokens of a greedy continuation, and the margin of two logits above which both must agree."""


# ---------------------------------------------------------------------------
# Outputs, gradients and files
# ---------------------------------------------------------------------------


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


def compute_reference(variant: Variant, model: Any) -> Reference:
    """Run a model of transformers; its parameters get their gradients."""
    inputs, tensors = variant.draw_inputs()
    output = model(**tensors, output_hidden_states=True)
    has_decoder = "decoder_hidden_states" in output
    states = output.decoder_hidden_states if has_decoder else output.hidden_states
    if variant.config_class == "Mamba2Config":  # its states begin after the first layer
        states = (model.get_input_embeddings()(torch.tensor(inputs[-1])), *states)
    logits = logits_of(output)
    targets = torch.tensor(draw_targets(logits.shape)).reshape(-1)
    torch.nn.functional.cross_entropy(logits.reshape(len(targets), -1), targets).backward()
    # Source and target may have tables of their own: that of the target.
    embedding = (model.get_decoder() if has_decoder else model).get_input_embeddings()
    return Reference(
        inputs[0],
        inputs[-1],
        logits.detach().numpy(),
        np.stack([state.detach().numpy() for state in states]),
        embedding.weight.grad.numpy().copy(),
        continue_greedily(variant, model) if variant.generates else np.zeros((0, 0), int),
    )


def draw_targets(shape: tuple[int, ...]) -> Array:
    """Return random targets [B, T] (or [B]) of logits."""
    return np.random.RandomState(1).randint(0, shape[-1], shape[:-1])


def continue_greedily(variant: Variant, model: Any) -> Array:
    """Return the tokens and the likeliest continuation, without a cache."""
    tensors = variant.draw_inputs()[1]
    name = "decoder_input_ids" if variant.is_seq2seq else "input_ids"
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            likeliest = model(**tensors, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            tensors[name] = torch.cat([tensors[name], likeliest], dim=1)
    return np.asarray(tensors[name])


def gradient_difference(
    pretrained: PretrainedConfig, model: Any, gradients: Any, theirs: Any
) -> float:
    """Return the largest difference of a gradient, relative to the tensor's largest entry.

    Some gradients are zero up to rounding (a bias of keys shifts all scores equally), so the
    denominator is at least a thousandth of the largest entry of all tensors.
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
    common = expected.keys() & tensors.keys()
    assert len(common) > 5
    return max(
        float(np.abs(tensors[name].join(arrays) - expected[name]).max())
        / max(float(np.abs(expected[name]).max()), 1e-3 * largest)
        for name in common
    )


def greedy_agreement(model: Any, params: Any, reference: Reference) -> tuple[str, str]:
    """Return how many greedy tokens agree: of one pass over the text, and generated one by one.

    Both count where the margin is clear. After a token with a small margin, what is generated may
    rightly differ, so that the rest of its row is left out; it is generated by decoders only.
    """
    if not reference.greedy.size:
        return "-", "-"
    text, start = reference.greedy, reference.tokens.shape[1]
    is_decoder = model.config.encoder is None
    inputs = (text[:, :-1],) if is_decoder else (reference.source, text[:, :-1])
    logits = np.asarray(model.apply({"params": params}, *inputs).logits)[:, start - 1 :]
    ordered = np.sort(logits, axis=-1)
    clear = ordered[..., -1] - ordered[..., -2] > MARGIN
    agree = logits.argmax(-1) == text[:, start:]
    differ = int(np.sum(clear & ~agree))
    of_pass = f"no ({differ} differ)" if differ else f"{int(np.sum(agree))}/{agree.size}"
    if not is_decoder:
        return of_pass, "-"
    try:
        generated = generate(
            model,
            params,
            list(reference.tokens),
            max_new_tokens=NEW_TOKENS,
            sampling=SamplingConfig(temperature=0.0),
        )
    except ValueError:  # longrope beyond its original length has no cache
        return of_pass, "refused"
    certain = np.cumprod(clear, axis=1).sum(axis=1)
    for row, count in enumerate(certain):
        if list(text[row, start : start + count]) != list(generated.tokens[row][:count]):
            return of_pass, "no"
    return of_pass, f"{certain.sum()}/{clear.size}"


def compare_outputs(
    pretrained: PretrainedConfig, params: Any, reference: Reference, theirs: Any
) -> tuple[tuple[float, float, float], tuple[str, str]]:
    """Return the differences of logits, hidden states and gradients, and the greedy agreement."""
    model: Any = pretrained.make_model()
    inputs: tuple[Array, ...] = (reference.tokens,)
    if pretrained.architecture.kind == "encoder_decoder":
        inputs = (reference.source, reference.tokens)
    output = model.apply({"params": params}, *inputs, outputs={"logits", "residual_pre"})
    # transformers normalizes the last hidden state, so only the inputs of layers are compared.
    entering = np.asarray(layer_values(output, "residual_pre"))

    def loss(params: Any) -> jax.Array:
        logits = model.apply({"params": params}, *inputs).logits
        targets = jnp.asarray(draw_targets(logits.shape))[..., None]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=-1)
        return -jnp.mean(picked)

    differences = (
        difference(output.logits, reference.logits),
        difference(entering, reference.hidden[: len(entering)]),
        gradient_difference(pretrained, model, jax.grad(loss)(params), theirs),
    )
    return differences, greedy_agreement(model, params, reference)


def files_agree(folders: tuple[str, str], variant: Variant, pretrained: PretrainedConfig) -> bool:
    """Return True if two folders have the same tensors, but for those without effect."""
    head = {weight.theirs for weight in pretrained.architecture.head}

    def is_unused(name: str) -> bool:
        # Poolers of masked language models, buffers.
        ignored = any(fnmatch.fnmatchcase(name, each) for each in pretrained.family.ignored)
        return name in variant.unused or (ignored and name not in head)

    one, other = (
        {
            name: tensor.tobytes()
            for name, tensor in load_file(Path(folder) / "model.safetensors").items()
            if not is_unused(name)
        }
        for folder in folders
    )
    return one == other


def compare_model(name: str, variant: Variant) -> tuple[str, bool]:
    """Compare one model, both ways; return its line, and if it passed."""
    theirs = variant.make_model()
    reference = compute_reference(variant, theirs)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        theirs.save_pretrained(first)
        pretrained, params = read_model(first)
        differences, greedy = compare_outputs(pretrained, params, reference, theirs)
        # The length of training's examples must not replace the rows of a table of positions.
        given = {"max_position_embeddings": 128, "eos_token_id": 2, "pad_token_id": 1}
        family = pretrained.family.model_type
        write_model(second, pretrained.make_model(), params, family=family, fields=given)
        identical = files_agree((first, second), variant, pretrained)
        with torch.no_grad():
            again = logits_of(variant.open_model(second)(**variant.draw_inputs()[1])).numpy()
    reopened = difference(again, reference.logits)
    logits, hidden, gradient = differences
    line = (
        f"{name:20} {logits:8.1e} {hidden:8.1e} {gradient:8.1e} {greedy[0]:>9} {greedy[1]:>9}  "
        f"{'identical' if identical else 'DIFFERENT':14}  {reopened:.0e}"
    )
    within = max(logits, hidden) <= LOGITS and gradient <= GRADIENT
    return line, within and identical and reopened == 0 and "no" not in "".join(greedy)


def save_fixture(folder: Path, model: Any, **arrays: Any) -> None:
    """Write the files of a model beside its inputs and outputs."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "reference.npz", **arrays)


def write_model_fixtures(variants: dict[str, Variant]) -> None:
    """Write the files and outputs of some models for the tests."""
    for folder, variant in fixture_folders(FIXTURES, variants):
        model = variant.make_model()
        save_fixture(folder, model, **compute_reference(variant, model)._asdict())


def compare_models(options: Options) -> int:
    """Print the table of all families."""
    columns = f"{'logits':>8} {'hidden':>8} {'gradient':>8} {'greedy':>9} {'cached':>9}"
    head = [
        f"{versions('transformers', 'torch', 'jax')}, CPU, float32",
        f"{'model':20} {columns}  there and back  reopened",
    ]
    return compare_cases(
        options,
        VARIANTS,
        compare_model,
        head=head,
        write_fixtures=write_model_fixtures,
    )


# ---------------------------------------------------------------------------
# The text part of multimodal models
# ---------------------------------------------------------------------------


def draw_text() -> Array:
    """Return random tokens [B, T]."""
    return np.random.RandomState(0).randint(3, 51, (2, 14))


def text_logits(model: Any) -> Array:
    """Return the logits of text under a model of transformers."""
    with torch.no_grad():
        return np.asarray(model(input_ids=torch.tensor(draw_text())).logits)


def compare_text_part(name: str, variant: Variant) -> tuple[str, bool]:
    """Compare one model as read here and as exported; return its line, and if it passed."""
    theirs = variant.make_model()
    expected = text_logits(theirs)
    read = []
    for of_hub in (True, False):
        with tempfile.TemporaryDirectory() as source:
            theirs.save_pretrained(source, save_original_format=of_hub)
            read.append(read_model(source))
    imported = max(
        difference(pretrained.make_model().apply({"params": params}, draw_text()).logits, expected)
        for pretrained, params in read
    )
    pretrained, params = read[0]
    with tempfile.TemporaryDirectory() as target:
        write_model(target, pretrained.make_model(), params, family=pretrained.family.model_type)
        text_class = getattr(transformers, pretrained.architecture.name)
        reopened = text_class.from_pretrained(target, attn_implementation="eager").eval()
        exported = difference(text_logits(reopened), expected)
    line = f"{name:14} {imported:8.1e} {exported:8.1e}  {' / '.join(pretrained.notes)}"
    return line, max(imported, exported) <= LOGITS


def write_multimodal_fixtures(variants: dict[str, Variant]) -> None:
    """Write the files and outputs of some models for the tests."""
    for folder, variant in fixture_folders(MULTIMODAL_FIXTURES, variants):
        model = variant.make_model()
        save_fixture(folder, model, tokens=draw_text(), logits=text_logits(model))


def compare_multimodal(options: Options) -> int:
    """Print the table of models that also see."""
    head = [
        f"{versions('transformers', 'torch', 'jax')}, CPU, float32",
        f"{'model':14} {'logits':>8} {'exported':>8}  read as",
    ]
    return compare_cases(
        options,
        MULTIMODAL,
        compare_text_part,
        head=head,
        write_fixtures=write_multimodal_fixtures,
    )


# ---------------------------------------------------------------------------
# Defaults of the fields of config.json
# ---------------------------------------------------------------------------


def first_variants() -> dict[str, Variant]:
    """Return one model of each type, with all that differs from the defaults where possible."""
    of_types: dict[str, tuple[str, Variant]] = {}
    for name, variant in VARIANTS.items():
        of_types.setdefault(variant.config_class, (name, variant))
    return dict(of_types.values())


def expected_shapes(config: Any, variant: Variant) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights of a model, without making them."""
    with torch.device("meta"):
        model = getattr(transformers, variant.model_class)(config)
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def compare_config(
    folder: Path, variant: Variant, shapes: dict[str, tuple[int, ...]]
) -> str | float:
    """Return the difference of logits, `shapes` if those agree, or what is wrong."""
    model_class = getattr(transformers, variant.model_class)
    inputs, tensors = variant.draw_inputs()
    logits = None
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        config._attn_implementation = "eager"
        theirs = expected_shapes(config, variant)
        if theirs == shapes:
            model = model_class.from_pretrained(folder, config=config).eval()
            logits = logits_of(model(**tensors)).detach().numpy()
    except Exception as error:  # noqa: BLE001  (transformers refuses a config by any kind)
        return f"refused by transformers: {type(error).__name__}"
    try:
        if logits is not None:
            pretrained, params = read_model(folder)
            output = pretrained.make_model().apply({"params": params}, *inputs)
            return difference(output.logits, logits)
        pretrained = read_config(folder)
        ours_model = pretrained.make_model()
        rules = pretrained.family.rules(pretrained.architecture)
        leaves = model_tensors(rules, model_leaves(ours_model), ours_model.config)
    except InteropError as error:
        try:
            with torch.device("meta"):
                model_class(config)(**{name: each.to("meta") for name, each in tensors.items()})
        except Exception as theirs_too:  # noqa: BLE001
            return f"refused by transformers: {type(theirs_too).__name__}"
        return f"refused: {str(error).partition('config.json: ')[2][:100]}"
    ours = {name: tensor.shape for name, tensor in leaves.items()}
    common = ours.keys() & theirs.keys()
    wrong = [name for name in common if ours[name] != theirs[name]]
    wrong += [] if len(common) > 5 else ["few"]
    return f"wrong: {wrong[0]} {ours.get(wrong[0])} {theirs.get(wrong[0])}" if wrong else "shapes"


def compare_type(name: str, variant: Variant) -> tuple[str, bool]:
    """Leave out each field of one type; return a line of the table, and if no field failed."""
    model = variant.make_model()
    results: dict[str, str | float] = {}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        model.save_pretrained(folder)
        values = json.loads((folder / "config.json").read_text())
        known = CONFIG_FIELDS[values["model_type"]]
        shapes = expected_shapes(model.config, variant)
        for field in sorted(values.keys() & known.defaults.keys() - known.unread):
            changes: dict[str, dict[str, Any]] = {"absent": {}}
            if values[field] is not None:
                changes["null"] = {field: None}
            for kind, change in changes.items():
                changed = {key: value for key, value in values.items() if key != field} | change
                (folder / "config.json").write_text(json.dumps(changed))
                results[f"{field} {kind}"] = compare_config(folder, variant, shapes)
    differences = [each for each in results.values() if isinstance(each, float)]
    problems = [
        f"{field}: {each}"
        for field, each in results.items()
        if (isinstance(each, float) and each > LOGITS)
        or (isinstance(each, str) and each.startswith(("refused:", "wrong")))
    ]
    refused = [each for each in results.values() if "transformers" in str(each)]
    line = (
        f"{name:20} {len(differences):7} {max(differences, default=0):8.1e} "
        f"{list(results.values()).count('shapes'):7} {len(refused):7} {len(problems):8}"
    )
    # What this library refuses by name is shown, and is no wrong result.
    failures = [problem for problem in problems if ": refused" not in problem]
    return "\n".join([line, *(f"    {problem}" for problem in problems)]), not failures


def compare_defaults(options: Options) -> int:
    """Print the table of the fields of every type."""
    head = [
        f"{versions('transformers')}, each field of config.json absent, then null",
        "model                 logits  largest  shapes refused problems",
    ]
    return compare_cases(options, first_variants(), compare_type, head=head)
