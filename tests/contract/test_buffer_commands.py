"""`bapo buffer ...` against a live service: what people see, what programs get, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from bapo.cli.app import app
from bapo.config.load import dump_toml
from bapo.core.codec import pack_group
from bapo.core.errors import BapoError, ConfigError, ContractError, UnavailableError
from bapo.core.types import Purpose
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.buffer_admin import BufferAdmin
from bapo.transport.buffer_client import BufferClient
from buffer_service.store.redis.keys import Keys
from buffer_service.store.redis.store import RedisStore
from buffer_service.store.run_image import EMPTY
from tests.support.buffer import answer
from tests.support.buffer_app import serving_kind, small_config
from tests.support.factories import make_request

CONFIG = small_config(
    run={"name": "shown"}, cadence={"weight_sync_interval": 2, "reevaluation_interval": 2}, diagnostics={"texts": 0}
)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[tuple[RedisStore, BufferClient]]:
    """One service for all tests."""
    with serving_kind(request, CONFIG, run="shown") as both:
        yield both


@pytest.fixture
def client(served: tuple[RedisStore, BufferClient]) -> BufferClient:
    """Step 1 is assembled: B_bad = {a, b, c}, B_high = {d}; e is fresh, r re-evaluated, v evaluated, f leased."""
    store, client = served
    store.restore(EMPTY, ())
    fill(client, "a", "b", rewards="00000000")
    fill(client, "c", rewards="10000000")
    fill(client, "d", rewards="11000000")
    client.batch(1, timeout_s=60)
    client.commit(1, checkpointed=0)
    fill(client, "e", step=2)
    for name, fields in (("r", {"purpose": Purpose.REEVALUATE}), ("v", {"purpose": Purpose.EVALUATE, "label": "cd@1"})):
        request = make_request(prompt_id=name, step=2, **fields)
        client.enqueue([request])
        client.push([pack_group(answer(request))])
    client.enqueue([make_request(prompt_id="f")])
    client.claim("w", limit=1, policy_version=1)
    return client


def fill(client: BufferClient, *names: str, rewards: str = "11100000", step: int = 1) -> None:
    requests = [make_request(prompt_id=name, step=step) for name in names]
    client.enqueue(requests)
    client.push([pack_group(answer(request, rewards)) for request in requests])


def call(client: BufferClient, command: str, *arguments: str, answers: str | None = None) -> Result:
    """`answers`: what a person types on a terminal; None: a script calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bapo.cli.arguments.is_terminal", lambda: answers is not None)
        return CliRunner().invoke(app, ["buffer", command, client.url, *arguments], input=answers)


def as_json(client: BufferClient, command: str, *arguments: str) -> Any:
    return json.loads(call(client, command, *arguments, "--json").stdout)


def refusal(*arguments: str) -> BapoError:
    error = CliRunner().invoke(app, ["buffer", *arguments]).exception
    assert isinstance(error, BapoError), error
    return error


def held(client: BufferClient) -> dict[str, list[str]]:
    return {item["group_id"]: item["places"] for item in BufferAdmin(client.url).held().items}


def test_a_snapshot_brings_everything_back_but_evaluations(
    client: BufferClient, served: tuple[RedisStore, BufferClient], tmp_path: Path
) -> None:
    file = tmp_path / "buffer.snap"
    assert f" in {file}" in call(client, "snapshot", str(file)).stdout
    assert "exists; choose another file" in str(call(client, "snapshot", str(file)).exception)
    before, image = held(client), served[0].image()
    call(client, "drop", "run", "shown", "--yes")
    assert call(client, "restore", str(file), answers="n\n").exit_code == 1
    assert held(client) == {}
    assert "step 1, 1 fresh groups" in call(client, "restore", str(file), answers="y\n").stdout
    assert held(client) == {key: places for key, places in before.items() if key != "g-v"}
    assert served[0].image() == image
    file.write_bytes(file.read_bytes()[:-1])
    error = call(client, "restore", str(file), "--yes").exception
    assert isinstance(error, ContractError)
    assert served[0].image() == image
    assert "cannot read" in str(call(client, "restore", str(tmp_path / "none"), "--yes").exception)


def test_verify_finds_a_sound_buffer_and_names_what_is_broken(
    client: BufferClient, served: tuple[RedisStore, BufferClient]
) -> None:
    sound = call(client, "verify")
    assert (sound.exit_code, sound.stdout[:31]) == (0, "sound: 5 groups and 1 open requ")
    store = served[0]
    assert isinstance(store, RedisStore)
    store._link.client.hincrby(Keys("shown")["refs"], "g-e", 1)
    broken = call(client, "verify")
    assert broken.exit_code == 1
    assert broken.stdout == "references: group g-e is in 1 tables and batches, but its reference count is 2\n"
    assert "1 violations: 5 groups" in broken.stderr
    found = as_json(client, "verify")
    assert found["violations"][0]["invariant"] == "references"
    assert call(client, "verify", "--json").exit_code == 1


DROPS = [
    (("group", "g-e"), "dropped group g-e from fresh"),
    (("group", "g-d"), "dropped group g-d from high"),
    (("request", "g-f"), "dropped request g-f"),
    (("prompt", "a"), "dropped prompt a from B_bad"),
    (("evaluation", "cd@1"), "dropped evaluation cd@1"),
    (("run", "shown"), "dropped everything of run shown"),
]


@pytest.mark.parametrize(("what", "said"), DROPS)
def test_drop_asks_first_and_leaves_a_sound_buffer(client: BufferClient, what: tuple[str, str], said: str) -> None:
    before = client.status()
    for no in ("n\n", ""):
        asked = call(client, "drop", *what, answers=no)
        assert (asked.exit_code, "drop" in asked.stderr) == (1, True)
    assert client.status().num_bytes == before.num_bytes
    dropped = call(client, "drop", *what, answers="y\n")
    assert (dropped.exit_code, said in dropped.stdout) == (0, True)
    assert client.status() != before
    assert BufferAdmin(client.url).verify().violations == []


def test_drop_refuses_what_is_not_there_or_needed(client: BufferClient) -> None:
    for what, message in (
        (("group", "g-c"), "is part of a batch"),
        (("group", "never"), "group never is not in the buffer"),
        (("request", "g-e"), "request g-e is not open; its group is in the buffer"),
        (("request", "never"), "request never is not open; nor is there a group with that id"),
        (("prompt", "z"), "prompt z is not in B_bad"),
        (("run", "other"), "belongs to run 'shown', not 'other'"),
        (("grup", "x"), "did you mean 'group'"),
    ):
        error = call(client, "drop", *what, "--yes").exception
        assert isinstance(error, BapoError)
        assert message in str(error)


def test_an_export_has_every_group_that_is_held_and_its_places(client: BufferClient, tmp_path: Path) -> None:
    file = tmp_path / "groups.parquet"
    assert call(client, "export", str(file)).stdout == f"5 groups in {file}\n"
    places = {row["group_id"]: row["places"] for row in pq.read_table(file).to_pylist()}
    assert places == held(client)
    assert places == {"g-c": ["batch 1"], "g-d": ["high", "batch 1"], "g-e": ["fresh"], "g-r": ["reevaluated"],
                      "g-v": ["evaluation cd@1"]}  # fmt: skip


AWAY = "http://127.0.0.1:1"
COMMANDS: list[Callable[[Path], list[str]]] = [
    lambda _: ["stats", AWAY],
    lambda path: ["export", AWAY, str(path / "x.parquet")],
    lambda _: ["drop", AWAY, "group", "g", "--yes"],
    lambda _: ["verify", AWAY],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda make: make(Path())[0])
def test_a_service_that_is_away_is_one_clear_message(
    arguments: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bapo.cli.buffer.target.RETRY_S", 0.0)
    error = refusal(*arguments(tmp_path))
    assert isinstance(error, UnavailableError)
    assert "the buffer service at http://127.0.0.1:1 does not respond" in str(error)
    assert str(error).endswith("; is a buffer service running there?")
    assert list(tmp_path.iterdir()) == []


def test_a_service_whose_redis_is_away_is_not_to_be_started_once_more(
    client: BufferClient, served: tuple[RedisStore, BufferClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        raise UnavailableError("Redis at redis://r:6379 does not respond: Timeout reading from socket")

    monkeypatch.setattr("bapo.cli.buffer.target.RETRY_S", 0.0)
    monkeypatch.setattr(served[0], "status", away)
    said = str(refusal("stats", client.url))
    assert said == "Redis at redis://r:6379 does not respond: Timeout reading from socket"


def test_a_run_is_found_by_its_directory(client: BufferClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = int(client.url.rpartition(":")[2])
    run = RunDirectory.create(tmp_path / "outputs" / "shown", dump_toml(small_config(buffer={"port": 0})))
    error = refusal("stats", str(run.path))
    assert isinstance(error, UnavailableError)
    assert str(error).endswith(f"not listening yet; start the run, or only its buffer: bapo up buffer --run {run.path}")
    run.write_port("buffer_service", port)
    run.update_run(status="running")
    assert CliRunner().invoke(app, ["buffer", "verify", str(run.path)]).exit_code == 0
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["buffer", "verify"]).exit_code == 0  # the newest run


def test_an_unknown_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (("nowhere",), "nowhere is not a run directory"),
        ((), "no run in outputs"),
    ):
        error = refusal("stats", *arguments)
        assert isinstance(error, ConfigError)
        assert message in str(error)
