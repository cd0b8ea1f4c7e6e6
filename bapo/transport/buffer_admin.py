"""Client of the buffer's operator API, used by `bapo buffer`: inspect, verify, delete.

Every method raises the error reported by the service, or UnavailableError after `retry_s`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bapo.core.codec import unpack_group
from bapo.core.errors import ContractError
from bapo.core.frames import split_frames
from bapo.core.types import Group
from bapo.runtime.auth.api_tokens import Token
from bapo.transport.service_client import ServiceClient, quoted

VERIFY_WAIT_S = 300.0
MAX_READ = 64
"""Groups per call."""
ALL = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A page of a table."""

    total: int
    step: int
    """Newest assembled step; 0 for tables without one."""
    items: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of checking the invariants."""

    step: int
    groups: int
    open_requests: int
    invariants: dict[str, str]
    """Name -> description."""
    violations: list[dict[str, str]]
    """{invariant, detail}; empty when all hold."""


class BufferAdmin:
    """The buffer service of one run, for its operator."""

    def __init__(
        self, url: str, *, timeout_s: float = 30.0, retry_s: float = 5.0, token: str | Token | None = None
    ) -> None:
        """As `bapo.transport.buffer_client.BufferClient`, with a shorter `retry_s` for interactive use."""
        self._service = ServiceClient("the buffer service", url, timeout_s=timeout_s, retry_s=retry_s, token=token)

    def held(self, offset: int = 0, limit: int = ALL) -> Rows:
        """All groups and their tables, ordered by id."""
        return self._rows("/groups", offset, limit)

    def read(self, group_ids: Sequence[str]) -> Iterator[Group]:
        """The groups that are still stored, in order."""
        for first in range(0, len(group_ids), MAX_READ):
            body = {"group_ids": list(group_ids[first : first + MAX_READ])}
            frames = self._service.call("POST", "/groups/read", body=body).body
            yield from map(unpack_group, split_frames(frames))

    def counters(self) -> dict[str, int]:
        return dict(self._get("/counters"))

    def verify(self) -> Verification:
        fields = self._service.call("GET", "/verify", wait_s=VERIFY_WAIT_S).json()
        try:
            return Verification(**fields)
        except TypeError as error:
            raise ContractError(f"the response of /verify is malformed: {error}") from error

    def drop_group(self, group_id: str) -> str:
        """Delete a group; returns its table."""
        return str(self._service.call("DELETE", f"/groups/{quoted(group_id)}").json()["dropped_from"])

    def drop_request(self, request_id: str) -> None:
        """Delete an open request, queued or leased. Raises: ContractError when there is none with this id."""
        self._service.call("DELETE", f"/requests/{quoted(request_id)}")

    def drop_prompt(self, prompt_id: str) -> None:
        self._service.call("DELETE", "/bad", query={"prompt_id": prompt_id})

    def drop_run(self, name: str) -> None:
        self._service.call("DELETE", f"/runs/{quoted(name)}", wait_s=VERIFY_WAIT_S)

    def _rows(self, path: str, offset: int, limit: int) -> Rows:
        fields = self._get(path, {"offset": str(offset), "limit": str(limit)})
        return Rows(total=fields["total"], step=fields.get("step", 0), items=fields["items"])

    def _get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        return dict(self._service.call("GET", path, query=query).json())
