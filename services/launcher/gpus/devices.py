"""The GPUs of this machine, and whether torch can use them.

    nvidia-smi --(names, memory, driver)------------------------+
                                                                +--> Gpus --gpu_checks (pure)--> lines of `bapo doctor`
    torch, in another process --(one addition on each GPU)------+

torch runs in another process: an incompatible driver may hang or kill the process that uses it.
Does not cover: other vendors, memory of MIG slices, interconnects, NCCL.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bapo.runtime.machine import num_gpu_files
from services.launcher.gpus.plan import VISIBLE, visible_gpus

SMI_TIMEOUT_S = 20.0
TORCH_TIMEOUT_S = 120.0
ASK_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "count": 0, "error": ""}
if torch.version.cuda:
    try:
        torch.cuda.init()
        found["count"] = torch.cuda.device_count()
        for i in range(found["count"]):
            torch.ones(1, device=i).add(1).item()
    except Exception as error:  # torch and drivers raise anything; it becomes a line of `bapo doctor`
        found["error"] = str(error).splitlines()[0]
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    version: str
    cuda: str | None
    """CUDA version of the build, e.g. `12.9`; None: a CPU build."""
    count: int = 0
    error: str = ""
    """Why torch cannot use the GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    gpus: tuple[Gpu, ...] = ()
    visible: tuple[str, ...] = ()
    """GPUs visible through CUDA_VISIBLE_DEVICES, by their ids there."""
    driver: str = ""
    problem: str = ""
    """Why the driver does not respond, if there is one."""
    torch: Torch | None = None
    """None: not installed, or no response."""


def probe_gpus() -> Gpus:
    """Probe the GPUs of this machine. Takes seconds to import torch."""
    torch = ask_torch()
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return Gpus(torch=torch)
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    code, rows, said = _asked([smi, *query], SMI_TIMEOUT_S)
    if code:
        first = next(iter((rows or said).strip().splitlines()), f"exit code {code}")
        return Gpus(problem=f"nvidia-smi: {first}", torch=torch)
    return replace(parse_smi(rows, torch), visible=visible_here())


def visible_here(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """GPUs usable by the run's processes, by their ids in CUDA_VISIBLE_DEVICES. Takes up to a second."""
    outer = environment.get(VISIBLE)
    return () if outer == "" else visible_gpus(present_gpus(), outer)


def present_gpus() -> tuple[str, ...]:
    """GPUs of this machine, as in `parse_list`; without nvidia-smi, counted from device files."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return tuple(map(str, range(num_gpu_files())))
    code, rows, _ = _asked([smi, "-L"], SMI_TIMEOUT_S)
    return () if code else parse_list(rows)


def parse_list(rows: str) -> tuple[str, ...]:
    """Parse `nvidia-smi -L`: indices of GPUs, or the ids of the MIG slices of a partitioned GPU."""
    found: list[str] = []
    for row in rows.splitlines():
        if gpu := re.match(r"GPU (\d+):", row):
            found.append(gpu[1])
        elif mig := re.search(r"UUID: (MIG-[^)\s]+)", row):
            if found and found[-1].isdigit():
                found.pop()  # the partitioned GPU
            found.append(mig[1])
    return tuple(found)


def parse_smi(rows: str, torch: Torch | None) -> Gpus:
    """Parse nvidia-smi's output: one row per GPU."""
    gpus, driver = [], ""
    for row in filter(None, map(str.strip, rows.splitlines())):
        name, memory, driver = (field.strip() for field in row.rsplit(",", 2))
        if memory.isdigit():
            gpus.append(Gpu(name=name, memory_mib=int(memory)))
    return Gpus(gpus=tuple(gpus), driver=driver, torch=torch)


def ask_torch() -> Torch | None:
    """Probe the installed torch in a separate process; None if it is not installed."""
    code, answer, said = _asked([sys.executable, "-c", ASK_TORCH], TORCH_TIMEOUT_S)
    lines = answer.strip().splitlines()
    if code or not lines:
        if "No module named 'torch'" in said:
            return None
        last = said.strip().splitlines()[-1:] or [f"exit code {code}"]
        return Torch(version="?", cuda="?", error=f"torch crashed while probing GPUs: {last[0]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return Torch(**found)


def _asked(command: list[str], timeout_s: float) -> tuple[int, str, str]:
    """(exit code, standard output, standard error); special codes for a command that hangs or cannot start."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return 124, "", f"no response within {timeout_s:.0f} s"
    except OSError as error:
        return 126, "", str(error)
    return done.returncode, done.stdout, done.stderr
