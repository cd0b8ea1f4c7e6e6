"""What scenarios start and wait for, with a session that only records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bapo.core.errors import AccessError, UnavailableError
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.messages import BufferStatus
from services.launcher import scenarios
from services.launcher.session import Session
from tests.support.buffer import STATUS
from tests.support.buffer_app import small_config


class EndedError(Exception):
    """The session is told to wait for ever."""


class FakeSession:
    """Children are ready at once; the buffer answers at the given look."""

    def __init__(self, folder: Path, *, answer: BufferStatus | None, at_look: int = 3, **buffer: Any) -> None:
        self.config = small_config(buffer=buffer)
        self.run = RunDirectory.create(folder / "run")
        self.run.write_port("buffer_service", 1)
        self.num_looks, self.said, self.started, self.resumed = 0, [""], list[str](), list[bool]()
        self.silence, self.is_denied, self._answer, self._at_look = "refused", False, answer, at_look
        self.children = SimpleNamespace(start=self._start, lines=list)
        self.display = SimpleNamespace(say=self.said.append)
        self.starter = SimpleNamespace(
            agents=list,
            env={}, buffer=lambda url: "buffer_service", fleet=lambda: "fleet", learner=self._learner,
            scheduler=lambda: "scheduler", evaluator=lambda: "evaluator", dashboard=lambda: "dashboard",
            trackers=list,
        )  # fmt: skip
        self.alongside = SimpleNamespace(enter_context=lambda context: None)

    @property
    def status(self) -> BufferStatus | None:
        return self._answer if self.num_looks >= self._at_look else None

    def watch(self, until: Callable[[], bool]) -> None:
        while not until():
            self.num_looks += 1
            if self.num_looks > 100:
                raise EndedError

    def note(self, status: str) -> None:
        self.said.append(status)

    def _start(self, spec: object) -> SimpleNamespace:
        self.started.append(str(getattr(spec, "name", spec)))
        return SimpleNamespace(ready_after_s=1.0, has_ended=True)

    def _learner(self, *, resume: bool) -> list[str]:
        self.resumed.append(resume)
        return ["learner"]


def test_the_children_are_watched_until_the_buffer_gives_its_first_answer(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, answer=replace(STATUS, assembled_step=7))
    with pytest.raises(EndedError):
        scenarios.serve_buffer(cast(Session, session))
    assert "stores step 7," in session.said[1]


def test_a_service_elsewhere_that_never_answers_is_unavailable(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, answer=None, url="http://127.0.0.1:9")
    with pytest.raises(UnavailableError):
        scenarios.first_status(cast(Session, session), 0.0)


def test_a_service_that_refuses_the_token_ends_the_start_at_once(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, answer=None, url="http://127.0.0.1:9")
    session.is_denied, session.silence = True, "invalid token"
    with pytest.raises(AccessError):
        scenarios.first_status(cast(Session, session), 60.0)
    assert session.num_looks == 0


def test_a_run_without_a_checkpoint_goes_on_with_what_its_buffer_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = FakeSession(tmp_path, answer=STATUS)
    kept = session.run.redis_path / "appendonlydir" / "appendonly.aof.1.incr.aof"
    kept.parent.mkdir(parents=True)
    kept.write_text("acknowledged groups")
    monkeypatch.setattr(scenarios, "_check_finished", lambda session, learner: None)
    scenarios.train(cast(Session, session), resume=True)
    assert kept.read_text() == "acknowledged groups"
    assert session.resumed == [True], "the learner sets the buffer back to step 1"
    assert session.started == ["redis", "buffer_service", "dashboard", "fleet", "learner", "scheduler", "evaluator"]


def test_a_tracker_that_hangs_delays_the_end_of_a_run_only_so_long_and_the_user_reads_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = FakeSession(tmp_path, answer=STATUS)
    log = SimpleNamespace(log_path="logs/tracker-wandb.log")
    hangs = SimpleNamespace(name="tracker-wandb", has_ended=False, spec=log)
    sent = SimpleNamespace(name="tracker-mlflow", has_ended=True, spec=log)
    trackers = {"tracker-wandb": hangs, "tracker-mlflow": sent}
    session.children.start = lambda spec: trackers.get(str(spec)) or session._start(spec)
    session.starter.trackers = lambda: list(trackers)
    monkeypatch.setattr(scenarios, "_check_finished", lambda session, learner: None)
    monkeypatch.setattr(scenarios, "TRACKERS_END_S", 0.0)
    scenarios.train(cast(Session, session), resume=False)
    *_, note, advice = session.said
    assert note == "finished", "trackers end when run.json says that the run has"
    assert (
        f"tracker-wandb has not sent all rows within 0 s; send the rest with: bapo track {session.run.path}" in advice
    )
