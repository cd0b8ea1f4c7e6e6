"""The end of a client: what it closes, in which processes it is used again, and what a cancelled wait leaves behind."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo import pulling
from bapo.clients import AsyncBufferClient, BufferClient
from tests.batchless_buffer import batchless_buffer
from tests.patience import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def url() -> Iterator[str]:
    with batchless_buffer(lambda path: 0.05 if "batches" in path else 0.0) as found:
        yield found


@pytest.mark.parametrize(
    "code",
    [
        "BufferClient(url).enqueue([])",
        "client = BufferClient(url); client.enqueue([])",
        "client = BufferClient(url); client.enqueue([]); os.fork() or client.enqueue([]); os.wait()",
        "with BufferClient(url) as client: client.enqueue([])",
        "asyncio.run(main(url))",
    ],
)
def test_no_socket_is_left_for_python_to_warn_of(url: str, code: str) -> None:
    program = f"""
import asyncio, contextlib, os, sys
from bapo.clients import AsyncBufferClient, BufferClient
url = sys.argv[1]
async def main(url):
    async with AsyncBufferClient(url) as client:
        await client.enqueue([])
with contextlib.suppress(ChildProcessError):
    {code}
"""
    # -X dev: warnings of resources, too
    command = [sys.executable, "-X", "dev", "-c", program, url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stderr == ""


def test_a_client_that_was_closed_goes_on(url: str) -> None:
    with BufferClient(url) as client:
        assert client.enqueue([]) == 3
    assert client.enqueue([]) == 3


def _accepted(client: BufferClient) -> int:
    return client.enqueue([])


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_other_processes_are_given_the_client_itself(url: str, how: str) -> None:
    client = BufferClient(url, retry_s=5.0)
    assert client.enqueue([]) == 3
    with multiprocessing.get_context(how).Pool(1) as pool:
        assert pool.apply(_accepted, (client,)) == 3


def test_a_copy_of_a_client_is_one_of_its_own_with_the_same_arguments() -> None:
    client = BufferClient("http://a:1,http://b:2", retry_s=5.0, token="x" * 20, direct="off")
    around = AsyncBufferClient("http://a:1", retry_s=5.0)
    for other in (pickle.loads(pickle.dumps(client)), copy.copy(client)):
        assert other._made_with == client._made_with
        assert other._nonces is not client._nonces
    assert pickle.loads(pickle.dumps(around)).blocking._made_with == around.blocking._made_with


def test_a_cancelled_wait_for_a_batch_ends_its_thread(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ask for the batch for another hour, and so would that of each further wait."""
    monkeypatch.setattr(pulling, "POLL_S", 0.1)

    async def impatient() -> None:
        client = AsyncBufferClient(url)
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.batch(1, timeout_s=3600.0), 0.02)

    asyncio.run(impatient())
    wait_until(
        lambda: not [each for each in threading.enumerate() if each.name == "bapo-call"], what="the end of the calls"
    )
