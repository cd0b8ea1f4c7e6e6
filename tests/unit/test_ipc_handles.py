"""CUDA IPC handles travel as JSON, and name nothing but tensors."""

from __future__ import annotations

import json

import pytest
import torch

from bapo.transport.ipc_handles import closed_handle, opened_handles

ARGUMENTS = (
    torch.Tensor, torch.Size([3, 5]), (5, 1), 2, torch.UntypedStorage, torch.bfloat16, 0, b"memory\xff", 64, 0, False,
    b"count", 8, b"event", True,
)  # fmt: skip


def test_the_arguments_of_a_handle_are_the_same_after_json() -> None:
    sent = json.loads(json.dumps([{"GPU-1": closed_handle(ARGUMENTS)}]))
    assert opened_handles(sent, torch) == [{"GPU-1": ARGUMENTS}]


@pytest.mark.parametrize(("position", "value"), [(5, "load"), (5, "nn"), (7, "not base64!")])
def test_a_handle_that_names_anything_else_is_refused(position: int, value: str) -> None:
    values = closed_handle(ARGUMENTS)
    values[position] = value
    with pytest.raises(ValueError):
        opened_handles([{"GPU-1": values}], torch)
    with pytest.raises(ValueError):
        opened_handles([{"GPU-1": values[:1]}], torch)
