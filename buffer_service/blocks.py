"""Memory for frames on their way through."""

from __future__ import annotations

import numpy as np


def new_block(num_bytes: int) -> memoryview:
    """Memory that nobody has written to yet: a bytearray would be zeroed first, which costs as much as a copy."""
    return np.empty(num_bytes, np.uint8).data
