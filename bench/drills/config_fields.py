"""Compare the table of the fields of config.json with what `transformers` reads.

    python -m bench config_fields [--write]

The table is `transformer/interop/config_fields.json`. It is made from the source of transformers: a
field counts as read if the modelling code of a supported class, the code that it calls for masks,
rotary positions and caches, or the configuration class itself reads it. Initial values of weights
are left out. `--write` writes the table.
"""

import ast
import dataclasses
import importlib
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from transformer.interop.families import FAMILIES
from transformer.interop.multimodal import TEXT_FAMILIES

TABLE = Path(__file__).parents[2] / "transformer" / "interop" / "config_fields.json"

UTILITIES = ("transformers.masking_utils", "transformers.modeling_rope_utils")
"""Modules whose functions read fields for the models that call them."""

OF_THE_CACHE = ("attention_chunk_size", "kv_sharing_modes", "layer_types", "sliding_window")
"""Fields that the cache of keys and values reads, whatever the model."""

OF_ALL_LAYERS = ("per_layer_config", "tie_word_embeddings")
"""Fields that the base class of all models reads."""

NOT_OF_THE_RESULT = ("_init_weights", "validate_", "to_dict")
"""Methods that read fields for the initial values of weights, for checks and for writing."""


def attribute_reads(
    tree: ast.AST, owners: tuple[str, ...]
) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the attributes that code reads of a config, and the defaults of `getattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if _name(node.value) in owners:
                yield node.attr, None
        elif isinstance(node, ast.Call) and _name(node.func) == "getattr":
            name = node.args[1]
            if _name(node.args[0]) in owners and isinstance(name, ast.Constant):
                yield str(name.value), node.args[2] if len(node.args) > 2 else None


def _name(node: ast.AST) -> str:
    """Return the last part of a dotted name: `config` of `self.config`."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def strip_methods(tree: ast.AST) -> ast.AST:
    """Remove the methods that have no part in the result."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            node.body = [
                each
                for each in node.body
                if not getattr(each, "name", "").startswith(NOT_OF_THE_RESULT)
            ] or [ast.Pass()]
    return tree


def definitions(module: Any) -> dict[str, ast.AST]:
    """Return the classes, functions and tables of a module by name."""
    tree = strip_methods(ast.parse(inspect.getsource(module)))
    found: dict[str, ast.AST] = {}
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {_name(target): node for target in node.targets}
    return found


def reachable(start: list[str], known: Mapping[str, ast.AST]) -> list[ast.AST]:
    """Return the definitions that some names need, directly or not."""
    waiting, done = list(start), dict[str, ast.AST]()
    while waiting:
        name = waiting.pop()
        if name in known and name not in done:
            done[name] = known[name]
            waiting += [each.id for each in ast.walk(known[name]) if isinstance(each, ast.Name)]
    return list(done.values())


def class_tree(cls: Any) -> ast.AST:
    """Return the source of a class, without the methods that have no part in the result."""
    return strip_methods(ast.parse(textwrap.dedent(inspect.getsource(cls))))


def keyword_reads(config_class: Any) -> dict[str, Any]:
    """Return the older fields that a configuration takes from its keyword arguments."""
    trees = [class_tree(config_class)]
    if hasattr(config_class, "rope_parameters"):
        own = "convert_rope_params_to_dict" in vars(config_class)
        trees = trees if own else [class_tree(RotaryEmbeddingConfigMixin), *trees]
    found: dict[str, Any] = {}
    for function in (node for tree in trees for node in ast.walk(tree)):
        if not isinstance(function, ast.FunctionDef):
            continue
        arguments = function.args.args[len(function.args.args) - len(function.args.defaults) :]
        names = {
            argument.arg: evaluate(default, {})
            for argument, default in zip(arguments, function.args.defaults, strict=True)
        }
        for name, default in keyword_arguments(function):
            found[name] = evaluate(default, names | {"self": config_class})
    return found


def keyword_arguments(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that code takes from `kwargs`, and their defaults."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("get", "pop", "setdefault")
            and _name(node.func.value) == "kwargs"
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value), node.args[1] if len(node.args) > 1 else None


def evaluate(expression: ast.expr | None, names: dict[str, Any]) -> Any:
    """Return the value of a default, or None if it depends on other fields."""
    if expression is None:
        return None
    try:
        return eval(compile(ast.Expression(expression), "default", "eval"), names)
    except (NameError, AttributeError):
        return None


def self_reads(config_class: Any) -> set[str]:
    """Return the fields that a configuration class reads itself."""
    return {name for name, _ in attribute_reads(class_tree(config_class), ("self",))}


def declared(config_class: Any) -> dict[str, Any]:
    """Return the declared fields of a configuration with their defaults."""
    return {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(config_class)
    }


def fields_of_type(
    model_type: str, common: set[str]
) -> tuple[dict[str, Any], set[str], dict[str, str], list[str]]:
    """Return defaults, unread fields, aliases and classes of one type."""
    config_class = CONFIG_MAPPING[model_type]
    package = config_class.__module__.rpartition(".")[0]
    modeling = importlib.import_module(f"{package}.modeling_{package.rpartition('.')[2]}")
    classes = [
        name
        for name, cls in vars(modeling).items()
        if inspect.isclass(cls)
        and issubclass(cls, transformers.PreTrainedModel)
        and cls.__module__ == modeling.__name__
        and getattr(cls, "config_class", None) is config_class
        and not name.lower().endswith("pretrainedmodel")
    ]
    known: dict[str, ast.AST] = {}
    for name in UTILITIES:
        known |= definitions(importlib.import_module(name))
    known |= definitions(modeling)
    family = FAMILIES.get(model_type)
    starts = classes if family is None else [each.name for each in family.architectures]
    needed = reachable(starts, known)
    reads = [*self_reads(config_class), *keyword_reads(config_class), *OF_ALL_LAYERS]
    undeclared: dict[str, Any] = dict.fromkeys((*OF_THE_CACHE, *OF_ALL_LAYERS))
    for node in needed:
        for name, default in attribute_reads(node, ("config",)):
            reads.append(name)
            if default is not None:
                undeclared[name] = evaluate(default, {})
        if any(_name(each) == "DynamicCache" for each in ast.walk(node)):
            reads += OF_THE_CACHE
    aliases = dict(config_class.attribute_map)
    # Qwen3-MoE declares a field by its alias.
    own = {aliases.get(name, name): value for name, value in declared(config_class).items()}
    defaults = undeclared | keyword_reads(config_class) | own
    read = {aliases.get(name, name) for name in reads} & defaults.keys()
    unread = own.keys() - read - common
    return {name: defaults[name] for name in read | unread}, unread, aliases, classes


def generation_fields() -> set[str]:
    """Return the settings of generation, which a config.json of earlier versions may have."""
    return {*transformers.GenerationConfig._get_default_generation_params()}


def common_fields() -> set[str]:
    """Return the fields of every configuration, and those of generation, which it takes out."""
    popped = {
        name
        for function in ast.walk(class_tree(PreTrainedConfig))
        if getattr(function, "name", "") == "__post_init__"
        for name, _ in keyword_arguments(function)
    }
    own = {*declared(PreTrainedConfig), *popped, "model_type", "_name_or_path"}
    names = own | generation_fields()
    return names - set(OF_ALL_LAYERS)


def make_table() -> str:
    """Return the table as JSON."""
    common, generation = common_fields(), generation_fields()
    types = {}
    for model_type in (*FAMILIES, *TEXT_FAMILIES):
        defaults, unread, aliases, classes = fields_of_type(model_type, common)
        types[model_type] = {
            "defaults": defaults,
            "unread": sorted(unread),
            "aliases": aliases,
            "classes": sorted(classes),
        }
    table = {
        "transformers": transformers.__version__,
        "generation": sorted(generation),
        "common": sorted(common - generation),
        "types": types,
    }
    return json.dumps(table, indent=1, sort_keys=True) + "\n"


def drill(write: bool = False) -> int:
    """Check or write the table; return 1 if the committed one differs."""
    table = make_table()
    if write:
        TABLE.write_text(table)
        return 0
    differs = table != TABLE.read_text()
    print("the table differs" if differs else "the table is that of this version")
    return int(differs)
