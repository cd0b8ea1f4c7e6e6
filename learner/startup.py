"""Startup of a learner rank: join the other ranks, find the starting point, create the components, run.

    start        step 1, with the base model
    --resume     after the latest checkpoint, or at step 1 if there is none

A resumed run trains the steps after its checkpoint again, on the batches that the buffer retains, so it is identical
to an uninterrupted run. If the buffer has lost them, or a restore was interrupted, the buffer snapshot of the
checkpoint is restored first.

One learner per run: two would write the same records and checkpoints and alternate the workers' weights. On one
machine the launcher ensures this; otherwise (a pod on a lost host, a second manual start) the lock here does.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from transformers.utils.logging import disable_progress_bar

from bapo.config.learner import LearnerConfig
from bapo.config.tree import Config, ModelConfig
from bapo.core.errors import (
    BapoError,
    ConfigError,
    ContractError,
    OutOfMemoryError,
    RankLostError,
    StorageError,
    UnavailableError,
)
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry, serve_health
from bapo.runtime.process import Flags
from bapo.runtime.run_directory.files import storing
from bapo.runtime.run_directory.images import ImageFiles
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.rows import ended_early
from bapo.transport.buffer_client import BufferClient
from bapo.transport.endpoints import buffer_url, rollout_url
from bapo.transport.rollout_client import RolloutClient
from learner.checkpoint import Checkpoint, CheckpointWriter, complete_steps, open_checkpoint
from learner.diagnostics.episode_report import EpisodeReport
from learner.diagnostics.gauges import PromptsSeen, show_checkpoint, show_run
from learner.diagnostics.off_policy_alarm import AlarmLog
from learner.diagnostics.response_recorder import ResponseRecorder
from learner.distributed.shared_buffer import BatchSource, SharedBuffer
from learner.distributed.spawn_ranks import ASKED
from learner.distributed.stopping import StopFlag, Stopped
from learner.distributed.world import World, join, leave, lost_rank, pick_device
from learner.export import check_export, export_last
from learner.held_out import HeldOut
from learner.loop import Learner
from learner.model.policy import load_policy
from learner.publish_weights import WeightPublisher
from learner.sft_data import SftData
from learner.update.update import Updater

log = logging.getLogger("learner")

RANKS_SLACK_S = 300.0
"""Upper bound of rank 0's own work: loading, saving, restoring."""

LOCK_FILE = ".learner.lock"
LOCK_TIMEOUT_S = 60.0
"""Wait for the exit of a killed learner, including the time a file server needs to notice it."""
LOCK_POLL_S = 0.2
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
"""Messages of CUDA, NCCL and torch's CPU allocator that have no exception class of their own."""
ADVICE_OF_TORCH = " If reserved but unallocated memory"
"""Start of the generic part of torch's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The services that rank 0 uses."""

    buffer: BatchSource
    fleet: RolloutClient | None
    """None: no worker samples with the weights."""

    def wait_ready(self, timeout_s: float) -> None:
        """Raises: DeadlineError."""
        self.buffer.wait_ready(timeout_s)
        if self.fleet is not None:
            self.fleet.wait_ready(timeout_s)


def train(flags: Flags) -> None:
    """Create the components and run the loop. Raises: BapoError."""
    config = flags.config
    flags.extra.resume = flags.extra.resume or flags.extra.restart
    disable_progress_bar()
    torch.set_num_threads(config.learner.num_threads)
    stop = StopFlag()
    stop.install()
    world = join(config.learner, pick_device(config.learner.device), longest_wait_s(config))
    finished = False
    try:
        with ExitStack() as held:
            if world.leads:  # for all ranks
                with stop.waiting():
                    held.enter_context(only_learner(flags.run.path))
            _run(flags, world, stop)
        finished = True
    except Stopped as reason:
        _end_as_asked(flags, str(reason))
    except RuntimeError as error:
        cause = out_of_memory(error, config.learner, rank=world.rank, device=world.device)
        cause = cause or lost_rank(error, world.rank, None if stop.asked else world.roll_call)
        if cause is None:
            raise
        if not (stop.asked and isinstance(cause, RankLostError)):
            raise cause from error
        _end_as_asked(flags, "asked to stop, and another rank has already exited")
    finally:
        leave(world, together=finished)


def _end_as_asked(flags: Flags, reason: str) -> None:
    log.info("stopped: %s; resume with --resume", reason)
    if flags.extra.restart:
        sys.exit(ASKED)


def longest_wait_s(config: Config) -> float:
    """How long rank 0 may keep the others waiting under the configured timeouts, in seconds.

    At startup rank 0 waits for the buffer (again after a restore) and for the first worker, and publishes; later it
    waits for a batch or a weight update.
    """
    rollout = config.rollout
    return max(config.learner.batch_timeout_s, 3 * rollout.start_timeout_s) + rollout.sync_timeout_s + RANKS_SLACK_S


def _run(flags: Flags, world: World, stop: StopFlag) -> None:
    telemetry = Telemetry(Process.LEARNER, run=flags.config.run.name)
    ready = [False]
    if world.leads:
        config = flags.config
        port = serve_health(telemetry, config.learner.port, lambda: ready[0], tokens=config.security.tokens)
        flags.run.write_port("learner", port)
        show_run(telemetry, config, flags.run.path)
    # Hosts are started apart, possibly with different flags: those of rank 0 count.
    flags.extra.resume = world.share(b"1" if flags.extra.resume else b"0") == b"1"
    checkpoint = None
    if flags.extra.resume:
        checkpoint = agreed_checkpoint(flags.run.path / "checkpoints", world, flags.config.model)
    peers = _peers(flags) if world.leads else None
    learner = make_learner(flags, world, stop, telemetry, peers)
    if world.leads and not flags.extra.resume:  # what a run has trained is not given up for it
        check_export(flags.config.model.path)
    show_checkpoint(telemetry, flags.run.path / "checkpoints", learner.checkpoints.newest)
    if flags.extra.resume:
        _resume(flags, learner, peers, checkpoint)
    # On a resume the scheduler starts after this: requests enqueued before the buffer is restored would be lost.
    ready[0] = True
    if peers:
        with stop.waiting():
            peers.wait_ready(flags.config.rollout.start_timeout_s)
    if checkpoint:
        republish(learner, checkpoint)
    try:
        learner.run(checkpoint.state.step + 1 if checkpoint else 1)
    finally:
        learner.publisher.close()
        if learner.token_records is not None:
            learner.token_records.close()
    if world.leads:
        _export(flags)
    log.info("finished after step %d", learner.checkpoints.newest)


def _export(flags: Flags) -> None:
    """The last checkpoint as a model folder."""
    newest, model = newest_checkpoint(flags.run.path / "checkpoints"), flags.config.model
    if newest is None:
        return
    export_last(newest, model, flags.run.path)
    if flags.config.sft is not None:
        merged = f"bapo export {flags.run.path} --merged"
        log.info("bapo train CONFIG --model.path %s", newest.model_path if model.lora is None else f"<{merged}>")


def make_learner(
    flags: Flags,
    world: World,
    stop: StopFlag,
    telemetry: Telemetry,
    peers: Peers | None,
    images: ImageFiles | None = None,
) -> Learner:
    """Create a learner with the weights of the base model.

    Args:
        peers: only on rank 0.
        images: those of another run directory than that of the flags.
    """
    config, run_path = flags.config, flags.run.path
    held_out = HeldOut(config, flags.run)
    policy = load_policy(config.model.path, config, world)
    return Learner(
        config=config,
        world=world,
        policy=policy,
        updater=Updater(
            config=config,
            policy=policy,
            world=world,
            stop=stop,
            run_path=run_path,
            images=(images or flags.run.images).read,
        ),
        publisher=WeightPublisher(
            config=config,
            policy=policy,
            world=world,
            folder=flags.run.weights_path,
            fleet=peers.fleet if peers else None,
            rollback=flags.extra.resume,
        ),
        checkpoints=CheckpointWriter(config=config, folder=run_path / "checkpoints", world=world, held_out=held_out),
        buffer=SharedBuffer(peers.buffer if peers else None, world, stop),
        records=flags.run,
        telemetry=telemetry,
        stop=stop,
        alarms=AlarmLog(),
        token_records=ResponseRecorder(config, flags.run.token_files, peers.buffer.untrained) if peers else None,
        prompts=PromptsSeen(telemetry),
        episodes=EpisodeReport(config.model.path),
        held_out=held_out,
    )


def _peers(flags: Flags) -> Peers:
    if flags.config.sft is not None:
        return Peers(buffer=SftData(flags.config), fleet=None)
    return Peers(
        buffer=BufferClient(flags.extra.buffer_url or buffer_url(flags.config, flags.run)),
        fleet=RolloutClient(flags.extra.rollout_url or rollout_url(flags.config, flags.run)),
    )


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint to resume from; None before the first. Raises: StorageError, ConfigError."""
    steps = complete_steps(folder)
    return open_checkpoint(folder, steps[-1]) if steps else None


def agreed_checkpoint(folder: Path, world: World, model: ModelConfig) -> Checkpoint | None:
    """`newest_checkpoint` of rank 0, opened on every rank. Collective.

    Ranks could find different ones: rank 0 waits for the exit of an earlier learner, which may still be saving, and
    file servers have propagation delays. Ranks that resume after different steps would mix optimizer states of
    different steps, or deadlock.

    Raises: StorageError, ConfigError; on ranks other than 0 Stopped if rank 0 stopped.
    """
    if not world.leads:
        return _followed(folder, world)
    try:
        found = newest_checkpoint(folder)
        if found is not None:
            found.require_adapter_of(model)
    except (BapoError, OSError):
        with suppress(RuntimeError):  # a lost rank must not hide why this one stops
            world.share(None)
        raise
    world.share(str(found.state.step if found else 0).encode())
    return found


def _followed(folder: Path, world: World) -> Checkpoint | None:
    answer = world.share(None)
    if answer is None:
        raise Stopped("rank 0 stopped while searching for a checkpoint")
    step = int(bytes(answer))
    try:
        return open_checkpoint(folder, step) if step else None
    except StorageError as error:
        raise StorageError(
            f"rank {world.rank} cannot resume after step {step}, as rank 0 does: {error}. Do all ranks use the "
            "same disk?"
        ) from error


def _count_prompts(run: RunDirectory, prompts: PromptsSeen) -> None:
    """Restore a gauge from the records; a lost record does not prevent the run from resuming."""
    for step in run.group_steps():
        try:
            for _, results in run.read_groups([step]):
                prompts.count(results, is_new=False)
        except ContractError as error:
            log.warning("prompts of step %d are not counted: %s", step, error)


def _resume(flags: Flags, learner: Learner, peers: Peers | None, checkpoint: Checkpoint | None) -> None:
    """Reset buffer, records and optimizer to the checkpoint, or to the beginning."""
    if peers:
        with learner.stop.waiting():
            peers.buffer.wait_ready(flags.config.rollout.start_timeout_s)
        resume_buffer(learner.buffer, checkpoint)
        # A running evaluator owns its file, and the steps are trained again to the same weights.
        step = checkpoint.state.step if checkpoint else 0
        flags.run.truncate_after(step, keep_evaluations=flags.extra.restart)
        _count_prompts(flags.run, learner.prompts)
        learner.ended = ended_early(flags.run.read_metrics())
    if checkpoint is not None:
        checkpoint.load(learner.updater)
        log.info("resuming after step %d with rollout policy %d", checkpoint.state.step, checkpoint.state.alpha_version)


def resume_buffer(buffer: SharedBuffer, checkpoint: Checkpoint | None) -> None:
    """Reset the buffer to the state after the checkpoint.

    Raises: ConfigError if that is not possible; StorageError if its snapshot is damaged.
    """
    step = checkpoint.state.step if checkpoint else 0
    try:
        buffer.resume(step)
    except ContractError as error:
        if checkpoint is None:
            raise ConfigError(
                f"the run has no checkpoint yet and its buffer cannot restart at step 1: {error}; start a new run"
            ) from error
        log.warning("the buffer cannot resume after step %d (%s): restoring its snapshot", step, error)
        _restore(buffer, checkpoint)
        buffer.resume(step)


def _restore(buffer: SharedBuffer, checkpoint: Checkpoint) -> None:
    try:
        buffer.restore(checkpoint.read_buffer())
    except ContractError as error:
        raise StorageError(f"checkpoint {checkpoint.folder} is incomplete: buffer.bin: {error}") from error


def republish(learner: Learner, checkpoint: Checkpoint) -> None:
    """Publish the rollout policy of the checkpoint."""
    learner.publisher.publish_again(checkpoint.state.alpha_version, checkpoint.alpha_path, checkpoint.state.canary)


@contextmanager
def only_learner(run: Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the run's lock in this block; released by the kernel on exit.

    Args:
        timeout_s: how long to wait for the exit of another learner.
    Raises: UnavailableError if it does not exit; StorageError.
    """
    path = run / LOCK_FILE
    with storing(path):
        file = path.open("a")
    with file:
        deadline = time.monotonic() + timeout_s
        if not _is_locked(file):
            log.warning("another learner is training %s: waiting up to %.0f s for it to exit", run, timeout_s)
            while not _is_locked(file):
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"another learner is still training {run} after {timeout_s:.0f} s: stop it, then start this "
                        "again"
                    )
                time.sleep(LOCK_POLL_S)
        yield


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        log.warning("this file system has no locks (%s), so a second learner is not prevented", error.strerror)
    return True


def out_of_memory(error: RuntimeError, learner: LearnerConfig, *, rank: int, device: torch.device) -> Exception | None:
    """`OutOfMemoryError` with the settings that reduce memory use; None if that was not the cause."""
    if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in OUT_OF_MEMORY):
        return None
    reason = " ".join(str(error).partition(ADVICE_OF_TORCH)[0].split()).rstrip(".")
    return OutOfMemoryError(
        f"rank {rank} of the learner on {device.type}: {reason or type(error).__name__}. Start a new run with: "
        f"{'; '.join(_advice(learner))}. If a worker shares the GPU, reduce the memory in rollout.engine_options "
        "(gpu_memory_utilization, kv_cache_memory_bytes)"
    )


def _advice(learner: LearnerConfig) -> list[str]:
    """Settings that reduce memory, cheapest first."""
    now = learner.gradient_checkpointing
    recompute = [] if now is True else [f"learner.gradient_checkpointing = true (now {str(now).lower()})"]
    kept = learner.activation_gib
    keeps = [] if kept in (0.0, "auto") else [f"a smaller learner.activation_gib (now {kept})"]
    return [
        *recompute,
        *keeps,
        f"a smaller learner.microbatch_tokens (now {learner.microbatch_tokens}), down to one prompt with its response",
        f"a smaller learner.logprob_chunk_tokens (now {learner.logprob_chunk_tokens})",
        f"more learner.num_ranks (now {learner.num_ranks}), which shard weights, gradients and moments",
    ]
