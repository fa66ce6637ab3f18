"""Check of the variables given to `model.apply`: no weights or random keys that a model ignores.

Linen reads the weights that a model asks for and ignores all others. So a bias or a norm that the
configuration lacks would silently be left out of the result.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from transformer.config import TransformerConfig
from transformer.hardware import Hardware
from transformer.layers.stack_weights import UnstackedLayers
from transformer.model_context import unconstrained

DECLARED: set[tuple[type, TransformerConfig, Any]] = set()
"""Class and settings of a model, and a tree structure of variables without any other weights.

`init` adds what it returns, and `check_variables` what it finds right. `apply` looks it up before
it calls `check_variables`: weights from `init` are never checked, others once for each structure.
"""

MAX_NAMED = 3
"""Most weights that a message names."""

Path = tuple[str, ...]


def check_variables(model: Any, variables: Any, rngs: Any) -> None:
    """Raise ValueError for weights and random keys that a model would ignore.

    Linen ignores random keys of other names than "dropout" too, and applies no dropout then.
    """
    if not isinstance(variables, Mapping) or ("params" not in variables and variables):
        raise ValueError('variables: have no "params"; give {"params": params}')
    params = variables.get("params", {})
    check_params(params)
    if not type(model).__module__.startswith("transformer."):
        return  # a user's class may read other weights and keys
    check_rng_names(rngs)
    key = type(model), model.config, jax.tree.structure(variables)
    if key not in DECLARED:
        check_weights(model, params)
        DECLARED.add(key)


def check_params(params: Any) -> None:
    """Raise ValueError for variables in place of parameters."""
    if "params" in params:
        raise ValueError('params: are variables, {"params": ...}; give variables["params"]')


def check_rng_names(rngs: Any) -> None:
    """Raise ValueError for random keys of unknown names."""
    if rngs is None:
        return
    if not isinstance(rngs, Mapping):
        raise ValueError('rngs: is not a dict; give {"dropout": key}')
    for name in rngs:
        # `default` is what the bridge from NNX of flax 0.11 passes: all keys of `nnx.Rngs(0)`.
        if name not in ("dropout", "params", "default"):
            raise ValueError(f'rngs {name!r}: models use no such keys; give {{"dropout": key}}')


def check_weights(model: Any, params: Any) -> None:
    """Raise ValueError for weights that a model does not have; it need not have all of them."""
    given = plain_tree(params)
    key = type(model), model.config, jax.tree.structure({"params": given})
    if key in DECLARED:
        return  # the tree of `init` with weights of other classes: unstacked, or with LoRA
    declared = set(leaf_paths(declared_tree(model)))
    others = ["/".join(path) for path in leaf_paths(given) if path not in declared]
    if others:
        names = ", ".join(others[:MAX_NAMED])
        if len(others) > MAX_NAMED:
            names += f" and {len(others) - MAX_NAMED} more"
        raise ValueError(
            f"params {names}: the model has no such weights; give the parameters of this "
            "configuration, or leave them out"
        )
    DECLARED.add(key)


def declared_tree(model: Any) -> Any:
    """Return nested dicts with the weights of a model as leaves, from a trace of one repetition."""
    config, encoder = model.config, model.config.encoder
    if encoder is not None:
        encoder = dataclasses.replace(encoder, num_layers=len(encoder.layer_pattern))
    shallow = dataclasses.replace(config, num_layers=len(config.layer_pattern), encoder=encoder)
    model = model.clone(config=shallow, hardware=Hardware(), constrain=unconstrained)
    # In a thread of its own: interceptors (`nn.intercept_methods`) are local to the caller's
    # thread, and would record the arrays of this trace as those of the call.
    with ThreadPoolExecutor(max_workers=1) as thread:
        trace = thread.submit(jax.eval_shape, lambda: model.init_params(jax.random.key(0)))
        return plain_tree(trace.result())


def plain_tree(params: Any) -> Any:
    """Return parameters as nested dicts with 0 for each weight, stacked or unstacked."""
    if isinstance(params, UnstackedLayers):
        params = params.layers[0] if params.layers else {}
    if not isinstance(params, Mapping):
        return None if params is None else 0
    return {str(name): plain_tree(value) for name, value in params.items()}


def leaf_paths(tree: Any, prefix: Path = ()) -> Iterator[Path]:
    """Yield the path of each weight of a `plain_tree`."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from leaf_paths(value, (*prefix, name))
    elif tree is not None:
        yield prefix
