"""Who may do what at the fleet's API, besides the operator. A test checks that every route has its line."""

from __future__ import annotations

from bapo.gate import Rules, allow
from bapo.tokens import Role
from bapo.weight_transport import PIECE_BYTES

ROUTES = (
    allow("GET", "/workers", Role.VIEWER, Role.LEARNER),
    allow("PUT", "/workers"),
    allow("POST", "/weights", Role.LEARNER),
    allow("PUT", "/weights/files/{digest}", Role.LEARNER, most_bytes=PIECE_BYTES, needs_length=True),
    allow("GET", "/weights/files/{digest}", Role.WORKER),
    allow("GET", "/metrics", Role.VIEWER),
)
RULES = Rules(ROUTES)
