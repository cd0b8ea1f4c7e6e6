"""Steps: work that begins where it must not block and ends where it may."""

from __future__ import annotations

import socket

import pytest

from buffer_service.steps import BLOCKS, Steps, finish, finish_soon


def waiting_for(descriptor: int, done: list[str]) -> Steps[str]:
    done.append("asked")
    yield descriptor
    done.append("read")
    return "answer"


def test_steps_that_need_no_patience_end_at_once() -> None:
    def nothing() -> Steps[int]:
        yield from ()
        return 7

    assert finish_soon(nothing(), 0.0) == (7,)


def test_an_answer_that_is_there_is_read_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"x")
        assert finish_soon(waiting_for(ours.fileno(), []), 0.0) == ("answer",)


def test_an_answer_that_does_not_come_is_left_to_somebody_who_may_wait() -> None:
    done: list[str] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        steps = waiting_for(ours.fileno(), done)
        assert finish_soon(steps, 0.01) is None
        assert done == ["asked"]
        assert finish(steps) == "answer"
    assert done == ["asked", "read"]


def test_a_step_that_blocks_is_not_begun() -> None:
    done: list[str] = []
    steps = waiting_for(BLOCKS, done)
    assert finish_soon(steps, 60.0) is None
    assert done == ["asked"]
    assert finish(steps) == "answer"


def test_an_error_is_raised_where_it_happens() -> None:
    def failing() -> Steps[None]:
        yield BLOCKS
        raise ValueError("later")

    steps = failing()
    assert finish_soon(steps, 0.0) is None
    with pytest.raises(ValueError, match="later"):
        finish(steps)
