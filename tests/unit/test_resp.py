"""Bulk replies of Redis, read in place, however the bytes arrive."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest
from redis.exceptions import ConnectionError, InvalidResponse, ResponseError

from buffer_service.resp import BulkReader, command, receiver, set_pieces


def arriving(data: bytes, sizes: Iterator[int]) -> Callable[[memoryview], int]:
    """`recv_into` of a socket that gives so many bytes at a time, and none when all are gone."""
    left = bytearray(data)

    def receive_into(block: memoryview) -> int:
        number = min(next(sizes), len(block), len(left))
        block[:number] = left[:number]
        del left[:number]
        return number

    return receive_into


def reader(data: bytes, *sizes: int) -> BulkReader:
    return BulkReader(arriving(data, chain(sizes, repeat(1 << 30))), ResponseError)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_values_are_the_same_however_they_arrive(size: int) -> None:
    data = b"*3\r\n$5\r\nhello\r\n$-1\r\n$0\r\n\r\n"
    found = BulkReader(arriving(data, repeat(size)), ResponseError).read(3)
    assert [None if value is None else bytes(value) for value in found] == [b"hello", None, b""]


def test_a_missing_value_of_resp3_is_none() -> None:
    assert reader(b"*2\r\n_\r\n$1\r\nx\r\n").read(2) == [None, b"x"]


def test_a_value_larger_than_the_block_is_whole() -> None:
    large = bytes(range(256)) * 4000  # 1,024,000 bytes, four times the first block
    data = b"*2\r\n$3\r\nabc\r\n$%d\r\n%b\r\n" % (len(large), large)
    first, second = reader(data, 100_000, 1, 300_000).read(2)
    assert first == b"abc"
    assert second == large


def test_an_answer_that_begins_with_the_end_of_the_last_one_is_not_lost() -> None:
    answers = reader(b"*1\r\n$3\r\none\r\n*1\r\n$3\r\ntwo\r\n")  # one recv brings both
    assert [bytes(value or b"?") for value in answers.read(1, reuse=True)] == [b"one"]
    assert [bytes(value or b"?") for value in answers.read(1, reuse=True)] == [b"two"]


def test_views_stay_valid_when_the_block_is_not_reused() -> None:
    answers = reader(b"*1\r\n$3\r\none\r\n*1\r\n$3\r\ntwo\r\n")
    (first,) = answers.read(1)
    (second,) = answers.read(1)
    assert (first, second) == (b"one", b"two")


def test_an_error_is_what_redis_said() -> None:
    with pytest.raises(ResponseError, match="OOM command not allowed"):
        reader(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n").read(4)


def test_a_line_that_has_no_end_is_no_answer_of_redis() -> None:
    with pytest.raises(InvalidResponse, match=r"Redis answered MGET with b'HTTP/1\.1 502 Bad Gateway"):
        reader(b"HTTP/1.1 502 Bad Gateway " + b"x" * 200, 70, 1000).read(1)


def test_another_number_of_values_is_refused() -> None:
    with pytest.raises(InvalidResponse, match="MGET of 2 keys"):
        reader(b"*3\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n").read(2)


def test_a_connection_that_ends_in_the_middle_is_an_error() -> None:
    with pytest.raises(ConnectionError, match="closed by server"):
        reader(b"*1\r\n$10\r\nhal").read(1)


def test_what_the_socket_refuses_is_named_as_redis_py_does() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    ours.close()
    with pytest.raises(ConnectionError, match="Bad file descriptor"):
        receiver(ours)(memoryview(bytearray(8)))


def test_set_carries_its_value_uncopied() -> None:
    value = memoryview(b"frame")
    head, body, tail = set_pieces("key", value, 600)
    assert body is value
    assert head + bytes(body) + tail == b"*5\r\n$3\r\nSET\r\n$3\r\nkey\r\n$5\r\nframe\r\n$2\r\nPX\r\n$3\r\n600\r\n"


def test_small_arguments_are_packed_as_redis_wants_them() -> None:
    assert command("MGET", "a", 12) == b"*3\r\n$4\r\nMGET\r\n$1\r\na\r\n$2\r\n12\r\n"
