"""Who may do what at the two APIs, and what a request meets before anything of its body is read."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import urllib3
from fastapi import FastAPI

from bapo.core.codec import pack_group
from bapo.core.errors import AccessError, Refusal
from bapo.core.types import Purpose
from bapo.runtime.auth.api_tokens import Keyring, Role, digest
from bapo.runtime.metrics.server import Telemetry, serve_health
from bapo.runtime.run_directory.images import ImageFiles
from bapo.transport import http_guard as gate
from bapo.transport.buffer_client import BufferClient
from rollout_server.api import create_app as create_fleet_app
from rollout_server.weights.relay import WeightRelay
from tests.support.buffer import answer, new_store
from tests.support.buffer_app import served_app, serving, small_config
from tests.support.factories import make_request
from tests.support.redis_server import RedisServer

TOKENS = {role: f"token-of-the-{role.value}-0123" for role in Role}
KEYRING = Keyring(",".join(f"{role}:{digest(token)}" for role, token in TOKENS.items()))


WORKER, LEARNER, SCHEDULER = Role.WORKER, Role.LEARNER, Role.SCHEDULER


EVALUATOR, VIEWER, OPERATOR = Role.EVALUATOR, Role.VIEWER, Role.OPERATOR


@pytest.fixture(scope="module")
def url(redis_server: RedisServer) -> Iterator[str]:
    """A buffer service that asks for tokens."""
    with serving(new_store(redis_server.url, run="rights"), small_config(), KEYRING) as client:
        yield client.url


def call(url: str, method: str, path: str, role: Role | None = None, **options: Any) -> urllib3.BaseHTTPResponse:
    headers = options.pop("headers", {}) | ({"Authorization": f"Bearer {TOKENS[role]}"} if role else {})
    return urllib3.request(method, url + path, headers=headers, retries=False, timeout=60.0, **options)


ROUTES = [
    ("POST", "/requests", {SCHEDULER, EVALUATOR}),
    ("POST", "/reevaluations/4", {SCHEDULER}),
    ("POST", "/requests/claim", {WORKER}),
    ("POST", "/requests/claim/end", {WORKER}),
    ("POST", "/requests/renew", {WORKER}),
    ("POST", "/requests/fail", {WORKER}),
    ("POST", "/requests/release", {WORKER}),
    ("POST", "/requests/g/journal", {WORKER}),
    ("GET", "/requests/g/journal", {WORKER}),
    ("POST", "/groups", {WORKER}),
    ("GET", "/room", {WORKER}),
    ("GET", "/frame-access", {WORKER, LEARNER}),
    ("PUT", "/frames/" + "f" * 32, {WORKER}),
    ("GET", "/frames/g-a", {LEARNER}),
    ("GET", "/evaluations/held_out@1", {EVALUATOR}),
    ("DELETE", "/evaluations/held_out@1", {EVALUATOR}),
    ("POST", "/batches/1", {LEARNER}),
    ("POST", "/batches/1/commit", {LEARNER}),
    ("POST", "/batches/1/bad-frames", {LEARNER}),
    ("GET", "/batches/1/untrained", {LEARNER}),
    ("GET", "/progress", set(Role)),
    ("PUT", "/progress", {LEARNER}),
    ("POST", "/snapshot", {LEARNER}),
    ("POST", "/restore", {LEARNER}),
    ("POST", "/resume", {LEARNER}),
    ("GET", "/status", set(Role)),
    ("GET", "/hard-prompts", {SCHEDULER}),
    ("GET", "/success-counts", {SCHEDULER}),
    ("GET", "/selector", {SCHEDULER}),
    ("PUT", "/selector/1", {SCHEDULER}),
    ("GET", "/batches", {SCHEDULER, VIEWER}),
    ("GET", "/counters", {VIEWER}),
    ("GET", "/metrics", {VIEWER}),
    ("GET", "/verify", {VIEWER}),
    ("GET", "/groups", set()),
    ("POST", "/groups/read", set()),
    ("DELETE", "/groups/g-a", set()),
    ("DELETE", "/requests/g-a", set()),
    ("DELETE", "/bad", set()),
    ("DELETE", "/runs/none", set()),
]


@pytest.mark.parametrize(("method", "path", "able"), ROUTES, ids=[f"{method} {path}" for method, path, _ in ROUTES])
def test_each_role_may_do_its_own_work_and_no_other(url: str, method: str, path: str, able: set[Role]) -> None:
    for role in Role:
        reply = call(url, method, path, role, body=b"")
        if role in able | {OPERATOR}:
            assert reply.status not in (401, 403), (role, reply.data)
        else:
            assert (reply.status, reply.json()["error"]) == (403, "AccessError"), role
            assert f"{method} {path}: role {role} has no permission; use a token of" in reply.json()["message"]
    assert call(url, method, path, body=b"").status == 401


def test_every_route_of_the_buffer_is_tried_above(redis_url: str) -> None:
    app = served_app(new_store(redis_url), small_config())
    described = {(method, path.split("/")[1]) for method, path in described_routes(app)}
    assert described - {(method, path.split("/")[1]) for method, path, _ in ROUTES} == {
        ("GET", "healthz"), ("GET", "readyz"),
    }  # fmt: skip
    assert len(described_routes(app)) == len(ROUTES) + 2


def test_a_wrong_token_is_told_from_a_missing_one_and_neither_is_repeated(url: str) -> None:
    missing = call(url, "GET", "/status")
    assert (missing.status, missing.headers["www-authenticate"]) == (401, "Bearer")
    assert "BAPO_TOKEN_FILE" in missing.json()["message"]
    assert "RUN/tokens/<role>/token" in missing.json()["message"]
    for given in ("Bearer not-one-of-ours-0000", "Basic d29ya2VyOng=", "Bearer", "Bearer \xe9\xe9\xe9"):
        reply = call(url, "GET", "/status", headers={"Authorization": given})
        assert (reply.status, reply.json()["retry"]) == (401, False)
        assert "not-one-of-ours" not in reply.json()["message"]


def test_health_and_the_description_are_open(url: str) -> None:
    for path in ("/healthz", "/readyz", "/docs", "/openapi.json"):
        assert call(url, "GET", path).status == 200


def test_a_path_that_does_not_exist_is_not_found_and_one_that_does_is_refused_first(url: str) -> None:
    for path in ("/nowhere", "/groups/", "//groups", "/groups%2Fx/y"):
        assert call(url, "GET", path).status == 401
        assert call(url, "GET", path, WORKER).status == 404
    assert call(url, "GET", "/nowhere", OPERATOR).status == 404
    assert call(url, "HEAD", "/status", VIEWER).status == 403


def test_what_a_stranger_asks_for_cannot_write_lines_of_its_own_into_the_log(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(new_store(redis_url), small_config(), KEYRING) as client:
        assert call(client.url, "GET", "/x%0aERROR%20learner:%20forged%1b%5b2J").status == 401
    (line,) = [record.getMessage() for record in caplog.records if record.name == "bapo.transport.http_guard"]
    assert r"GET /x\nERROR learner: forged\x1b[2J requires a token" in line
    assert line.isprintable()


def test_the_clients_say_which_token_is_missing_and_do_not_try_again(url: str) -> None:
    with pytest.raises(AccessError, match="BAPO_TOKEN_FILE"):
        BufferClient(url, retry_s=60).status()
    request = make_request(prompt_id="a")
    with pytest.raises(AccessError):
        BufferClient(url, token=TOKENS[WORKER]).enqueue([request])
    BufferClient(url, token=TOKENS[SCHEDULER]).enqueue([request])
    with pytest.raises(AccessError):
        BufferClient(url, token=TOKENS[VIEWER]).push([pack_group(answer(request))])
    assert BufferClient(url, token=TOKENS[WORKER]).push([pack_group(answer(request))]) == {"g-a": "stored"}
    with pytest.raises(AccessError):
        BufferClient(url, token=TOKENS[WORKER]).batch(1, timeout_s=60)


def test_an_evaluator_asks_for_evaluations_and_for_nothing_that_is_trained(url: str) -> None:
    evaluator = BufferClient(url, token=TOKENS[EVALUATOR])
    held_out = make_request(prompt_id="held-out", purpose=Purpose.EVALUATE, label="v1")
    assert evaluator.enqueue([held_out]) == 1
    for purpose in (Purpose.FRESH, Purpose.REEVALUATE):
        trained = make_request(prompt_id=purpose.value, purpose=purpose)
        with pytest.raises(
            AccessError, match=f"g-{purpose.value} is {purpose.value}: evaluators may only request evaluat"
        ):
            evaluator.enqueue([held_out, trained])
        assert BufferClient(url, token=TOKENS[SCHEDULER]).enqueue([trained]) == 1


def test_refusals_are_counted_by_reason(url: str) -> None:
    call(url, "GET", "/status")
    text = call(url, "GET", "/metrics", VIEWER).data.decode()
    for reason in ("no_token", "wrong_token", "no_right"):
        assert f'bapo_refused_requests_total{{reason="{reason}"}}' in text


def test_nobody_is_asked_without_a_keyring(redis_url: str) -> None:
    with serving(new_store(redis_url), small_config()) as client:
        assert call(client.url, "GET", "/status").status == 200


@pytest.mark.parametrize(
    ("headers", "path", "status", "reason"),
    [
        ({"Content-Length": str(65 << 20)}, "/groups", 413, Refusal.TOO_LARGE),
        ({"Content-Length": str(33 << 20)}, "/requests", 413, Refusal.TOO_LARGE),
        ({"Content-Length": str(10**18)}, "/requests", 413, Refusal.TOO_LARGE),
        ({"Content-Length": str(10**18)}, "/groups", 413, Refusal.TOO_LARGE),
        ({"Transfer-Encoding": "chunked"}, "/groups", 411, Refusal.LENGTH),
        ({"Transfer-Encoding": "chunked"}, "/restore", 411, Refusal.LENGTH),
    ],
)
def test_a_body_is_refused_before_any_of_it_is_sent(
    redis_url: str, headers: dict[str, str], path: str, status: int, reason: Refusal
) -> None:
    with serving(new_store(redis_url), small_config()) as client:
        reply = call(client.url, "POST", path, body=b"", headers=headers)
        assert (reply.status, reply.json()["error"], reply.headers["connection"]) == (status, "ContractError", "close")
        metrics = call(client.url, "GET", "/metrics").data.decode()
    assert f'bapo_refused_requests_total{{reason="{reason}"}} 1.0' in metrics


def test_chunks_of_json_are_counted_and_cut_off(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_JSON_BYTES", 1000)
    with serving(new_store(redis_url), small_config()) as client:
        reply = call(client.url, "POST", "/requests", body=iter([b" " * 600, b" " * 600]))
        assert (reply.status, reply.json()["error"]) == (413, "ContractError")
        assert "longer than declared, or than 1000 bytes" in reply.json()["message"]


def test_a_body_that_does_not_go_on_is_given_up(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_PAUSE_S", 0.2)
    with serving(new_store(redis_url), small_config()) as client:
        for path in ("/groups", "/requests"):
            reply = call(client.url, "POST", path, body=b"", headers={"Content-Length": "10"})
            assert (reply.status, reply.json()["message"]) == (408, "no data of the body received for 0 s")


def sent(url: str, *pieces: bytes) -> tuple[int, bytes]:
    """(bytes that were taken, answer) of a connection that sends these pieces and then waits for its end."""
    host, _, port = url.removeprefix("http://").partition(":")
    taken, heard = 0, b""
    with socket.create_connection((host, int(port)), timeout=60.0) as connection, suppress(ConnectionError):
        for piece in pieces:
            connection.sendall(piece)
            taken += len(piece)
        while more := connection.recv(1000):
            heard += more
    return taken, heard


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /status HTTP/1.1\r\n"] + [b"x-a: " + b"a" * 1000 + b"\r\n"] * 20_000,
        [b"GET /"] + [b"a" * 10_000] * 2000,
        [b"GET / HTTP/1.1\r\n"] + [b"a" * 10_000] * 2000,
    ],
    ids=["many headers", "a long path", "a long name"],
)
def test_headers_without_an_end_are_cut_off(url: str, pieces: list[bytes]) -> None:
    taken, heard = sent(url, *pieces)
    assert taken < 15_000_000  # the rest found no reader
    assert heard == b"" or heard.startswith(b"HTTP/1.1 400 ")


def described_routes(app: FastAPI) -> set[tuple[str, str]]:
    paths = app.openapi()["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


def test_a_learner_publishes_weights_a_worker_reads_them_and_only_the_operator_scales() -> None:
    app = create_fleet_app(None, Telemetry(), store=WeightRelay(Path("."), str), images=ImageFiles(Path(".")))  # type: ignore[arg-type]
    able = {}
    for method, path in described_routes(app):
        scope = {"type": "http", "method": method, "path": path.replace("{digest}", "0" * 64)}
        rule, _ = gate.rule_of(app.routes, scope)
        able[method, path] = "anyone" if rule.is_open else rule.roles
    assert able == {
        ("GET", "/healthz"): "anyone",
        ("GET", "/readyz"): "anyone",
        ("GET", "/metrics"): {VIEWER},
        ("GET", "/workers"): {VIEWER, LEARNER},
        ("PUT", "/workers"): set(),
        ("POST", "/weights"): {LEARNER},
        ("POST", "/weights/transfer"): {LEARNER},
        ("PUT", "/weights/files/{digest}"): {LEARNER},
        ("GET", "/weights/files/{digest}"): {WORKER},
        ("GET", "/images/{digest}"): {WORKER},
    }


@contextmanager
def metrics_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("BAPO_ACCEPTED_TOKENS", ",".join(f"{role}:{digest(TOKENS[role])}" for role in Role))
    yield f"http://127.0.0.1:{serve_health(Telemetry(), 0, lambda: True)}"


def test_metrics_of_the_small_services_ask_for_a_viewers_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with metrics_server(monkeypatch) as url:
        assert [call(url, "GET", path).status for path in ("/healthz", "/readyz", "/metrics")] == [200, 200, 401]
        assert [call(url, "GET", "/metrics", role).status for role in (VIEWER, OPERATOR, WORKER)] == [200, 200, 403]
