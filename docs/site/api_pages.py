"""Pages of the library's public names and modules, as directives that autodoc fills in."""

import dataclasses
import importlib
import inspect
from typing import Any, NamedTuple

from docs.site.settings_page import setting_classes


class ApiPage(NamedTuple):
    """A page of the reference."""

    title: str
    introduction: str
    names: tuple[str, ...]
    """Public names of `transformer` and `train`, or names with their module."""


API_PAGES = {
    "models": ApiPage(
        "Models",
        "Models are pure functions of (parameters, inputs). Axis letters: B batch, T query "
        "positions, S key positions, D width, V vocabulary.",
        (
            *("transformer.Model", "transformer.ModelOutput", "transformer.LanguageModel"),
            *("transformer.MaskedLanguageModel", "transformer.EncoderDecoder"),
            *("transformer.Classifier", "transformer.Tagger", "transformer.FeatureClassifier"),
            "transformer.NonAutoregressive",
            *("transformer.Precision", "transformer.Hardware", "transformer.check_params"),
            "transformer.models.explicit_sharding.with_auto_axes",
        ),
    ),
    "attention": ApiPage(
        "Attention and mixers",
        "The interface of mixers, masks as data, and softmax attention without weights. "
        "[The guide](../attention.md) compares the variants.",
        (
            *("transformer.Mixer", "transformer.MixerInputs", "transformer.MixerOutput"),
            *("transformer.Abilities", "transformer.register_mixer"),
            "transformer.attention.mixer.MIXERS",  # Sphinx reads a value's text where it is defined
            *("transformer.testing.check_mixer", "transformer.Mask", "transformer.MaskPattern"),
            "transformer.attention.masks.dense_mask",
            *("transformer.attention.attend.attend", "transformer.attention.reference.ScoreSpec"),
            "transformer.attention.cache.KVCache",
        ),
    ),
    "generation": ApiPage(
        "Generation",
        "Sampling, beam search and translation.",
        (
            "transformer.generate",
            *("transformer.log_likelihoods", "transformer.embed_sequences"),
            "transformer.generation.sampling.SamplingConfig",
            "transformer.generation.beam_search.BeamSearchConfig",
            "transformer.generation.beam_search.beam_search",
            "transformer.generation.translate.translate",
        ),
    ),
    "training": ApiPage(
        "Training",
        "Train an experiment, load a run, register parts. [Settings](settings.md) has the fields "
        "of `Experiment`.",
        (
            *("train.fit", "train.load", "train.Run", "train.Experiment", "train.UserError"),
            *("train.register_task", "train.register_dataset", "train.register_optimizer"),
            *("train.register_schedule", "train.find_experiment"),
            "train.config.experiment_files.list_experiments",
        ),
    ),
    "tools": ApiPage(
        "Inspection, Hugging Face and scaling laws",
        "Modules beside training.",
        (
            *("transformer.inspection", "transformer.attention_maps", "transformer.lora"),
            *("transformer.layers.low_rank", "transformer.layers.quantized"),
            *("transformer.quantization", "transformer.losses"),
            "transformer.interop.pretrained",
            "train.visualization.attention_view",
            *("train.sweep.queue", "train.scaling.laws"),
        ),
    ),
}
"""Pages of the reference, by file name."""


def api_page(page: ApiPage) -> str:
    """Return a page: an introduction and a directive for each name."""
    lines = [f"# {page.title}", "", page.introduction, ""]
    for name in page.names:
        found = _find(name)
        if inspect.ismodule(found):
            directive = f".. automodule:: {name}"
        elif inspect.isclass(found):
            directive = f".. autoclass:: {name}"
        elif callable(found):
            directive = f".. autofunction:: {name}"
        else:
            directive = f".. autodata:: {name}\n   :no-value:"
        lines += [f"## {name}", "", "```{eval-rst}", directive, "```", ""]
    return "\n".join(lines)


def undocumented_names() -> list[str]:
    """Return the public names that are on no page: neither here nor among the settings."""
    listed = [_find(name) for page in API_PAGES.values() for name in page.names]
    missing = []
    for package in ("transformer", "train"):
        module = importlib.import_module(package)
        for name in module.__all__:
            found = getattr(module, name)
            # A base class of settings has no fields of its own to list.
            is_base = dataclasses.is_dataclass(found) and not dataclasses.fields(found)
            is_listed = any(found is other for other in listed)
            if not is_listed and not is_base and found not in setting_classes():
                missing.append(f"{package}.{name}")
    return missing


def _find(name: str) -> Any:
    """Return the object, or the module, of a dotted name."""
    try:
        return importlib.import_module(name)
    except ImportError:
        module, _, last = name.rpartition(".")
        return getattr(importlib.import_module(module), last)
