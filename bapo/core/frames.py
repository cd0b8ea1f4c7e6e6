"""Frames: a checked header and opaque bytes, one after the other in a stream.

    frame = magic "BAPO" | format 1 | kind | header length (u32) | body length (u32) | header (msgpack map) | body

All numbers are little-endian. What the header and the body of a kind hold is in `bapo.core.codec`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
from xxhash import xxh3_64_hexdigest

from bapo.core.errors import ContractError, Refusal
from bapo.core.json_values import T, plain_value

MAGIC = b"BAPO"
FORMAT = 1
KIND_GROUP = 1
KIND_BATCH = 2
KIND_PART = 3
PREFIX = struct.Struct("<4sBBII")

MAX_HEADER_BYTES = 1 << 24
"""A batch's header has about 250 bytes per group that assembly inspected."""
MAX_GROUP_HEADER_BYTES = 1 << 20
"""Some hundred bytes and the prompt's text. It is opened before anything is known of it, and the worst bytes (empty
maps, one byte each) become objects of 64 bytes."""
MAX_PROMPT_BYTES = MAX_GROUP_HEADER_BYTES - (1 << 17)
"""Of text and answer of a prompt that is asked for: the rest is for ids and 17 bytes of each of 4,096 responses."""
MAX_BODY_BYTES = (1 << 32) - 1
"""A batch of 256 groups of 8 x 8192 tokens is 134 MB."""


pack = msgspec.msgpack.Encoder(enc_hook=plain_value).encode
_MAP = msgspec.msgpack.Decoder(dict[str, Any])


def frame_start(kind: int, header: Any, num_body_bytes: int) -> bytes:
    """Everything of a frame but its body. `header`: a map, or a struct.

    Raises: ContractError when the header holds something that msgpack has no word for, or the frame is too large.
    """
    try:
        packed = pack(header)
    except (TypeError, ValueError, OverflowError) as error:
        raise ContractError(f"frame header cannot be packed: {error}; it must be JSON with 64-bit integers") from error
    _refuse_large(len(packed), num_body_bytes)
    return PREFIX.pack(MAGIC, FORMAT, kind, len(packed), num_body_bytes) + packed


def open_frame(frame: bytes | memoryview, kind: int) -> tuple[dict[str, Any], memoryview]:
    """(header, body) of the one frame of this kind that `frame` is.

    Raises: ContractError.
    """
    packed, body = frame_parts(frame, kind)
    return unpacked(packed, _MAP), body


def frame_parts(frame: bytes | memoryview, kind: int) -> tuple[memoryview, memoryview]:
    """(packed header, body) of the one frame of this kind that `frame` is.

    Raises: ContractError.
    """
    view = memoryview(frame)
    size = _frame_size(view)
    if size != len(view):
        raise ContractError(f"{len(view) - size} extra bytes after the frame", Refusal.FRAME)
    head = frame_head(view)
    packed, _ = head_parts(head, kind)
    return packed, view[len(head) :]


def unpacked(packed: bytes | memoryview, decoder: msgspec.msgpack.Decoder[T], what: str = "frame header") -> T:
    """The value in these bytes. Raises: ContractError."""
    try:
        return decoder.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(f"{what}: {error}"[:200], Refusal.HEADER) from error


def frame_head(frame: bytes | memoryview) -> memoryview:
    """Prefix and header of a frame whose body may not be there. Raises: ContractError."""
    view = memoryview(frame)
    if len(view) < PREFIX.size:
        raise ContractError(f"frame is truncated: {len(view)} bytes, but its prefix has {PREFIX.size}", Refusal.FRAME)
    _declared_size(view)
    end = PREFIX.size + PREFIX.unpack_from(view)[3]
    if len(view) < end:
        raise ContractError(f"frame is truncated: {len(view)} bytes, but its header ends at {end}", Refusal.FRAME)
    return view[:end]


def head_parts(head: bytes | memoryview, kind: int) -> tuple[memoryview, int]:
    """(packed header, bytes of the body) of a frame of this kind, of which `head` is all but the body.

    Raises: ContractError.
    """
    view = memoryview(head)
    if len(frame_head(view)) != len(view):
        raise ContractError("extra bytes after the header", Refusal.FRAME)
    _, _, found, num_header, num_body = PREFIX.unpack_from(view)
    if found != kind:
        raise ContractError(f"expected a frame of kind {kind}, got {found}", Refusal.FRAME)
    if kind == KIND_GROUP and num_header > MAX_GROUP_HEADER_BYTES:
        message = f"group header has {num_header} bytes, the limit is {MAX_GROUP_HEADER_BYTES}"
        raise ContractError(message, Refusal.HEADER)
    return view[PREFIX.size :], num_body


def declared_bytes(head: bytes | memoryview) -> int:
    """Length of the whole frame that begins so. Raises: ContractError."""
    return _declared_size(memoryview(head))


def frame_digest(frame: bytes | memoryview) -> str:
    """XXH3 of the head, then of the body, in hex: 16 characters each. Raises: ContractError for what is not a frame."""
    head = frame_head(frame)
    return xxh3_64_hexdigest(head) + xxh3_64_hexdigest(memoryview(frame)[len(head) :])


def head_digest(head: bytes | memoryview) -> str:
    """The half of a frame's digest that its head decides."""
    return xxh3_64_hexdigest(head)


def split_frames(stream: bytes | memoryview) -> Iterator[memoryview]:
    """The frames that lie one after the other in `stream`.

    Raises: ContractError when the last one is cut off.
    """
    rest = memoryview(stream)
    while rest:
        size = _frame_size(rest)
        yield rest[:size]
        rest = rest[size:]


def _frame_size(frame: memoryview) -> int:
    if len(frame) < PREFIX.size:
        message = f"frame is truncated: {len(frame)} bytes, but its prefix has {PREFIX.size}"
        raise ContractError(message, Refusal.FRAME)
    size = _declared_size(frame)
    if len(frame) < size:
        raise ContractError(f"frame is truncated: {len(frame)} of {size} bytes", Refusal.FRAME)
    return size


def _declared_size(frame: memoryview) -> int:
    magic, version, _, num_header, num_body = PREFIX.unpack_from(frame)
    if magic != MAGIC or version != FORMAT:
        message = f"not a BAPO frame of format {FORMAT}: starts with {bytes(frame[:5])!r}"
        raise ContractError(message, Refusal.FRAME)
    _refuse_large(num_header, num_body)
    return int(PREFIX.size + num_header + num_body)


def _refuse_large(num_header_bytes: int, num_body_bytes: int) -> None:
    if num_header_bytes > MAX_HEADER_BYTES or num_body_bytes > MAX_BODY_BYTES:
        raise ContractError(
            f"frame of {num_header_bytes} + {num_body_bytes} bytes, the limit is {MAX_HEADER_BYTES} + {MAX_BODY_BYTES}",
            Refusal.FRAME,
        )
