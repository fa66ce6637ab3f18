"""The local hardware as a value, and the compilation cache."""

import os

import jax

from train.errors import UserError, short_reason
from train.files import user_cache_folder
from train.runtime.xla_flags import guess_platform, set_overlap_flags
from transformer.hardware import Hardware, Platform

PLATFORMS: dict[str, Platform] = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}
"""The platforms that this package distinguishes, by JAX's names. All others count as a CPU."""


def local_hardware() -> Hardware:
    """Return the hardware of this process and its peers, and start the backend.

    Raises:
      UserError: JAX has no device.
    """
    set_overlap_flags(guess_platform())
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        raise UserError(
            f"devices: JAX has none ({short_reason(error)}); unset JAX_PLATFORMS or set it to a "
            "platform that is here, end a process that holds the devices, and see python -m train "
            "doctor"
        ) from error
    platform = PLATFORMS.get(device.platform, "cpu")
    capability = getattr(device, "compute_capability", "")
    return Hardware(platform, device.device_kind, jax.device_count(), str(capability))


def enable_compilation_cache() -> None:
    """Keep compiled programs on disk, so that a restarted run does not compile again.

    Leaves JAX's own setting alone if there is one: JAX_COMPILATION_CACHE_DIR sets the folder, and
    set to the empty string turns the cache off.
    """
    # JAX's type stubs do not list the attributes of its configuration.
    configured = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or configured:
        return
    jax.config.update("jax_compilation_cache_dir", str(user_cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
