"""What a selector has learnt, as bytes: msgpack of the selector's name and its arrays, little-endian."""

from __future__ import annotations

import msgpack
import numpy as np
from msgpack.exceptions import UnpackException

from bapo.algorithms.selectors.base import State
from bapo.errors import ConfigError, ContractError


def pack_state(name: str, state: State) -> bytes:
    """The state of the selector `name`."""
    arrays = {key: _little_endian(array) for key, array in state.items()}
    rows = {key: (array.dtype.str, array.shape, array.tobytes()) for key, array in arrays.items()}
    data: bytes = msgpack.packb((name, rows))
    return data


def unpack_state(name: str, data: bytes) -> State:
    """Inverse of `pack_state`.

    Raises: ConfigError when another selector has written it; ContractError when it is damaged.
    """
    try:
        writer, rows = msgpack.unpackb(data)
        state = {
            key: np.frombuffer(blob, dtype=np.dtype(dtype)).reshape(shape) for key, (dtype, shape, blob) in rows.items()
        }
    except (TypeError, ValueError, AttributeError, UnpackException) as error:
        raise ContractError(f"the kept state of a selector is malformed: {error!r}") from error
    if writer != name:
        raise ConfigError(
            f"this run has chosen its prompts by selector {writer!r}, and algorithm.selector is {name!r}; "
            f"write algorithm.selector = {writer!r}, or start a new run"
        )
    return state


def _little_endian(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
