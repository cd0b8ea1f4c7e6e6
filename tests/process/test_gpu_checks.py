"""What `bapo doctor` says of GPUs, on machines that are written down by hand; the parser on what nvidia-smi prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.launcher.gpus import devices
from services.launcher.gpus.devices import Gpus, probe_gpus
from tests.support.gpu_plan import BOX, TORCH

ROWS = "NVIDIA H100 80GB HBM3, 81559, 575.57.08\nNVIDIA H100 80GB HBM3, 81559, 575.57.08\n"
LIST = "GPU 0: NVIDIA H100 (UUID: GPU-0a)\nGPU 1: NVIDIA H100 (UUID: GPU-0b)\n"


@pytest.mark.parametrize(
    ("script", "want"),
    [
        (
            "echo 'NVIDIA-SMI has failed: driver not loaded'; exit 9",
            "nvidia-smi: NVIDIA-SMI has failed: driver not loaded",
        ),
        ("exit 3", "nvidia-smi: exit code 3"),
    ],
)
def test_a_driver_that_does_not_answer_is_told_in_its_own_words(
    script: str, want: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(devices, "ask_torch", lambda: None)
    assert probe_gpus() == Gpus(problem=want)


def test_what_nvidia_smi_prints_is_what_the_probe_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"#!/bin/sh\ncase \"$1\" in --query-gpu*) printf '{ROWS}';; -L) printf '{LIST}';; esac\n"
    (tmp_path / "nvidia-smi").write_text(program.replace("\n'", "'"))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(devices, "ask_torch", lambda: TORCH)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert probe_gpus() == BOX
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert probe_gpus() == replace(BOX, visible=("1",))
