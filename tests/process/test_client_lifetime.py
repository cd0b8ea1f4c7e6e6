"""The end of a client: what it closes, in which processes it is used again, and what a cancelled wait leaves behind."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo.transport.buffer_client import BufferClient
from tests.support.batchless_buffer import batchless_buffer

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
    ],
)
def test_no_socket_is_left_for_python_to_warn_of(url: str, code: str) -> None:
    program = f"""
import contextlib, os, sys
from bapo.transport.buffer_client import BufferClient
url = sys.argv[1]
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
    for other in (pickle.loads(pickle.dumps(client)), copy.copy(client)):
        assert other._arguments == client._arguments
        assert other._claim_keys is not client._claim_keys
