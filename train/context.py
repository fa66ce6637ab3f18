"""Whether the tokens of an experiment's sequences can be spread over devices."""

from jax.sharding import Mesh

from train.data.config import TextDataConfig
from train.errors import UsageError
from train.experiment import Experiment
from train.sharding import num_shards
from transformer.attention import AttentionConfig
from transformer.hardware import Hardware
from transformer.sizes import LayerMixer


def check_context_parallelism(experiment: Experiment, mesh: Mesh, hardware: Hardware) -> None:
    """Raises UsageError, or a ValueError of the attention itself, for what cannot be spread.

    A mixer sees the tokens of its device alone: only full attention has a way to reach the others.
    """
    count, model = num_shards(mesh, "length"), experiment.model
    if count == 1:
        return
    if not isinstance(experiment.data, TextDataConfig):
        raise UsageError(
            f"mesh.context {count}: task {type(experiment.task).__name__} has sequences of several "
            "lengths; only windows of text can be spread: set it to 1"
        )
    length = experiment.data.sequence_length
    if length % (2 * count):
        raise UsageError(
            f"data.sequence_length {length}: does not divide into {2 * count} pieces, two for each "
            f"part of mesh.context {count}; give a multiple of {2 * count}"
        )
    for place, block in enumerate(model.layer_pattern):
        mixer = LayerMixer(block.mixer, model.causal)
        spread = mixer.backend_choice(
            model, length, hardware=hardware, segments=experiment.has_segments, context_shards=count
        )
        if spread is None:
            raise UsageError(
                f"mesh.context {count}: model.pattern.{place}.mixer is {block.mixer.kind}, which "
                "cannot look at tokens on other devices; set mesh.context to 1, or the mixer to "
                f"{AttentionConfig.kind}"
            )
