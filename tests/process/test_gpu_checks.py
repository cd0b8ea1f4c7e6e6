"""What `bapo doctor` says of GPUs, on machines that are written down by hand; the parser on what nvidia-smi prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bapo.runtime import machine
from services.launcher.gpus import devices
from services.launcher.gpus.devices import Gpu, Gpus, ThisMachine, Torch

H100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_mib=81559, capability=(9, 0))
TORCH = Torch(version="2.13.0", cuda="12.9", count=2, architectures=("sm_80", "sm_90", "compute_90"), nccl="2.27.5")
BOX = Gpus(gpus=(H100, H100), visible=("0", "1"), driver="575.57.08", driver_cuda="12.9", torch=TORCH)

HEADER = """
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 575.57.08              Driver Version: 575.57.08      CUDA Version: 12.9     |
|-----------------------------------------+------------------------+----------------------+
"""
ROWS = "NVIDIA H100 80GB HBM3, 81559, 9.0, 575.57.08\nNVIDIA H100 80GB HBM3, 81559, 9.0, 575.57.08\n"
LIST = "GPU 0: NVIDIA H100 (UUID: GPU-0a)\nGPU 1: NVIDIA H100 (UUID: GPU-0b)\n"


@pytest.fixture(autouse=True)
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds for GPUs are installed, as far as the plan knows."""
    monkeypatch.setattr(machine, "installed", {"vllm": "0.32.0", "torch": "2.13.0"}.get)


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
    assert ThisMachine().look() == Gpus(problem=want)


def test_what_nvidia_smi_prints_is_what_the_probe_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        f"#!/bin/sh\ncase \"$1\" in --query-gpu*) printf '{ROWS}';; -L) printf '{LIST}';; *) printf '{HEADER}';; esac\n"
    )
    (tmp_path / "nvidia-smi").write_text(program.replace("\n'", "'"))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(devices, "ask_torch", lambda: TORCH)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ThisMachine().look() == BOX
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert ThisMachine().look() == replace(BOX, visible=("1",))
