"""The checkpoints of a run, by Orbax: saved in the background, restored exactly or not at all."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import args, checkpoint_managers

from train import leaves
from train.errors import UserError

_STATE, _LEAVES, _EXTRA = "state", "leaves", "extra"
_UNFINISHED = ".orbax-checkpoint-tmp"  # what Orbax adds to a folder until it is whole
_PARTS = 8  # more than a save has
_REASON_LENGTH = 200


class _ThisStep:
    """Preserves the checkpoint of one step, which may become another's."""

    step: int | None = None

    def should_preserve(
        self,
        checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> Sequence[bool]:
        return [checkpoint.step == self.step for checkpoint in checkpoints]


class Restored(NamedTuple):
    """What `Checkpoints.save` was given."""

    state: Any
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints in a folder, one for each saved step.

    A save that was cut off at any moment is no checkpoint: it is not listed, and the next save
    clears it away. An older checkpoint goes only once a newer one is whole. Every process of a
    run takes part in each call.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int = 0,
        keep: int = 1,
        keep_every: int = 0,
        average: int = 1,
        asynchronous: bool = True,
        read_only: bool = False,
    ):
        """Opens the folder, which need not be there yet; nothing is written before the first save.

        Args:
          directory: Local or remote.
          every: Steps between the saves that are `due`; 0: none is.
          keep: How many of the newest are kept, at least 1.
          keep_every: Those at multiples of this many steps are kept too; 0: none.
          average: So many of the newest that were `due` are kept too.
          asynchronous: Write while training goes on.
          read_only: Only restore, and disturb no run that is saving there at the time.
        """
        if keep < 1:
            raise ValueError(f"keep {keep}: the newest is always kept")
        logging.getLogger("absl").addFilter(_not_from_orbax)
        self.directory = _absolute(directory)
        self._every, self._asynchronous = every, asynchronous
        self._saving: int | None = None
        self._best = _ThisStep()
        policies: list[checkpoint_managers.PreservationPolicy] = [
            checkpoint_managers.LatestN(keep),
            self._best,
        ]
        if keep_every:
            policies.append(checkpoint_managers.EveryNSteps(keep_every))
        if every and average > 1:
            policies.append(checkpoint_managers.EveryNSteps(every, max_to_keep=average))
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                create=False,
                read_only=read_only,
                enable_async_checkpointing=asynchronous,
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            ),
        )

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, oldest first, one being saved left out."""
        return [step for step in self._manager.all_steps() if step != self._saving]

    def latest_step(self) -> int | None:
        """The newest of `steps`."""
        return max(self.steps(), default=None)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is wanted after ``step`` steps."""
        return self._every > 0 and step % self._every == 0

    def keep_best(self, step: int) -> None:
        """From the next save on, the checkpoint of this step is kept, and of none before."""
        self._best.step = step

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Saves a state as it is now, in the background; what is being saved is waited for.

        Args:
          step: The step that the state is at; there must be no checkpoint of it.
          state: A tree of jax arrays (random keys too). It may be donated at once.
          extra: What else to keep; anything that JSON can hold.

        Raises:
          UserError: This save, or the one before, failed (a full disk, say), or there is a
            checkpoint of this step already. The older checkpoints are whole; a save can be tried
            again.
        """
        self.wait()
        arrays = leaves.named(state)
        items = {
            _STATE: args.PyTreeSave(leaves.nested(arrays)),
            _LEAVES: args.JsonSave({name: leaves.describe(each) for name, each in arrays.items()}),
            _EXTRA: args.JsonSave(json.loads(json.dumps(extra))),
        }
        with self._explained_save(step):
            self._prepare(step)
            # Whether it is due was asked before, and is no matter of Orbax.
            self._manager.save(step, args=args.Composite(**items), force=True)
            self._saving = step if self._asynchronous else None

    def wait(self) -> None:
        """Waits until what is being saved is on disk (UserError: it could not be written)."""
        if self._saving is not None:
            with self._explained_save(self._saving):
                self._manager.wait_until_finished()
            self._saving = None

    def restore(self, step: int, like: Any) -> Restored:
        """Restores the whole state of a step, bit for bit.

        Args:
          step: One of `steps`.
          like: The tree that was saved, with a `jax.ShapeDtypeStruct` for each array. Its sharding
            says where the array goes, whatever the mesh it came from; the first device if it has
            none.

        Raises:
          UserError: There is no such step, the checkpoint is of a model with other parameters,
            shapes or dtypes, or it cannot be read.
        """
        return self._restore(step, like, whole=True)

    def restore_part(self, step: int, part: str, like: Any) -> Any:
        """Restores a part of the state and leaves the rest on the disk.

        Args:
          step: One of `steps`.
          part: The name of the part: ``params``, say.
          like: The part, as in `restore`.

        Raises:
          UserError: As `restore` does.
        """
        return self._restore(step, {part: like}, whole=False).state[part]

    def extra(self, step: int) -> dict[str, Any]:
        """What else was saved with the state of a step (UserError: it cannot be read)."""
        there = self._found(step)
        with _explained_restore(there):
            restored = self._manager.restore(
                step, args=args.Composite(**{_EXTRA: args.JsonRestore()})
            )
        found: dict[str, Any] = restored[_EXTRA]
        return found

    def close(self) -> None:
        """Waits for what is being saved, and lets go of Orbax's threads."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(OSError, ValueError):  # of a save that failed: that was told
                self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(self, step: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._clear_unfinished()
        self._manager.reload()  # Orbax would replace what another process has put there
        if step in self._manager.all_steps():
            raise UserError(
                f"checkpoint {self.directory / str(step)}: is there already; "
                "let one process at a time train in a run's folder"
            )

    def _clear_unfinished(self) -> None:
        """Removes what a save has left that was killed or failed; it may fill the disk."""
        if jax.process_index() == 0:
            for folder in self.directory.glob(f"*{_UNFINISHED}*"):
                folder.rmtree()

    def _restore(self, step: int, like: Any, *, whole: bool) -> Restored:
        wanted = leaves.named(like)
        there = self._found(step)
        with _explained_restore(there):
            about = self._manager.restore(
                step,
                args=args.Composite(**{name: args.JsonRestore() for name in (_LEAVES, _EXTRA)}),
            )
            descriptions = {name: leaves.describe(leaf) for name, leaf in wanted.items()}
            if found := leaves.difference(about[_LEAVES], descriptions, whole=whole):
                raise UserError(
                    f"checkpoint {there}: is of another model ({found}); "
                    "use the settings it was trained with, or another --workdir"
                )
            arrays = self._arrays(step, wanted, whole)
        if any(leaves.describe(arrays[name]) != descriptions[name] for name in wanted):
            raise UserError(_damaged(there, "types were lost"))
        structure = jax.tree_util.tree_structure(like)
        state = jax.tree_util.tree_unflatten(structure, [arrays[name] for name in wanted])
        return Restored(state, about[_EXTRA])

    def _arrays(
        self, step: int, wanted: Mapping[str, leaves.Leaf], whole: bool
    ) -> dict[str, jax.Array]:
        placed = {name: _placed(leaf) for name, leaf in wanted.items()}
        tree = leaves.nested(placed)
        restore = args.PyTreeRestore(
            tree,
            restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
            partial_restore=not whole,
        )
        restored = self._manager.restore(step, args=args.Composite(**{_STATE: restore}))
        empty = {
            name: jnp.empty(leaf.shape, leaf.dtype, device=leaf.sharding)
            for name, leaf in placed.items()
            if not leaf.size
        }
        return leaves.flat(restored[_STATE]) | empty

    def _found(self, step: int) -> epath.Path:
        """The folder of a checkpoint (UserError: there is none)."""
        there = self.directory / str(step)
        if step not in self.steps():
            raise UserError(f"checkpoint {there}: does not exist; {self._choice()}")
        return there

    def _choice(self) -> str:
        if steps := self.steps():
            return f"there are those of steps {', '.join(map(str, steps))}"
        return "there are none in this folder"

    @contextlib.contextmanager
    def _explained_save(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self._saving = None
            self._outlast_failures()
            with contextlib.suppress(OSError):
                self._clear_unfinished()
                self._manager.reload()
            raise UserError(
                f"checkpoint {self.directory / str(step)}: could not be written ({_reason(error)});"
                " make room there or check its permissions; the checkpoints before it are whole"
            ) from error

    def _outlast_failures(self) -> None:
        """Waits until nothing of a failed save is left: each of its parts raises once."""
        for _ in range(_PARTS):
            with contextlib.suppress(OSError, ValueError):
                self._manager.wait_until_finished()
                return


@contextlib.contextmanager
def _explained_restore(there: epath.Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Orbax raises a plain Exception for an array that it cannot read.
        if type(error) is Exception or isinstance(error, OSError | ValueError | KeyError):
            raise UserError(_damaged(there, _reason(error))) from error
        raise


def _damaged(there: epath.Path, why: str) -> str:
    return f"checkpoint {there}: cannot be read ({why}); move it away to go on from the one before"


def _reason(error: Exception) -> str:
    """What is wrong, in a few words: TensorStore says it at the end of a long line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _REASON_LENGTH else f"{words[:_REASON_LENGTH]}..."


def _placed(leaf: leaves.Leaf) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _absolute(directory: str | os.PathLike[str]) -> epath.Path:
    """Orbax takes no relative path."""
    name = os.fspath(directory)
    return epath.Path(name if "://" in name else pathlib.Path(name).absolute())


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """Orbax logs each step of its way, and every failure that we raise with its whole trace."""
    return f"{os.sep}orbax{os.sep}" not in record.pathname
