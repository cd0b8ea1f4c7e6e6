"""Who may do what at the fleet's API, besides the operator. A test checks that every route has its line."""

from __future__ import annotations

from bapo.gate import Rules, allow
from bapo.tokens import Role

ROUTES = (
    allow("GET", "/workers", Role.VIEWER, Role.LEARNER),
    allow("PUT", "/workers"),
    allow("GET", "/weights", Role.VIEWER, Role.LEARNER),
    allow("POST", "/weights", Role.LEARNER),
    allow("GET", "/metrics", Role.VIEWER),
)
RULES = Rules(ROUTES)
