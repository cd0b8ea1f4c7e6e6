"""Small parts of the buffer service: why a batch waits, metrics, sending in pieces."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from bapo.core.types import Purpose
from bapo.transport.messages import WorkerLeases
from buffer_service.assembly import is_ready, why_not_yet
from buffer_service.state import Readiness
from buffer_service.store.redis.rows import pack_record, unpack, unpack_record
from tests.support.buffer import STATUS, answer, incoming
from tests.support.buffer_app import small_config
from tests.support.factories import make_request

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


def test_a_record_is_a_row_and_comes_back() -> None:
    """push.lua reads the 6th and the 11th field, and Redis' msgpack knows texts but no bytes."""
    record = msgspec.structs.replace(incoming(answer(make_request(prompt_id="a"))).record, outcome_chars="\0\xff")
    row = unpack(pack_record(record))
    assert (row[5], row[10]) == (record.worker_id, record.claimed_at)
    assert unpack_record(pack_record(record)) == record
    assert record.outcomes == bytes((0, 255))


@pytest.mark.parametrize(("left", "is_over"), [(None, False), (1, False), (0, True)])
def test_a_round_is_over_when_none_is_left(left: int | None, is_over: bool) -> None:
    config = small_config(cadence={"v": 1, "m": 1, "slack": 0, "wait_for_reevaluation": True})
    nothing = dict.fromkeys(Purpose, 0)
    ready = replace(READY, num_fresh=4, round_left=left)
    status = replace(STATUS, workers={}, leased=nothing, queued=nothing)
    assert is_ready(4, ready, config, 4) is is_over
    assert (why_not_yet(4, ready, status, config, 4) == "step 4 is being assembled") is is_over
