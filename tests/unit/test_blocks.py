"""Memory of batches: used again when nobody looks at it, and never before."""

from __future__ import annotations

import numpy as np

from bapo.blocks import Blocks


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_memory_that_nobody_looks_at_is_used_again() -> None:
    blocks = Blocks()
    first = blocks.take(1000)
    first[:3] = b"abc"
    del first
    again = blocks.take(900)
    assert (len(again), bytes(again[:3])) == (900, b"abc")


def test_memory_under_an_array_is_left_alone() -> None:
    blocks = Blocks()
    first = blocks.take(8)
    first[:] = b"12345678"
    array = np.frombuffer(first[4:], np.uint8)
    del first
    blocks.take(8)[:] = b"xxxxxxxx"
    assert bytes(array) == b"5678"
    place = int(array.ctypes.data)
    del array
    assert address(blocks.take(8)) == place - 4


def test_two_blocks_are_kept_the_newest() -> None:
    blocks = Blocks()
    views = [blocks.take(1 << 20) for _ in range(3)]
    places = [address(view) for view in views]
    assert len(set(places)) == 3
    views.clear()
    held = [blocks.take(1 << 20) for _ in range(2)]
    assert sorted(map(address, held)) == sorted(places[1:])


def test_a_batch_that_does_not_fit_gets_a_block_in_the_place_of_the_free_one() -> None:
    blocks = Blocks()
    kept = blocks.take(100)
    kept[:] = b"k" * 100
    free = blocks.take(100)
    del free
    large = blocks.take(1 << 20)
    large[:] = bytes(1 << 20)
    assert bytes(kept) == b"k" * 100
    place = address(kept)
    del kept
    assert address(blocks.take(100)) == place


def test_an_eighth_more_fits_as_well() -> None:
    blocks = Blocks()
    first = blocks.take(8000)
    place = address(first)
    del first
    assert address(blocks.take(9000)) == place
