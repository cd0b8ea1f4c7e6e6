"""One rank of the learner: its parts put together, and run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from transformers.utils.logging import disable_progress_bar

from bapo.addresses import buffer_url, fleet_url
from bapo.clients import BufferClient
from bapo.config.tree import Config
from bapo.errors import ContractError, RankLostError
from bapo.fleet_client import FleetClient
from bapo.metrics.metric import Process
from bapo.process import Flags
from bapo.records import RunDirectory
from bapo.telemetry import Telemetry, serve_health
from learner.alarm import QuietLog
from learner.alone import alone
from learner.checkpoint import Checkpoint, CheckpointWriter
from learner.critic import load_critic
from learner.distributed import World, join, leave, lost_rank, pick_device
from learner.embeddings import make_embeddings
from learner.gauges import show_checkpoint, show_run
from learner.local_ranks import ASKED
from learner.loop import Learner
from learner.memory import out_of_memory
from learner.policy import load_policy
from learner.prompts_seen import PromptsSeen
from learner.protocols import Buffer, Fleet
from learner.resume import agreed_checkpoint, load_state, republish, resume_buffer
from learner.shared_buffer import SharedBuffer
from learner.stopping import StopFlag, Stopped
from learner.token_records import TokenRecorder
from learner.update import Updater
from learner.weights import WeightPublisher

log = logging.getLogger("learner")

RANKS_SLACK_S = 300.0
"""Longer than rank 0 needs for anything but its waits for others: loading, saving, restoring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Whom rank 0 talks to."""

    buffer: Buffer
    fleet: Fleet


def train(flags: Flags) -> None:
    """Put the parts together and run the loop. Raises: BapoError."""
    config = flags.config
    flags.extra.resume = flags.extra.resume or flags.extra.restart
    disable_progress_bar()
    torch.set_num_threads(config.learner.num_threads)
    stop = StopFlag()
    stop.install()
    world = join(config.learner.num_ranks, pick_device(config.learner.device), longest_silence_s(config))
    finished = False
    try:
        with _as_only_learner(flags, world, stop):
            _run(flags, world, stop)
        finished = True
    except Stopped as reason:
        _end_as_asked(flags, str(reason))
    except RuntimeError as error:
        told = out_of_memory(error, config.learner, rank=world.rank, device=world.device)
        told = told or lost_rank(error, world.rank)
        if told is None:
            raise
        if not (stop.asked and isinstance(told, RankLostError)):
            raise told from error
        _end_as_asked(flags, "asked to end, and another rank has ended before")
    finally:
        leave(world, together=finished)


def _end_as_asked(flags: Flags, reason: str) -> None:
    log.info("ended: %s; go on with --resume", reason)
    if flags.extra.restart:
        sys.exit(ASKED)


def longest_silence_s(config: Config) -> float:
    """For so long rank 0 may keep the others waiting in seconds, and no setting is exceeded.

    At the start it waits for the buffer, on a resume once more behind a restore, and for the first worker, and then it
    publishes; later for a batch or an update of the weights.
    """
    rollout = config.rollout
    return max(config.learner.batch_timeout_s, 3 * rollout.start_timeout_s) + rollout.sync_timeout_s + RANKS_SLACK_S


@contextmanager
def _as_only_learner(flags: Flags, world: World, stop: StopFlag) -> Iterator[None]:
    """Rank 0 stands for all."""
    with ExitStack() as held:
        if world.leads:
            with stop.waiting():
                held.enter_context(alone(flags.run.path))
        yield


def _run(flags: Flags, world: World, stop: StopFlag) -> None:
    telemetry = Telemetry(Process.LEARNER, run=flags.config.run.name)
    ready = [False]
    if world.leads:
        config = flags.config
        port = serve_health(telemetry, config.learner.port, lambda: ready[0], tokens=config.security.tokens)
        flags.run.write_port("learner", port)
        make_embeddings(config, flags.run)
        show_run(telemetry, config, flags.run.path)
    checkpoint = agreed_checkpoint(flags.run.path / "checkpoints", world) if flags.extra.resume else None
    peers = _peers(flags) if world.leads else None
    learner = make_learner(flags, world, stop, telemetry, peers, checkpoint)
    show_checkpoint(telemetry, flags.run.path / "checkpoints", learner.checkpoints.newest)
    if flags.extra.resume:
        _resume(flags, learner, peers, checkpoint)
    # On a resume the scheduler starts behind this: work that is asked for before the buffer is brought back is lost.
    ready[0] = True
    if peers:
        with stop.waiting():
            peers.buffer.wait_ready(flags.config.rollout.start_timeout_s)
            peers.fleet.wait_ready(flags.config.rollout.start_timeout_s)
    if checkpoint:
        republish(learner, checkpoint)
    try:
        learner.run(checkpoint.state.step + 1 if checkpoint else 1)
    finally:
        if learner.token_records is not None:
            learner.token_records.close()
    log.info("finished %d steps", flags.config.run.num_steps)


def make_learner(
    flags: Flags,
    world: World,
    stop: StopFlag,
    telemetry: Telemetry,
    peers: Peers | None,
    checkpoint: Checkpoint | None,
) -> Learner:
    """All parts, with the weights of the base model or of the checkpoint; `peers` on rank 0 only."""
    config, run_path = flags.config, flags.run.path
    policy = load_policy(checkpoint.model_path if checkpoint else config.model.path, config, world)
    reference = load_policy(config.model.path, config, world, frozen=True) if config.loss.needs_reference else None
    critic = load_critic(config, world) if config.loss.advantage == "gae" else None
    return Learner(
        config=config,
        world=world,
        policy=policy,
        updater=Updater(
            config=config,
            policy=policy,
            reference=reference,
            world=world,
            stop=stop,
            run_path=run_path,
            critic=critic,
        ),
        publisher=WeightPublisher(
            config=config,
            policy=policy,
            world=world,
            folder=flags.run.weights_path,
            fleet=peers.fleet if peers else None,
            rollback=flags.extra.resume,
        ),
        checkpoints=CheckpointWriter(config=config, folder=run_path / "checkpoints", world=world),
        buffer=SharedBuffer(peers.buffer if peers else None, world, stop),
        records=flags.run,
        telemetry=telemetry,
        stop=stop,
        alarms=QuietLog(config.diagnostics.quiet_steps),
        token_records=TokenRecorder(config, flags.run.token_files, peers.buffer.untrained) if peers else None,
        prompts=PromptsSeen(telemetry),
    )


def _peers(flags: Flags) -> Peers:
    return Peers(
        buffer=BufferClient(flags.extra.buffer_url or buffer_url(flags.config, flags.run)),
        fleet=FleetClient(flags.extra.fleet_url or fleet_url(flags.config, flags.run)),
    )


def _look_again(run: RunDirectory, prompts: PromptsSeen) -> None:
    """Bring a gauge to where it was; a record that is lost must not keep the run from going on."""
    for step in run.group_steps():
        try:
            for _, fates in run.read_groups([step]):
                prompts.look(fates, is_new=False)
        except ContractError as error:
            log.warning("prompts that only step %d saw are not counted: %s", step, error)


def _resume(flags: Flags, learner: Learner, peers: Peers | None, checkpoint: Checkpoint | None) -> None:
    """Buffer, records and optimizer as they were at the checkpoint, or at the beginning."""
    if peers:
        with learner.stop.waiting():
            peers.buffer.wait_ready(flags.config.rollout.start_timeout_s)
        resume_buffer(learner.buffer, checkpoint)
        # An evaluator that runs is the writer of its file, and the steps are trained again to the same weights.
        step = checkpoint.state.step if checkpoint else 0
        flags.run.truncate_after(step, keep_evaluations=flags.extra.restart)
        _look_again(flags.run, learner.prompts)
    if checkpoint is not None:
        load_state(learner, checkpoint)
        log.info("resumes after step %d with rollout policy %d", checkpoint.state.step, checkpoint.state.alpha_version)
