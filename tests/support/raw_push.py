"""A push without the client, of what may be no frame at all."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import msgpack
import urllib3
from xxhash import xxh3_64_hexdigest

from bapo.core.errors import ContractError
from bapo.core.frames import frame_head

OCTETS = {"Content-Type": "application/octet-stream"}


def row_of(frame: bytes, name: str) -> list[object]:
    """What a push says of a frame: all of it stands for the head, where it has none."""
    try:
        head = bytes(frame_head(frame))
    except ContractError:
        head = frame
    return [head, name, xxh3_64_hexdigest(head) + xxh3_64_hexdigest(frame[len(head) :])]


def raw_push(url: str, frames: Sequence[bytes], headers: Mapping[str, str] = OCTETS) -> urllib3.BaseHTTPResponse:
    """Write the frames by HTTP, and push their heads."""
    rows = []
    for frame in frames:
        name = secrets.token_hex(16)
        if frame:
            urllib3.request("PUT", f"{url}/frames/{name}", body=frame, headers={**OCTETS, **headers}, retries=False)
        rows.append(row_of(frame, name))
    return urllib3.request(
        "POST", f"{url}/groups", body=msgpack.packb(rows), headers={**OCTETS, **headers}, retries=False
    )
