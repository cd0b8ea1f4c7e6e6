"""Small parts of the buffer service: why a batch waits, metrics, sending in pieces."""

from __future__ import annotations

import itertools
import socket
import threading
from dataclasses import replace

import msgspec
import pytest

from bapo.errors import ContractError, UnavailableError
from bapo.maps import fate_map
from bapo.messages import WorkerLeases
from bapo.types import Origin, Purpose
from buffer_service.__main__ import wait_for
from buffer_service.codec import pack, pack_record, unpack, unpack_record
from buffer_service.demand import Demand
from buffer_service.reasons import is_ready, why_not_yet
from buffer_service.redis_link import RedisLink
from buffer_service.values import Health, Readiness
from tests.buffer_app import small_config
from tests.buffer_setup import STATUS, answer, incoming
from tests.factories import make_request

READY = Readiness(
    assembled=3, num_fresh=1, round_left=None, failures_in_a_row=0, last_failure="", num_open=0, fresh_bytes=0
)


def test_the_reason_names_what_is_missing_and_who_is_silent() -> None:
    workers = {"worker-2": WorkerLeases(leased=2, silent_s=38.4), "worker-1": WorkerLeases(leased=0, silent_s=99.0)}
    status = replace(STATUS, workers=workers)
    assert why_not_yet(4, READY, status, small_config(), 4) == (
        "1/4 fresh groups, 1 leased, 2 queued; worker-2 silent for 38 s"
    )


def test_without_slack_the_reason_names_the_requests_of_the_step() -> None:
    ready = replace(READY, num_fresh=4, num_open=2)
    config = small_config(cadence={"slack": 0})
    assert not is_ready(4, ready, config, 4)
    assert is_ready(4, ready, small_config(cadence={"slack": 1}), 4)
    assert why_not_yet(4, ready, replace(STATUS, workers={}), config, 4) == (
        "2 fresh groups of steps up to 4 are open, 1 leased, 2 queued"
    )


@pytest.mark.parametrize(("left", "is_over"), [(None, False), (1, False), (0, True), (-1, True)])
def test_a_round_is_over_at_none_left_and_below_as_earlier_versions_may_have_left_it(
    left: int | None, is_over: bool
) -> None:
    config = small_config(cadence={"v": 1, "m": 1, "slack": 0, "wait_for_reevaluation": True})
    nothing = dict.fromkeys(Purpose, 0)
    ready = replace(READY, num_fresh=4, round_left=left)
    status = replace(STATUS, workers={}, leased=nothing, queued=nothing)
    assert is_ready(4, ready, config, 4) is is_over
    assert (why_not_yet(4, ready, status, config, 4) == "step 4 is being assembled") is is_over


def test_the_reason_names_failures() -> None:
    ready = replace(READY, failures_in_a_row=3, last_failure="verifier: it hung")
    assert why_not_yet(4, ready, replace(STATUS, workers={}), small_config(), 4).endswith(
        "; 3 groups failed in a row, last: verifier: it hung"
    )


def test_the_reason_of_another_round_says_what_the_rounds_before_gave() -> None:
    demand = Demand(4, rounds=2, most=4, found=37, wanted=64, num_fresh=128)
    status = replace(STATUS, workers={}, demand=demand.sentence)
    ready = replace(READY, num_fresh=80)
    assert not is_ready(4, ready, small_config(), 128)
    assert why_not_yet(4, ready, status, small_config(), 128) == (
        "round 2 of 4: 37/64 informative groups; 80/128 fresh groups, 1 leased, 2 queued"
    )


@pytest.mark.parametrize("value", [1 << 70, "\ud800", {1, 2}])
def test_what_msgpack_has_no_word_for_is_a_contract_error(value: object) -> None:
    with pytest.raises(ContractError, match="a value cannot be stored"):
        pack({"answer": value})


def test_a_record_is_a_row_and_comes_back() -> None:
    """push.lua reads the 6th and the 11th field, and Redis' msgpack knows texts but no bytes."""
    record = msgspec.structs.replace(incoming(answer(make_request(prompt_id="a"))).record, outcome_chars="\0\xff")
    row = unpack(pack_record(record))
    assert (row[5], row[10]) == (record.worker_id, record.claimed_at)
    assert unpack_record(pack_record(record)) == record
    assert record.outcomes == bytes((0, 255))


# -- when a write has left Redis


def test_a_redis_that_goes_away_while_the_service_starts_is_waited_for() -> None:
    """Found by chaos: it answered, was killed, and the scripts could not be loaded."""
    answers = iter([UnavailableError("loading"), UnavailableError("gone again"), None])

    def attempt() -> Health:
        error = next(answers)
        if error:
            raise error
        return Health(where="here", persistent=True, detail="")

    wait_for(attempt, timeout_s=10.0)
    assert next(answers, "none left") == "none left"
    with pytest.raises(UnavailableError, match="never"):
        wait_for(lambda: (_ for _ in ()).throw(UnavailableError("never")), timeout_s=0.0)


def test_a_start_that_waits_for_redis_says_so_once_and_not_again_at_each_try(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = iter([UnavailableError("Redis is still loading its data")] * 3)

    def attempt() -> Health:
        for error in tries:
            raise error
        return Health(where="here", persistent=True, detail="")

    wait_for(attempt, timeout_s=100.0)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == "waits up to 100 s more before it listens: Redis is still loading its data"


def test_a_gateway_that_answers_in_the_place_of_redis_is_waited_out() -> None:
    """Found by a cable that was pulled: packets then went to another host, which answered in HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        link = RedisLink(f"redis://127.0.0.1:{server.getsockname()[1]}/0?protocol=2")
        with pytest.raises(UnavailableError, match="does not speak Redis' protocol"):
            link.run("status", [], [])
        thread.join(60)


@pytest.mark.parametrize("parts", [{}, {"item": "g-a:0,2", "rows": (0, 2), "kind": "sft"}], ids=["whole", "in parts"])
def test_a_batch_says_of_a_group_what_its_fate_says(parts: dict[str, object]) -> None:
    plain = incoming(answer(make_request(prompt_id="a"))).record
    for record, origin in itertools.product(
        (plain, msgspec.structs.replace(plain, outcome_chars="\0\1" * 4)), (None, Origin.X1)
    ):
        fate = record.fate(origin, "informative", 7, **parts)  # type: ignore[arg-type]
        assert record.fate_fields(origin, "informative", 7, **parts) == fate_map(fate)  # type: ignore[arg-type]
