"""Where a learner begins: at step 1 with the base model, or behind the newest checkpoint.

A resumed run trains the steps behind its checkpoint again, on the batches that the buffer still retains, so that it
goes the same way as a run that was never interrupted. When the buffer has lost them, or a restore of it was cut off,
the checkpoint's snapshot of the buffer is restored first.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from bapo.errors import BapoError, ConfigError, ContractError, StorageError
from learner.checkpoint import Checkpoint, complete_steps, open_checkpoint
from learner.distributed import World
from learner.loop import Learner
from learner.shared_buffer import SharedBuffer
from learner.stopping import Stopped

log = logging.getLogger(__name__)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """What `--resume` goes on from; None when the run has not saved anything yet. Raises: StorageError, ConfigError."""
    steps = complete_steps(folder)
    return open_checkpoint(folder, steps[-1]) if steps else None


def agreed_checkpoint(folder: Path, world: World) -> Checkpoint | None:
    """`newest_checkpoint` as rank 0 finds it, on every rank; the others open that one. All ranks must call it.

    Each by itself might find another: rank 0 waits for the end of an earlier learner, which saves meanwhile, and what
    is on a file server is not seen everywhere at once. Ranks that go on behind different steps train on moments of
    different steps, or wait for each other until their deadline.

    Raises: StorageError, ConfigError; on the ranks that follow Stopped when rank 0 ended instead.
    """
    if not world.leads:
        return _followed(folder, world)
    try:
        found = newest_checkpoint(folder)
    except BapoError:
        with suppress(RuntimeError):  # who is gone cannot be told, and must not hide why we end
            world.share(None)
        raise
    world.share(str(found.state.step if found else 0).encode())
    return found


def _followed(folder: Path, world: World) -> Checkpoint | None:
    answer = world.share(None)
    if answer is None:
        raise Stopped("rank 0 ended while it looked for a checkpoint")
    step = int(bytes(answer))
    try:
        return open_checkpoint(folder, step) if step else None
    except StorageError as error:
        raise StorageError(
            f"rank {world.rank} cannot go on behind step {step}, as rank 0 does: {error}. Or do the ranks see "
            "different disks?"
        ) from error


def load_state(learner: Learner, checkpoint: Checkpoint) -> None:
    """Optimizer, remembered anchors and the parts; the weights were loaded with the model."""
    checkpoint.load_optimizer(learner.policy, learner.updater.optimizer)
    checkpoint.load_memory(learner.updater.memory)
    checkpoint.load_parts(learner.updater.parts)


def resume_buffer(buffer: SharedBuffer, checkpoint: Checkpoint | None) -> None:
    """Bring the buffer to where step + 1 can begin.

    Raises: ConfigError when it cannot be brought there; StorageError when its snapshot is damaged.
    """
    step = checkpoint.state.step if checkpoint else 0
    try:
        buffer.resume(step)
    except ContractError as error:
        if checkpoint is None:
            raise ConfigError(
                f"the run has no checkpoint yet and its buffer cannot begin at step 1 again: {error}; start a new run"
            ) from error
        log.warning("the buffer cannot go on after step %d (%s): its snapshot is restored", step, error)
        _restore(buffer, checkpoint)
        buffer.resume(step)


def _restore(buffer: SharedBuffer, checkpoint: Checkpoint) -> None:
    try:
        buffer.restore(checkpoint.read_buffer())
    except ContractError as error:
        raise StorageError(f"{checkpoint.folder} is not a whole checkpoint: buffer.bin: {error}") from error


def republish(learner: Learner, checkpoint: Checkpoint) -> None:
    """Give the workers the rollout policy that they had at the checkpoint."""
    learner.publisher.publish_again(checkpoint.state.alpha_version, checkpoint.alpha_path, checkpoint.state.canary)
