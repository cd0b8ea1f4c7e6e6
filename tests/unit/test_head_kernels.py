"""The head's Triton kernels are used only where they give torch's numbers."""

from __future__ import annotations

import pytest
import torch

from learner.model import head_kernels

GPU = torch.device("cuda")


@pytest.mark.parametrize(("gap", "usable"), [(1e-6, True), (0.1, False), (float("nan"), False)])
def test_kernels_that_give_other_numbers_on_a_gpu_are_not_used(
    gap: float, usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_kernels, "_largest_gap", lambda _: gap)
    assert head_kernels.are_usable.__wrapped__(GPU) is usable


def test_a_gpu_that_cannot_run_them_trains_without_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: torch.device) -> float:
        raise RuntimeError("PTX was compiled with an unsupported toolchain\nand more")

    monkeypatch.setattr(head_kernels, "_largest_gap", fail)
    assert head_kernels.are_usable.__wrapped__(GPU) is False
    assert "RuntimeError: PTX was compiled with an unsupported toolchain" in caplog.text
    assert "and more" not in caplog.text
