"""Damaged frames: cut anywhere, any bit flipped, fields of other types. The answer is a value or a ContractError."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo.core.codec import (
    pack_batch,
    pack_group,
    read_group_header,
    result_from_map,
    result_map,
    unpack_batch,
    unpack_group,
)
from bapo.core.errors import ContractError
from bapo.core.frames import PREFIX, frame_head, frame_start, open_frame, split_frames
from bapo.core.json_values import from_map, to_map
from bapo.core.types import Prompt
from tests.support.factories import make_batch, make_group, make_prompt, make_result

GROUP = pack_group(make_group(rewards="10", lengths=[2, 3]))
BATCH = pack_batch(make_batch(groups=[make_group(rewards="10"), make_group(rewards="01", prompt_id="q")]))
READERS: list[tuple[Callable[[bytes], Any], bytes]] = [
    (unpack_group, GROUP),
    (read_group_header, GROUP),
    (unpack_batch, BATCH),
]
NAMES = ["group", "header", "batch"]


@pytest.mark.parametrize(("read", "frame"), READERS, ids=NAMES)
def test_a_frame_that_is_cut_anywhere_is_refused(read: Callable[[bytes], Any], frame: bytes) -> None:
    # A header is read where its body is not.
    for size in range(len(frame_head(frame)) if read is read_group_header else len(frame)):
        with pytest.raises(ContractError):
            read(frame[:size])


@pytest.mark.parametrize(("read", "frame"), READERS, ids=NAMES)
def test_a_flipped_bit_gives_a_value_or_a_contract_error(read: Callable[[bytes], Any], frame: bytes) -> None:
    refused = 0
    for i in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[i // 8] ^= 1 << i % 8
        try:
            read(bytes(damaged))
        except ContractError:
            refused += 1
    assert refused > len(frame)


@given(data=st.data())
def test_random_bytes_in_the_header_give_a_value_or_a_contract_error(data: st.DataObject) -> None:
    read, frame = data.draw(st.sampled_from(READERS))
    damaged = bytearray(frame)
    for place in data.draw(st.lists(st.integers(PREFIX.size, len(frame) - 1), min_size=1, max_size=6)):
        damaged[place] = data.draw(st.integers(0, 255))
    with suppress(ContractError):
        read(bytes(damaged))


@given(noise=st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for read in (unpack_group, read_group_header, unpack_batch):
        with pytest.raises(ContractError):
            read(noise)


def test_bytes_after_a_frame_are_refused() -> None:
    with pytest.raises(ContractError, match="2 extra bytes after"):
        unpack_group(GROUP + b"xx")


def test_a_stream_that_is_cut_is_refused_at_its_last_frame() -> None:
    frames = split_frames(GROUP + GROUP[:-1])
    assert bytes(next(frames)) == GROUP
    with pytest.raises(ContractError, match="truncated"):
        next(frames)


def group_with(**fields: Any) -> bytes:
    """The frame of a good group whose header was changed; a field that is `...` is missing."""
    header, body = open_frame(GROUP, 1)
    changed = {key: value for key, value in {**header, **fields}.items() if value is not ...}
    return frame_start(1, changed, len(body)) + bytes(body)


def column(*values: float, dtype: str) -> bytes:
    return np.array(values, dtype=dtype).tobytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": ...}, "missing required field `step`"),
        ({"more": 1}, "unknown field `more`"),
        ({"step": "7"}, r"Expected `int`, got `str` - at `\$.step`"),
        ({"id": None}, r"Expected `str`, got `None` - at `\$.id`"),
        ({"purpose": "training"}, r"Invalid enum value 'training' - at `\$.purpose`"),
        ({"num_prompt": -1}, "negative or zero length"),
        ({"num_prompt": 2**60}, "body bytes"),
        ({"lengths": column(2, dtype="<i4")}, "do not describe the same responses"),
        ({"lengths": column(5, 0, dtype="<i4")}, "negative or zero length"),
        ({"lengths": column(2**31 - 1, 2**31 - 1, dtype="<i4")}, "body bytes"),
        ({"rewards": b"", "lengths": b"", "outcomes": b"", "versions": b""}, "do not describe"),
        ({"rewards": column(float("nan"), 0, dtype="<f4")}, r"rewards must be in \[0, 1\]"),
        ({"rewards": column(1.5, 0, dtype="<f4")}, r"rewards must be in \[0, 1\]"),
        ({"outcomes": b"\x00\x03"}, "outcomes 0 to 2"),
        ({"versions": column(3, 2, 1, 1, dtype="<i4")}, r"not pairs \(oldest, newest\)"),
        ({"versions": column(-1, 2, 1, 1, dtype="<i4")}, r"not pairs \(oldest, newest\)"),
        ({"timing": [1.0, 2.0]}, "timing"),
        ({"timing": [1.0, 2.0, float("inf")]}, "timing"),
        ({"prompt": {"text": "x"}}, r"missing required field `prompt_id` - at `\$.prompt`"),
        ({"prompt": {**to_map(make_prompt()), "task": 3}}, r"Expected `str`, got `int` - at `\$.prompt.task`"),
        ({"prompt": {**to_map(make_prompt()), "answer": [1]}}, "Expected `object`, got `array`"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    for read in (unpack_group, read_group_header):
        with pytest.raises(ContractError, match=message):
            read(group_with(**fields))


def batch_with(**fields: Any) -> bytes:
    header, body = open_frame(BATCH, 2)
    return frame_start(2, {**header, **fields}, len(body)) + bytes(body)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"origins": ["x1"]}, "1 origins but 2 groups"),
        ({"origins": ["x1", "x9"]}, "Invalid enum value 'x9'"),
        ({"origins": ["x1", ["x1"]]}, "Expected `str`, got `array`"),
        ({"r_tot": float("nan")}, r"at `\$.r_tot`"),
        ({"facts": {"num_bad": "1"}}, r"Expected `int | float`, got `str` - at `\$.facts"),
        ({"results": [3]}, r"Expected `object`, got `int` - at `\$.results"),
        ({"results": [{**result_map(make_result()), "birth": "1"}]}, r"Expected `int`, got `str` - at `\$.birth`"),
        ({"results": [{**result_map(make_result()), "outcomes": [256]}]}, "bytes must be in range"),
        ({"results": [{**result_map(make_result()), "purpose": "x"}]}, "Invalid enum value .x."),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_a_batch_header_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        unpack_batch(batch_with(**fields))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"JSON" + GROUP[4:], "not a BAPO frame of format 1: starts with b'JSON"),
        (GROUP[:4] + b"\x02" + GROUP[5:], "not a BAPO frame of format 1"),
        (BATCH, "expected a frame of kind 1, got 2"),
        (PREFIX.pack(b"BAPO", 1, 1, 1 << 30, 0), "the limit is"),
        (PREFIX.pack(b"BAPO", 1, 1, 1, 0) + b"\x01", "Expected `object`, got `int`"),
        (PREFIX.pack(b"BAPO", 1, 1, 1, 0) + b"\xc1", "MessagePack data is malformed"),
        (PREFIX.pack(b"BAPO", 1, 1, 2, 0) + b"\x01\x01", "Expected `object`, got `int`"),
        (PREFIX.pack(b"BAPO", 1, 1, 2000, 0) + b"\x91" * 2000, "Expected `object`, got `array`"),
        (PREFIX.pack(b"BAPO", 1, 1, 3, 0) + b"\x81\x90\x01", "Expected `str`, got `array`"),  # a list as key
    ],
)
def test_frames_of_others_are_refused_with_the_reason(frame: bytes, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        unpack_group(frame)


@pytest.mark.parametrize("values", [{}, {b"text": 1, "task": 2}, {1: 2}])
def test_maps_with_strange_keys_are_refused(values: dict[Any, Any]) -> None:
    with pytest.raises(ContractError):
        from_map(values, Prompt, "prompt")
    with pytest.raises(ContractError):
        result_from_map(values)


def test_an_extension_type_is_refused() -> None:
    answer = {"x": msgpack.ExtType(4, b"abc")}
    with pytest.raises(ContractError, match="which is not JSON"):
        unpack_group(group_with(prompt={**to_map(make_prompt()), "answer": answer}))
