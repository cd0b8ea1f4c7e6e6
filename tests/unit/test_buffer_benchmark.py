"""What the buffer's benchmark makes of its measurements."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks.buffer.groups import SIZES, GroupMaker, requests_for
from benchmarks.buffer.movement import DURABLE, OURS, RAW, REVERB, _targets, ratios
from benchmarks.buffer.rivals import Moved
from benchmarks.buffer.soak import _percentiles, _range
from benchmarks.buffer.stack import cpu_seconds


def moved(seconds: float, cpu_s: float) -> Moved:
    return Moved(seconds=seconds, cpu_s=cpu_s)


def one_round(ours: float, theirs: float) -> dict[str, dict[str, Moved]]:
    mine = {name: moved(ours, 0.2) for name in ("push", "single", "pull", "commit")}
    names = ("push", "single", "single, open stream", "pull", "pull, one call per batch")
    return {OURS: mine, DURABLE: mine, REVERB: {name: moved(theirs, 0.4) for name in names}}


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    found = ratios([one_round(1.0, 3.0), one_round(2.0, 2.0), one_round(1.0, 2.0)])
    assert found[f"pull: {OURS} / {REVERB}"] == 2.0  # of 3, 1 and 2: more is faster
    assert found[f"pull: {OURS} / {REVERB}, CPU"] == 0.5  # less is cheaper
    assert found[f"pull and commit: {OURS} / {REVERB}"] == 1.0  # twice the time of ours
    assert found[f"single: {OURS} / {REVERB}'s single, open stream"] == 2.0
    assert not any(RAW in key for key in found)


def test_targets_say_whether_they_are_met() -> None:
    found = ratios([one_round(1.0, 3.0)])
    targets = _targets("20K", found)
    assert targets[f"pull: {OURS} / {REVERB}"] == {"found": 3.0, "at_least": 3.4, "met": False}
    assert targets[f"push: {OURS} / {REVERB}"]["met"] is True
    assert targets[f"pull: {OURS} / {REVERB}, CPU"] == {"found": 0.5, "at_most": 0.7, "met": True}
    assert f"single: {OURS} / {REVERB}" not in _targets("500K", found)


@pytest.mark.parametrize(
    ("size", "smallest", "largest"), [(0, 18_000, 20_000), (1, 95_000, 100_000), (2, 480e3, 495e3)]
)
def test_frames_have_the_sizes_that_they_are_named_after(size: int, smallest: float, largest: float) -> None:
    (frame,) = GroupMaker(SIZES[size].tokens).frames(requests_for(0, 1, 1, 64))
    assert smallest <= len(frame) <= largest


def test_requests_are_planned_for_the_steps_that_consume_them() -> None:
    requests = requests_for(128, 5, step=7, batch_size=2)
    assert [request.step for request in requests] == [7, 7, 8, 8, 9]
    assert requests[0].request_id == "g00000128"


def test_cpu_time_of_a_process_is_what_it_used() -> None:
    before, own = cpu_seconds([os.getpid()]), time.process_time()
    while time.process_time() - own < 0.05:
        pass
    assert 0.05 <= cpu_seconds([os.getpid()]) - before < 0.5


def test_percentiles_and_ranges_are_in_their_units() -> None:
    assert _percentiles([0.001] * 99 + [0.5]) == {"p50": 1.0, "p99": pytest.approx(5.99), "most": 500.0}
    assert _range([2**20, 3 * 2**20, 2 * 2**20]) == {"first": 1.0, "middle": 3.0, "last": 2.0, "most": 3.0}
