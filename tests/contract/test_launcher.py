"""What the launcher refuses before anything starts, what its display asks, and what it tells its children of GPUs."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo.config.load import dump_toml
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.auth.api_tokens import TOKEN, TOKEN_FILE, FileToken, Keyring, Role
from bapo.runtime.auth.token_store import TokenSet
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher.display.snapshot import Observer
from services.launcher.doctor.check_list import preflight
from services.launcher.doctor.checks import redis_answer
from services.launcher.doctor.situation import Situation
from services.launcher.gpus.plan import GpuPlan
from tests.support.buffer import new_store
from tests.support.buffer_app import serving, small_config
from tests.support.gpu_plan import specs
from tests.support.hub import MODEL, Hub
from tests.support.launcher_config import make_config
from tests.support.run_rows import make_evaluation, make_row


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_ports_of_another_run_are_one_sentence_that_names_it(tmp_path: Path, taken_port: int) -> None:
    config = make_config(tmp_path, learner={"port": taken_port, "minibatch_size": 2}, run={"root": str(tmp_path)})
    other = RunDirectory.create(Path(config.run.root) / "first", dump_toml(config))
    other.update_run(status="running", pid=os.getpid())
    with pytest.raises(
        ConfigError, match=rf"in use by run first \(pid {os.getpid()}\): stop it with bapo stop {other.path}"
    ):
        preflight(Situation(config=config))


def test_a_port_in_use_is_named_with_its_key_and_a_way_out(tmp_path: Path, taken_port: int) -> None:
    config = make_config(tmp_path, learner={"port": taken_port, "minibatch_size": 2})
    with pytest.raises(
        ConfigError, match=rf"^port {taken_port} \(learner\.port\) is in use by another program: .*--free-ports$"
    ):
        preflight(Situation(config=config))
    preflight(Situation(config=config, with_learner=False))  # `bapo up` starts no learner


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"-NOAUTH Authentication required.\r\n", None),  # a server that wants a password is a server
        (b"HTTP/1.1 400 Bad Request\r\n", 'Protocol error, got "H" as reply type byte'),
    ],
)
def test_what_answers_like_redis_is_taken_for_redis(answer: bytes, reason: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(64)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert redis_answer(f"redis://127.0.0.1:{server.getsockname()[1]}") == reason
        thread.join()


# -- what the display asks


def test_the_observer_reads_records_and_survives_services_that_do_not_answer(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    observer = Observer(Config(), run)
    observer.watch(buffer_url="http://127.0.0.1:9", rollout_url="http://127.0.0.1:9")
    assert (observer.poll().step, observer.poll().left_s) == (0, None)
    run.append_metrics(make_row(1))
    run.append_evaluation(make_evaluation("cd34", 1, 0.5, rewards={"p": [1.0]}))
    snapshot = observer.poll()
    assert (snapshot.step, snapshot.status, snapshot.workers) == (1, None, ())


def test_the_observer_goes_on_with_the_token_that_took_the_place_of_its_own(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an answer nothing seems to move, which ends a run where `stall_ends_run` is set."""
    for name in (TOKEN, TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("services.launcher.display.snapshot.SERVICE_EVERY_S", 0.0)
    monkeypatch.setattr("bapo.runtime.auth.api_tokens.RELOAD_S", 0.0)
    run, made = RunDirectory.create(tmp_path / "run"), TokenSet(tmp_path / "run" / "tokens")
    made.create()
    observer = Observer(Config(), run)
    with serving(new_store(redis_url), small_config(), Keyring(path=made.accepted_path)) as client:
        observer.watch(buffer_url=client.url)
        assert (observer.poll().silence, observer.poll().is_denied) == ("", False)
        made.rotate(Role.OPERATOR)
        made.retire(Role.OPERATOR)
        assert observer.poll().silence == ""


def test_the_observer_says_that_its_token_is_refused(redis_url: str, tmp_path: Path) -> None:
    run, ours, theirs = (RunDirectory.create(tmp_path / "run"), *(TokenSet(tmp_path / name) for name in ("a", "b")))
    for tokens in (ours, theirs):
        tokens.create()
    observer = Observer(Config(), run, FileToken(ours.path_of(Role.OPERATOR)))
    with serving(new_store(redis_url), small_config(), Keyring(path=theirs.accepted_path)) as client:
        observer.watch(buffer_url=client.url)
        snapshot = observer.poll()
    assert snapshot.is_denied
    assert "invalid token" in snapshot.silence


# -- GPUs


def test_ranks_see_the_learners_gpus_and_the_rollout_server_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = GpuPlan(visible=("4", "5", "6", "7"), learner=(0, 1), workers=(2, 3))
    assert specs(tmp_path, monkeypatch, gpus, ranks=2) == {
        "rollout_server": "6,7",
        "learner": "4,5",
        "learner-1": "4,5",
        "scheduler": "4,5,6,7",
        "evaluator": "4,5,6,7",
    }


# -- models of the Hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_nothing_is_fetched_while_something_else_is_wrong(cache: Path, tmp_path: Path) -> None:
    hub = Hub(cache, offers=["config.json", "model.safetensors"])
    config = make_config(tmp_path, model={"path": MODEL}, buffer={"port": 0, "redis_url": "redis://127.0.0.1:1/0"})
    with pytest.raises(Exception, match="does not respond"):
        preflight(Situation(config=config), download=hub.download)
    assert hub.asked == []
