"""The hardware at hand, as a value for the model."""

import os
from typing import Any

import jax

from train.data.cache import user_cache_folder
from train.errors import UserError
from train.runtime.xla_flags import guess_platform, set_overlap_flags
from transformer.hardware import Hardware, Platform

PLATFORM_NAMES: dict[str, Platform] = {
    "cpu": "cpu",
    "tpu": "tpu",
    "gpu": "gpu",
    "cuda": "gpu",
    "rocm": "gpu",
}


def local_hardware() -> Hardware:
    """What this process and those beside it run on. Raises UserError if JAX has no device."""
    set_overlap_flags(guess_platform())
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        why = " ".join(str(error).split())
        remedy = "unset JAX_PLATFORMS or set it to a platform that is here"
        if "in use" in why:
            remedy = "end the process that holds it, or wait for it"
        raise UserError(
            f"devices: JAX has none ({why}); {remedy}, and see python -m train doctor"
        ) from error
    platform = PLATFORM_NAMES.get(device.platform, "cpu")
    capability = getattr(device, "compute_capability", "")
    return Hardware(platform, device.device_kind, jax.device_count(), str(capability))


def enable_compilation_cache() -> None:
    """Keeps compiled programs on disk: a run that is started again need not compile again.

    JAX_COMPILATION_CACHE_DIR says where, as does JAX's own setting; the variable set to nothing
    forbids it.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or _setting("jax_compilation_cache_dir"):
        return
    jax.config.update("jax_compilation_cache_dir", str(user_cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def _setting(name: str) -> Any:
    """One of JAX's own settings, by a name that its types do not tell of."""
    return getattr(jax.config, name)
