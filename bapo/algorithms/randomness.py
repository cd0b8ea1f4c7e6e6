"""Counter-based randomness: a draw depends on (run seed, step, purpose) and on nothing that happened before."""

from __future__ import annotations

import hashlib
import random


def rng_for(seed: int, step: int, purpose: str) -> random.Random:
    """A generator for one purpose at one step (spec A.2): a resumed run draws the same as an uninterrupted one."""
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return random.Random(int.from_bytes(digest[:16], "little"))
