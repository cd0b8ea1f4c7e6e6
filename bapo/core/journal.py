"""Entries of a journal on the wire: a msgpack array of bytes, which only their writer understands."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bapo.core.frames import pack, unpacked

_ENTRIES: msgspec.msgpack.Decoder[list[bytes]] = msgspec.msgpack.Decoder(list[bytes])


def pack_entries(entries: Sequence[bytes]) -> bytes:
    """Inverse of `unpack_entries`."""
    return pack(list(entries))


def unpack_entries(data: bytes) -> list[bytes]:
    """Raises: ContractError."""
    return unpacked(data, _ENTRIES, "a journal must be a msgpack array of bytes")
