"""CUDA IPC handles as JSON: the arguments of torch's `rebuild_cuda_tensor`, without pickle.

vLLM's own encoding for HTTP is a pickle, which would let whoever may publish weights run code in every worker.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

TENSOR, STORAGE, DTYPE = 0, 4, 5
"""Positions of the two classes and of the dtype."""
BYTES = (7, 11, 13)
"""Positions of the handles of the memory, its reference count and its event."""
NUM_ARGUMENTS = 15


def closed_handle(arguments: Sequence[Any]) -> list[Any]:
    """JSON values of the arguments that `torch.multiprocessing.reductions.reduce_tensor` returns for a CUDA tensor."""
    values = list(arguments)
    values[TENSOR] = values[STORAGE] = None
    values[DTYPE] = str(values[DTYPE]).removeprefix("torch.")
    for position in BYTES:
        values[position] = base64.b64encode(values[position]).decode()
    return values


def opened_handles(handles: Sequence[Mapping[str, Sequence[Any]]], torch: Any) -> list[dict[str, tuple[Any, ...]]]:
    """For vLLM: by tensor, GPU -> arguments. `torch`: the module. Raises: ValueError."""
    return [{gpu: _opened(values, torch) for gpu, values in by_gpu.items()} for by_gpu in handles]


def _opened(values: Sequence[Any], torch: Any) -> tuple[Any, ...]:
    if len(values) != NUM_ARGUMENTS:
        raise ValueError(f"{len(values)} values are not an IPC handle")
    arguments = list(values)
    dtype = getattr(torch, str(values[DTYPE]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{values[DTYPE]!r} is not a dtype")  # noqa: TRY004 - of JSON
    arguments[TENSOR], arguments[STORAGE], arguments[DTYPE] = torch.Tensor, torch.UntypedStorage, dtype
    for position in (1, 2):
        arguments[position] = tuple(values[position])
    for position in BYTES:
        arguments[position] = base64.b64decode(values[position], validate=True)
    return tuple(arguments)
