"""Permissions of each role (other than operator) in the buffer's API. A test checks that every route is listed.

A worker reads no batch, a viewer changes nothing and reads no group, a learner pushes nothing; a role that enqueues
requests cannot push groups.
"""

from __future__ import annotations

from collections.abc import Iterable

from bapo.core.errors import AccessError
from bapo.core.types import Purpose, RolloutRequest
from bapo.runtime.auth.api_tokens import Role
from bapo.transport.http_guard import ROLE, Permissions, Scope, allow

MAX_FRAME_BYTES = 64 << 20
MAX_PUSH_BYTES = 64 << 20
"""For the headers of 1,024 groups, which include their prompts."""
MAX_RESTORE_BYTES = 16 << 30
MAX_STATE_BYTES = 256 << 20
"""For the state of a prompt selector: two numbers for each of ten million prompts."""

WORKER, LEARNER, SCHEDULER, EVALUATOR = Role.WORKER, Role.LEARNER, Role.SCHEDULER, Role.EVALUATOR
EVERYBODY = tuple(Role)

ROUTES = (
    allow("POST", "/requests", SCHEDULER, EVALUATOR),
    allow("POST", "/reevaluations/{step}", SCHEDULER),
    allow("POST", "/requests/claim", WORKER),
    allow("POST", "/requests/claim/end", WORKER),
    allow("POST", "/requests/renew", WORKER),
    allow("POST", "/requests/fail", WORKER),
    allow("POST", "/requests/release", WORKER),
    allow("POST", "/groups", WORKER, most_bytes=MAX_PUSH_BYTES, needs_length=True),
    allow("GET", "/room", WORKER),
    allow("GET", "/frame-access", WORKER, LEARNER),
    allow("PUT", "/frames/{name}", WORKER, most_bytes=MAX_FRAME_BYTES, needs_length=True),
    allow("GET", "/frames/{group_id}", LEARNER),
    allow("GET", "/evaluations/{label}", EVALUATOR),
    allow("GET", "/evaluations/{label}/success-counts", EVALUATOR, SCHEDULER),
    allow("DELETE", "/evaluations/{label}", EVALUATOR, SCHEDULER),
    allow("POST", "/batches/{step}", LEARNER),
    allow("POST", "/batches/{step}/commit", LEARNER),
    allow("POST", "/batches/{step}/bad-frames", LEARNER),
    allow("GET", "/batches/{step}/untrained", LEARNER),
    allow("GET", "/progress", *EVERYBODY),
    allow("PUT", "/progress", LEARNER),
    allow("POST", "/snapshot", LEARNER),
    allow("POST", "/restore", LEARNER, most_bytes=MAX_RESTORE_BYTES, needs_length=True),
    allow("POST", "/resume", LEARNER),
    allow("GET", "/status", *EVERYBODY),
    allow("GET", "/hard-prompts", SCHEDULER),
    allow("GET", "/success-counts", SCHEDULER),
    allow("GET", "/selector", SCHEDULER),
    allow("PUT", "/selector/{round_}", SCHEDULER, most_bytes=MAX_STATE_BYTES, needs_length=True),
    allow("GET", "/bad", Role.VIEWER),
    allow("GET", "/high", Role.VIEWER),
    allow("GET", "/batches", SCHEDULER, Role.VIEWER),
    allow("GET", "/counters", Role.VIEWER),
    allow("GET", "/metrics", Role.VIEWER),
    allow("GET", "/verify", Role.VIEWER),
    allow("GET", "/groups"),
    allow("POST", "/groups/read"),
    allow("DELETE", "/groups/{group_id}"),
    allow("DELETE", "/requests/{request_id}"),
    allow("DELETE", "/bad"),
    allow("DELETE", "/runs/{name}"),
)
PERMISSIONS = Permissions(ROUTES)


class RightError(AccessError):
    """The role may call the route, but not with this content."""

    http_status = 403


def refuse_training(scope: Scope, requests: Iterable[RolloutRequest]) -> None:
    """Reject training requests from an evaluator. Raises: RightError."""
    if scope.get(ROLE) is not EVALUATOR:
        return
    for request in requests:
        if request.purpose is not Purpose.EVALUATE:
            raise RightError(
                f"request {request.request_id} is {request.purpose}: evaluators may only request evaluations; use the "
                "scheduler or operator token"
            )
