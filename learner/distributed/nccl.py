"""NCCL between this process and the workers' engines, apart from torch.distributed: a communicator by its unique id.

torch.distributed cannot join a communicator of processes outside its group, and vLLM's own wrapper is not installed
with the learner. A call may block in NCCL without end when a peer has died: callers run these in a thread of their
own, and `abort` from another one.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

UNIQUE_ID_BYTES = 128
_UINT8, _FLOAT32, _SUM = 1, 7, 0
"""ncclUint8, ncclFloat32, ncclSum."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


@cache
def _library() -> Any:
    """The library that torch has loaded."""
    library = ctypes.CDLL("libnccl.so.2")
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _UniqueId, number]
    library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    return library


def _check(code: int) -> None:
    """Raises: RuntimeError."""
    if code:
        raise RuntimeError(f"NCCL: {_library().ncclGetErrorString(code).decode()}")


def make_unique_id() -> bytes:
    """The name of a new communicator, which contains this process's address (NCCL_SOCKET_IFNAME). Raises: OSError
    without NCCL; RuntimeError."""
    unique_id = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(unique_id)))
    return bytes(unique_id)


class NcclGroup:
    """A communicator in which this process is rank 0."""

    def __init__(self, unique_id: bytes, world_size: int, device: torch.device) -> None:
        """Returns once all ranks have joined. Raises: RuntimeError."""
        torch.cuda.set_device(device)  # of this thread
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._comm = ctypes.c_void_p()
        name = _UniqueId.from_buffer_copy(unique_id)
        _check(_library().ncclCommInitRank(ctypes.byref(self._comm), world_size, name, 0))
        with torch.cuda.stream(self._stream):
            one = torch.zeros(1, device=device)
        # vLLM's communicator begins with this collective, so every peer must.
        arguments = (one.data_ptr(), one.data_ptr(), 1, _FLOAT32, _SUM, self._comm, self._stream.cuda_stream)
        _check(_library().ncclAllReduce(*arguments))
        self._stream.synchronize()

    def broadcast(self, packed: Tensor) -> None:
        """Send uint8 values, which are complete on the device; returns once they are sent. Raises: RuntimeError."""
        torch.cuda.set_device(self._device)
        pointer, stream = packed.data_ptr(), self._stream.cuda_stream
        _check(_library().ncclBroadcast(pointer, pointer, packed.numel(), _UINT8, 0, self._comm, stream))
        self._stream.synchronize()

    def abort(self) -> None:
        """Leave; calls in progress fail. Raises: RuntimeError."""
        torch.cuda.set_device(self._device)
        _check(_library().ncclCommAbort(self._comm))
