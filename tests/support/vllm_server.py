"""vLLM's own OpenAI server as a process: what users put a judge or a teacher into."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bapo.runtime.rank_environment import free_port
from rollout_server.engines.vllm import ENVIRONMENT
from tests.support.wait import wait_until

START_S = 180.0


@contextmanager
def vllm_server(model: Path, name: str, log: Path, *arguments: str) -> Iterator[str]:
    """Serve `model` as `name` on loopback, and write its output to `log`.

    Returns: the URL with /v1.
    Raises: AssertionError with the end of the log if the server ends before it is up.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", *arguments),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=_environment(), stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            return bool(urllib.request.urlopen(f"{url}/health", timeout=1).status == 200)
        except OSError:
            return False

    try:
        wait_until(is_ready, timeout_s=START_S)
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait(30)


def _environment() -> dict[str, str]:
    """Ours, without PYTHONPATH: the torchvision there may be built for CUDA, and a server of vLLM's own then fails."""
    others = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return others | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"}
