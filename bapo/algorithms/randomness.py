"""Counter-based randomness: a draw depends on (run seed, step, purpose) and on nothing that happened before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def rng_for(seed: int, step: int, purpose: str) -> random.Random:
    """A generator for one purpose at one step: a resumed run draws the same as an uninterrupted one."""
    return random.Random(_key(seed, step, purpose))


def generator_for(seed: int, step: int, purpose: str) -> np.random.Generator:
    """The same for arrays."""
    return np.random.Generator(np.random.PCG64(_key(seed, step, purpose)))


def _key(seed: int, step: int, purpose: str) -> int:
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:16], "little")


def sample_in_order(items: Sequence[T], most: int, rng: random.Random) -> list[T]:
    """S(items, min(len(items), most)) of eq. 7: uniform, without replacement, in the order of `items`."""
    if len(items) <= most:
        return list(items)
    chosen = sorted(rng.sample(range(len(items)), max(0, most)))
    return [items[i] for i in chosen]
