"""`bapo buffer import` that is refused: why, and nothing waits for what it had asked for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import urllib3
from typer.testing import CliRunner, Result

from bapo.buffer_admin import BufferAdmin
from bapo.cli import app
from bapo.clients import BufferClient
from bapo.errors import BapoError, ContractError, FullError, UnavailableError
from bapo.group_files import GroupWriter
from bapo.types import Group, Progress, Purpose
from bapo.wire import pack_group
from tests.buffer_app import serving, small_config
from tests.buffer_setup import STORES, answer, new_store
from tests.buffer_setup import PuttingMemoryStore as MemoryStore
from tests.factories import make_request

# B = 4; each step has its own groups: batch 1 waits for every fresh request that is open for it.
CONFIG = small_config(run={"name": "taken-in"}, cadence={"slack": 0})
NOBODY = {"reevaluate": 0, "evaluate": 0, "fresh": 0}


@pytest.fixture(params=STORES)
def client(request: pytest.FixtureRequest) -> Iterator[BufferClient]:
    """A fresh service."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    with serving(new_store(request.param, url, run="taken-in", in_step_order=True), CONFIG) as client:
        yield client


def group(name: str, *, version: int = 1, worker_id: str = "w", purpose: Purpose = Purpose.FRESH) -> Group:
    label = "cd@1" if purpose is Purpose.EVALUATE else ""
    return answer(make_request(prompt_id=name, purpose=purpose, label=label), "11100000", version, worker_id)


def file_of(folder: Path, *groups: Group, places: tuple[str, ...] = ("fresh",)) -> str:
    path = folder / "x.parquet"
    with GroupWriter(path) as writer:
        writer.write(groups, [places] * len(groups))
    return str(path)


def call(client: BufferClient, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["buffer", *arguments, "--url", client.url])


def refusal(client: BufferClient, *arguments: str) -> str:
    error = call(client, *arguments).exception
    assert isinstance(error, BapoError), error
    return str(error)


def assert_nobody_is_waited_for(client: BufferClient) -> None:
    status = client.status()
    assert (status.queued, status.leased) == (NOBODY, NOBODY)
    assert BufferAdmin(client.url).verify().violations == []


@pytest.mark.parametrize("how", [("--as-fresh",), ()])
def test_groups_of_versions_that_the_learner_has_not_published_are_refused_before_anything_is_asked_for(
    client: BufferClient, tmp_path: Path, how: tuple[str, ...]
) -> None:
    groups = [group("a"), group("b", version=10), group("c", version=12), group("d", version=12)]
    file = file_of(tmp_path, *groups)
    said = refusal(client, "import", file, *how)
    assert said.startswith(
        f"row 3 of {file} was sampled with policy version 12, but the learner has published 1 at most; "
        "nothing was asked for"
    )
    for way_out in ("into the run that made the file", "bapo buffer restore", "BufferClient.report_progress"):
        assert way_out in said
    assert (client.status().cursor, BufferAdmin(client.url).held().items) == (0, [])
    assert_nobody_is_waited_for(client)
    client.report_progress(Progress(step=12, policy_version=12))
    assert call(client, "import", file, *how).stdout == "4 stored\n"
    assert len(client.batch(1, timeout_s=60).entries) == 4


def test_a_version_counts_by_the_newest_token_of_a_row(client: BufferClient, tmp_path: Path) -> None:
    """A response that two versions sampled: 1 began it, 2 ended it."""
    started = group("a")
    versions = started.versions.copy()
    versions[3, 1] = 2
    file = file_of(tmp_path, replace(started, versions=versions))
    assert "policy version 2, but the learner has published 1" in refusal(client, "import", file)


def test_fresh_rows_that_the_next_batch_would_drop_as_too_old_are_refused(client: BufferClient, tmp_path: Path) -> None:
    """v = 5, slack = 0: a step takes groups that were sampled at most 4 steps before. Row 2 is planned for step 6."""
    first, second = group("a"), replace(group("b"), step=6)
    file = file_of(tmp_path, first, second)
    said = refusal(client, "import", file)
    assert said.startswith(f"row 2 of {file} was sampled with policy version 1, and step 6 takes none below 2 ")
    assert "Nothing was asked for; leave such rows out" in said
    assert BufferAdmin(client.url).held().items == []
    assert_nobody_is_waited_for(client)
    # Made fresh groups of the next step, which is the first, they are young enough.
    assert call(client, "import", file, "--as-fresh").stdout == "2 stored\n"


def test_the_version_of_a_row_that_is_left_out_does_not_matter(client: BufferClient, tmp_path: Path) -> None:
    file = file_of(tmp_path, group("a", version=12), places=("batch 11",))
    assert call(client, "import", file).stdout.startswith("nothing to store; 1 left out")
    assert "row 1 of" in refusal(client, "import", file, "--as-fresh")


def test_two_rows_of_one_id_and_other_contents_are_refused_before_anything_is_asked_for(
    client: BufferClient, tmp_path: Path
) -> None:
    """Of two workers: the buffer would take the second one for an answer that came too late, a duplicate."""
    one, other = group("a"), replace(group("b"), group_id=group("a").group_id, worker_id="other")
    file = file_of(tmp_path, one, other)
    said = refusal(client, "import", file)
    assert said.startswith(f"row 2 of {file} has the group_id of row 1 ({one.group_id}) and another content; ")
    assert BufferAdmin(client.url).held().items == []
    assert_nobody_is_waited_for(client)
    assert call(client, "import", file_of(tmp_path, one, one)).stdout == "1 duplicate, 1 stored\n"


@pytest.mark.parametrize("purpose", [Purpose.FRESH, Purpose.EVALUATE])
def test_the_request_of_a_row_that_the_buffer_refuses_is_withdrawn(
    client: BufferClient, tmp_path: Path, purpose: Purpose
) -> None:
    """The name of a worker is checked when a group is pushed, and not when it is asked for."""
    groups = [group("a"), group("b", worker_id="two words", purpose=purpose), group("c")]
    file = file_of(tmp_path, *groups)
    said = refusal(client, "import", file)
    assert f"the buffer refuses row 2 of {file} (group g-b), 1 rows before it are stored: " in said
    assert "worker id 'two words' is not a plain name. Its request is withdrawn" in said
    assert [item["group_id"] for item in BufferAdmin(client.url).held().items] == ["g-a"]
    assert BufferAdmin(client.url).counters()["dropped_requests:by_hand"] == 1
    assert_nobody_is_waited_for(client)
    mended = replace(groups[1], group_id="g-b2", worker_id="w")
    assert call(client, "import", file_of(tmp_path, groups[0], mended, groups[2])).stdout == "1 duplicate, 2 stored\n"
    assert_nobody_is_waited_for(client)


def test_ctrl_c_ends_an_import_between_two_rows_and_the_same_import_goes_on(
    client: BufferClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(tmp_path, *map(group, "abcd"))
    push = BufferClient.push

    def interrupted_at_b(self: BufferClient, frames: Sequence[bytes]) -> Mapping[str, str]:
        if b"g-b" in frames[0]:
            os.kill(os.getpid(), signal.SIGINT)
        return push(self, frames)

    monkeypatch.setattr(BufferClient, "push", interrupted_at_b)
    before = signal.getsignal(signal.SIGINT)
    found = call(client, "import", file)
    assert found.exit_code == 130
    assert found.stderr == "stopped before row 3, 2 rows are stored; the same import goes on\n"
    assert client.status().fresh_ready == 2
    assert_nobody_is_waited_for(client)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before
    assert call(client, "import", file).stdout == "2 duplicate, 2 stored\n"


def test_an_import_that_loses_the_buffer_names_its_row_and_what_to_do(
    client: BufferClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(tmp_path, *map(group, "abcd"))
    push = BufferClient.push

    def gone_at_b(self: BufferClient, frames: Sequence[bytes]) -> Mapping[str, str]:
        if b"g-b" in frames[0]:
            raise UnavailableError("cannot reach it")
        return push(self, frames)

    monkeypatch.setattr(BufferClient, "push", gone_at_b)
    said = refusal(client, "import", file)
    assert (
        f"the import ended at row 2 of {file} (group g-b), 1 rows before it are stored; import the file again" in said
    )
    assert client.status().queued["fresh"] == 1, "as the message says"
    monkeypatch.undo()
    assert call(client, "import", file).stdout == "1 duplicate, 3 stored\n"
    assert_nobody_is_waited_for(client)


def test_a_batch_comes_after_a_refused_import(client: BufferClient, tmp_path: Path) -> None:
    refusal(client, "import", file_of(tmp_path, group("a", worker_id="two words")), "--as-fresh")
    client.enqueue([make_request(prompt_id=name) for name in "bcde"])
    client.push([pack_group(group(name)) for name in "bcde"])
    assert len(client.batch(1, timeout_s=60).entries) == 4


def test_a_request_that_somebody_else_asked_for_stays_open(client: BufferClient, tmp_path: Path) -> None:
    client.enqueue([make_request(prompt_id="other", request_id="g-a")])
    said = refusal(client, "import", file_of(tmp_path, group("a")))
    assert "refuses row 1 of" in said
    assert "withdrawn" not in said
    assert client.status().queued["fresh"] == 1


def test_a_second_content_of_one_id_is_refused_and_the_first_one_stays(client: BufferClient, tmp_path: Path) -> None:
    other = replace(group("a"), token_ids=group("a").token_ids + 1)
    assert call(client, "import", file_of(tmp_path, group("a"))).stdout == "1 stored\n"
    said = refusal(client, "import", file_of(tmp_path, other))
    assert "row 1" in said
    assert "stored with another content" in said
    assert client.status().fresh_ready == 1
    assert_nobody_is_waited_for(client)


def test_what_a_full_buffer_refuses_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo.commands.buffer_where.RETRY_S", 0.0)
    file = file_of(tmp_path, *map(group, "abcdef"))
    config = small_config(run={"name": "full"}, buffer={"max_fresh_groups": 4})
    with serving(MemoryStore("full", lease_s=60, max_attempts=3), config) as full:
        error = call(full, "import", file).exception
        assert isinstance(error, FullError)
        assert "refuses row 5 of" in str(error)
        assert "4 rows before it are stored: " in str(error)
        assert "4 fresh groups wait, buffer.max_fresh_groups = 4" in str(error)
        assert_nobody_is_waited_for(full)
        # Another sender was faster than this one, behind its question for room.
        monkeypatch.setattr(BufferAdmin, "require_room", lambda _: None)
        error = call(full, "import", file_of(tmp_path, group("z"))).exception
        assert isinstance(error, FullError)
        assert "Its request is withdrawn" in str(error)
        assert_nobody_is_waited_for(full)
        full.batch(1, timeout_s=60)
        assert call(full, "import", file_of(tmp_path, group("e"), group("f"))).stdout == "2 stored\n"


def test_a_batch_comes_at_once_when_the_request_that_it_waits_for_is_dropped(
    client: BufferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer_service.waiting.POLL_S", 60.0)
    client.enqueue([make_request(prompt_id=name) for name in "abcde"])
    client.push([pack_group(group(name)) for name in "abcd"])
    first = urllib3.request("POST", f"{client.url}/batches/1", retries=False)
    assert first.status == 202
    assert first.json()["reason"] == "1 fresh groups of steps up to 1 are open, 0 leased, 1 queued"
    took: list[tuple[int, float]] = []

    def wait() -> None:
        began = time.monotonic()
        reply = urllib3.request("POST", f"{client.url}/batches/1?wait_s=50", retries=False, timeout=120)
        took.append((reply.status, time.monotonic() - began))

    learner = threading.Thread(target=wait)
    learner.start()
    time.sleep(0.5)
    assert call(client, "drop", "request", "g-e", "--yes").stdout == "dropped request g-e\n"
    learner.join(120)
    ((status, seconds),) = took
    assert (status, seconds < 40) == (200, True)


def test_a_drop_by_its_route_is_refused_when_nothing_is_open(client: BufferClient) -> None:
    with pytest.raises(ContractError, match="no request never is open"):
        BufferAdmin(client.url).drop_request("never")
    assert urllib3.request("DELETE", f"{client.url}/requests/never", retries=False).status == 422
