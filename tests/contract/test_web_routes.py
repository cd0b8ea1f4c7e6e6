"""The page over HTTP: its files for everybody, its numbers for viewers, and what a browser is told not to do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from bapo.cli.app import app
from bapo.runtime.auth.api_tokens import Keyring, Role, digest
from bapo.runtime.run_directory.layout import RunDirectory
from services.dashboard.view import RunFolder
from tests.support.buffer import new_store
from tests.support.buffer_app import serving, small_config
from tests.support.dashboard_app import dashboard_app
from tests.support.factories import make_request
from tests.support.synthetic_runs import metrics_row, write_run

TOKENS = {role: f"token-of-the-{role.value}-0123" for role in (Role.VIEWER, Role.WORKER)}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return write_run(tmp_path / "mine", metrics=[metrics_row(1, x1=3), metrics_row(2, x1=1)])


@pytest.fixture
def client(run: RunDirectory) -> Iterator[TestClient]:
    with TestClient(dashboard_app(run)) as found:
        yield found


def whole_overview(client: TestClient) -> dict[str, Any]:
    """The overview when all records are read: a slow machine needs several answers."""
    while not (found := client.get("/api/v1/overview").json())["is_complete"]:
        pass
    return found  # type: ignore[no-any-return]


def test_the_page_lets_a_browser_run_nothing_that_is_not_its_own(client: TestClient) -> None:
    reply = client.get("/")
    assert reply.status_code == 200
    policy = reply.headers["content-security-policy"]
    for rule in ("default-src 'none'", "connect-src 'self'", "style-src 'self'", "require-trusted-types-for 'script'"):
        assert rule in policy
    assert "unsafe" not in policy
    assert "http" not in reply.text.replace("http://www.w3.org/2000/svg", "")


def test_every_file_that_the_page_names_is_there(client: TestClient) -> None:
    page = client.get("/").text
    imports = json.loads(re.search(r'type="importmap">(.*?)</script>', page)[1])["imports"]  # type: ignore[index]
    for address in (*imports.values(), "./app/style.css"):
        reply = client.get(f"/{address.removeprefix('./')}")
        assert reply.status_code == 200, address
        again = client.get(f"/{address.removeprefix('./')}", headers={"If-None-Match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["app/nothing.js", "app/..%2f..%2fview.py", "..%2f/view.py"])
def test_nothing_else_of_the_disk_is_served(client: TestClient, path: str) -> None:
    assert client.get(f"/{path}").status_code in (404, 422)


def test_the_configuration_and_the_end_of_a_log_are_shown(client: TestClient, run: RunDirectory) -> None:
    run.logs_path.mkdir(exist_ok=True)
    run.log_path("learner").write_text("first\n" + "x" * 70_000 + "\nlast\n")
    answer = client.get("/api/v1/files", params={"part": "learner"}).json()
    assert (answer["parts"], answer["tail"]) == (["learner"], "last\n")
    assert answer["configuration"] == run.config_path.read_text()
    assert client.get("/api/v1/files", params={"part": "../config"}).status_code == 422


def test_a_folder_leads_to_its_newest_run_and_shows_each_under_its_name(tmp_path: Path) -> None:
    for name, seconds in (("a", 1), ("b", 2)):
        write_run(tmp_path / name, metrics=[metrics_row(1)])
        os.utime(tmp_path / name / "config.toml", (seconds, seconds))
    folder = RunFolder(tmp_path, None, lambda path, _: dashboard_app(RunDirectory.open(path)))
    client = TestClient(folder)
    assert client.get("/", follow_redirects=False).headers["location"] == "/b/"
    assert client.get("/a/api/v1/overview").json()["run"]["name"] == "a"
    assert client.get("/..%2fa/").status_code == 404
    assert client.get("/nothing/").status_code == 404


def test_only_the_steps_that_a_page_has_not_seen_are_sent(client: TestClient, run: RunDirectory) -> None:
    first = whole_overview(client)
    assert (first["first"], first["steps"]["step"], first["steps"]["x1"]) == (0, [1, 2], [3, 1])
    run.append_metrics(metrics_row(3, x1=2))
    whole_overview(client)
    seen = {"since": 2, "generation": first["generation"]}
    second = client.get("/api/v1/overview", params=seen).json()
    assert (second["first"], second["steps"]["step"], second["steps"]["x1"]) == (2, [3], [2])
    assert second["generation"] == first["generation"]


def test_a_run_that_went_back_is_sent_again_from_its_beginning(client: TestClient, run: RunDirectory) -> None:
    first = whole_overview(client)
    run.truncate_after(1)
    run.append_metrics(metrics_row(2, x1=4))
    whole_overview(client)
    again = client.get("/api/v1/overview", params={"since": 2, "generation": first["generation"]}).json()
    assert again["generation"] != first["generation"]
    assert (again["first"], again["steps"]["x1"]) == (0, [3, 4])


def test_a_query_that_means_nothing_is_refused_with_its_name(client: TestClient) -> None:
    reply = client.get("/api/v1/overview", params={"since": "soon"})
    assert (reply.status_code, reply.json()["error"]) == (422, "ContractError")
    assert "since" in reply.json()["message"]


@pytest.mark.parametrize("number", [10**20, -(10**20), -1])
@pytest.mark.parametrize(
    "query",
    ["overview?since=", "overview?measured=", "overview?generation=", "prompts?offset=", "prompts?first=",
     "prompts?until=", "group?id=g&step=", "group?id=g&most="],
)  # fmt: skip
def test_no_number_of_a_query_breaks_an_answer(run: RunDirectory, query: str, number: int) -> None:
    with TestClient(dashboard_app(run), raise_server_exceptions=False) as client:
        assert client.get(f"/api/v1/{query}{number}").status_code in (200, 404, 422)


def test_the_live_numbers_are_those_of_the_buffer_now(run: RunDirectory, redis_url: str) -> None:
    with serving(new_store(redis_url), small_config()) as buffer:
        buffer.enqueue([make_request(prompt_id=name) for name in "ab"])
        buffer.claim("w", limit=1, policy_version=1)
        with TestClient(dashboard_app(run, buffer_url=buffer.url)) as client:
            found = client.get("/api/v1/live").json()["live"]
    assert (found["status"]["queued"]["fresh"], found["status"]["leased"]["fresh"]) == (1, 1)
    assert list(found["status"]["workers"]) == ["w"]


def test_where_tokens_are_on_files_are_open_and_numbers_are_not(run: RunDirectory) -> None:
    keyring = Keyring(",".join(f"{role}:{digest(token)}" for role, token in TOKENS.items()))
    with TestClient(dashboard_app(run, keyring)) as client:
        assert client.get("/").status_code == 200
        assert client.get("/app/main.js").status_code == 200
        assert client.post("/").status_code == 401
        assert client.get("/api/v1/overview").status_code == 401
        for role, status in ((Role.VIEWER, 200), (Role.WORKER, 403)):
            headers = {"Authorization": f"Bearer {TOKENS[role]}"}
            assert client.get("/api/v1/overview", headers=headers).status_code == status


def test_a_report_is_the_page_in_the_run_directory_and_of_nothing_there_is_none(
    run: RunDirectory, tmp_path: Path
) -> None:
    assert CliRunner().invoke(app, ["report", str(run.path)]).exit_code == 0
    assert "importmap" in run.report_path.read_text(encoding="utf-8")
    empty = RunDirectory.create(tmp_path / "empty", run.config_path.read_text())
    assert CliRunner().invoke(app, ["report", str(empty.path)]).exit_code == 2
    assert not empty.report_path.exists()
