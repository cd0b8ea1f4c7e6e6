"""Scenarios of the launcher: a training run, only its services, only the buffer, one evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from bapo.core.errors import AccessError, ConfigError, UnavailableError
from bapo.runtime.auth.api_tokens import Role
from bapo.runtime.run_directory.rows import last_step
from bapo.transport.endpoints import buffer_url
from bapo.transport.messages import BufferStatus
from services.launcher import embedded_redis
from services.launcher.embedded_redis import flushed
from services.launcher.processes import tokens_of
from services.launcher.session import Session
from services.launcher.supervision.child_process import Child
from services.launcher.supervision.children import all_ended, is_ready
from services.launcher.supervision.supervisor import ChildFailedError

SERVICE_TIMEOUT_S = 60.0
TRACKERS_END_S = 60.0


def train(session: Session, *, resume: bool) -> None:
    """Train from scratch or from the latest checkpoint, until the final weights are evaluated.

    Raises: ChildFailedError, InterruptedRunError, DeadlineError.
    """
    if resume and session.run.latest_checkpoint() is None:
        # Acknowledged groups are kept: the learner starts at step 1 with the retained batches.
        session.display.say("the run has no checkpoint yet: it restarts at step 1 with the groups in its buffer")
    start_buffer(session, is_new=not resume)
    _start_dashboard(session)
    trackers = _start_trackers(session)
    session.children.start(session.starter.fleet())
    _start_agents(session)
    learner = [session.children.start(spec) for spec in session.starter.learner(resume=resume)]
    if resume:
        # The learner first restores the buffer; requests enqueued before that would be lost.
        session.watch(is_ready(learner[0]))
    feeders = [session.children.start(session.starter.scheduler()), session.children.start(session.starter.evaluator())]
    session.watch(is_ready(learner[0]))
    session.note("running")
    session.watch(all_ended(learner))
    _check_finished(session, learner[0])
    session.watch(all_ended(feeders))
    _finish_trackers(session, trackers)


def serve(session: Session) -> None:
    """Everything except the learner, until the user stops it. Raises: ChildFailedError, InterruptedRunError."""
    start_buffer(session)
    _start_dashboard(session)
    _start_trackers(session)
    fleet = session.children.start(session.starter.fleet())
    _start_agents(session)
    session.children.start(session.starter.scheduler())
    session.children.start(session.starter.evaluator())
    session.watch(is_ready(fleet))
    session.note("running")
    gpus = "".join(f"{name}={value} " for name, value in session.gpus.learner_environment().items())
    session.display.say(
        f"services are up; start a learner with: {gpus}python -m learner --config {session.run.config_path} "
        f"--run-dir {session.run.path}   (stop the services with Ctrl-C)"
    )
    session.watch(lambda: False)


def serve_buffer(session: Session) -> None:
    """The buffer service and its Redis, for the training loop of another framework, until the user stops them.

    Existing data of a run with this name is served again. Raises: ChildFailedError, InterruptedRunError.
    """
    start_buffer(session, is_new=False)
    status = first_status(session)
    session.display.say(buffer_is_up(session) + _held_before(session, status))
    session.note("running")
    session.watch(lambda: False)


def first_status(session: Session, timeout_s: float = math.inf) -> BufferStatus:
    """The first status of the buffer after this start, once every child is ready. The children are supervised
    meanwhile: a Redis that crashes is restarted.

    Raises: ChildFailedError, InterruptedRunError; AccessError for a wrong token; UnavailableError after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s

    def has_answered() -> bool:
        is_up = session.status is not None and all(line.state != "starting" for line in session.children.lines())
        if session.is_denied:
            raise AccessError(f"the buffer at {buffer_url(session.config, session.run)}: {session.silence}")
        if not is_up and time.monotonic() > deadline:
            raise UnavailableError(f"the buffer has not responded for {timeout_s:.0f} s: {session.silence}")
        return is_up

    session.watch(has_answered)
    assert session.status is not None
    return session.status


def buffer_is_up(session: Session) -> str:
    """Message with the URL and data of the buffer, and how to inspect and stop it."""
    url, path, settings = buffer_url(session.config, session.run), session.run.path, session.config.buffer
    kept = f"{session.run.redis_path} (append-only file, fsync {settings.appendfsync})"
    token = f"{tokens_of(session.run).path_of(Role.OPERATOR)} (for clients: set BAPO_TOKEN_FILE to it)"
    if session.config.security.tokens == "off":
        token = f'none: security.tokens = "off", anyone who can reach {url} has full access'
    return (
        f"the buffer of run {session.config.run.name} is up at {url}\n"
        f"  API    {url}/docs\n"
        f"  token  {token}\n"
        f"  data   {'in the Redis of buffer.redis_url' if settings.redis_url else kept}\n"
        f"  stats  bapo buffer stats {path}\n"
        f"  page   bapo view {path}\n"
        f"  stop   Ctrl-C; start it again with everything it stores: bapo up buffer --run {path}"
    )


def _held_before(session: Session, status: BufferStatus) -> str:
    """Existing data under this name, so that another run's groups are not used by accident (the Redis may be shared or
    of an earlier run). Empty if there is none."""
    num_open = sum(status.queued.values()) + sum(status.leased.values())
    if not (status.assembled_step or num_open or status.num_bytes):
        return ""
    held = f"\n  stores step {status.assembled_step}, {num_open} open requests, {status.fresh_ready} fresh groups"
    if session.config.buffer.redis_url:
        held += ", under this run's name: use another name or another Redis database to start empty"
    return held


def evaluate(session: Session) -> None:
    """Evaluate the held-out splits once with the configured model."""
    start_buffer(session)
    session.children.start(session.starter.fleet())
    _start_agents(session)
    evaluator = session.children.start(session.starter.evaluator(once=True))
    session.note("running")
    session.watch(all_ended([evaluator]))


def _start_agents(session: Session) -> None:
    for spec in session.starter.agents():
        session.children.start(spec)


def start_buffer(session: Session, *, is_new: bool = True) -> None:
    """Start Redis and the buffer service, unless the config references running ones.

    Args:
        is_new: the buffer must not contain a run with this name.
    """
    settings = session.config.buffer
    if settings.url is None:
        redis_url = settings.redis_url
        if redis_url is None:
            spec, redis_url = embedded_redis.redis_spec(session.run, settings, session.starter.env)
            session.children.start(spec)
            if settings.appendfsync == "everysec":
                session.alongside.enter_context(flushed(session.run.redis_path.resolve()))
        # The service itself waits for Redis, which may have a large file to load.
        session.children.start(session.starter.buffer(redis_url))
    if is_new and (settings.url or settings.redis_url):
        _check_unused(session, first_status(session, SERVICE_TIMEOUT_S if settings.url else math.inf))


def _start_dashboard(session: Session) -> None:
    if session.config.dashboard.enabled:
        session.children.start(session.starter.dashboard())


def _start_trackers(session: Session) -> list[Child]:
    return [session.children.start(spec) for spec in session.starter.trackers()]


def _finish_trackers(session: Session, trackers: Sequence[Child]) -> None:
    """Wait for trackers to send the last rows; they exit once run.json shows the end of the run."""
    if not trackers:
        return
    session.note("finished")
    deadline, have_ended = time.monotonic() + TRACKERS_END_S, all_ended(trackers)
    session.watch(lambda: have_ended() or time.monotonic() > deadline)
    for child in trackers:
        if not child.has_ended:
            session.display.say(
                f"{child.name} has not sent all rows within {TRACKERS_END_S:.0f} s; send the rest with: bapo track "
                f"{session.run.path} --to {child.name.partition('-')[2]}   (log: {child.spec.log_path})"
            )


def _check_unused(session: Session, status: BufferStatus) -> None:
    """Check that no run with this name exists in an external Redis. Raises: ConfigError."""
    if status.cursor or status.assembled_step:
        raise ConfigError(
            f"the buffer at {buffer_url(session.config, session.run)} already has a run named "
            f"{session.config.run.name!r} (step {status.step}, {status.cursor} requests); choose another run.name, or "
            "another Redis database"
        )


def _check_finished(session: Session, learner: Child) -> None:
    """A learner that received SIGTERM also exits with 0, but the run is not finished."""
    rows = session.run.read_metrics()
    if not rows or rows[-1]["step"] < last_step(rows, session.config.run.num_steps):
        raise ChildFailedError(learner)
