"""The asyncio client is the same client: same methods, same arguments, and no task waits for another one's call."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo.clients import AsyncBufferClient, BufferClient
from bapo.errors import UnavailableError
from tests.batchless_buffer import batchless_buffer

ANSWER_S = 2.0
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def slow_url() -> Iterator[str]:
    with batchless_buffer(lambda path: ANSWER_S) as url:
        yield url


def public_methods(cls: type) -> dict[str, list[str]]:
    """Name -> names of the arguments."""
    return {
        name: list(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    assert public_methods(AsyncBufferClient) == public_methods(BufferClient)
    assert "claim" in public_methods(AsyncBufferClient)
    assert all(inspect.iscoroutinefunction(getattr(AsyncBufferClient, name)) for name in public_methods(BufferClient))


def test_calls_of_several_tasks_run_side_by_side(slow_url: str) -> None:
    async def gathered() -> list[int]:
        client = AsyncBufferClient(slow_url)
        return await asyncio.gather(*(client.enqueue([], cursor=i) for i in range(8)))

    started = time.monotonic()
    assert asyncio.run(gathered()) == [3] * 8
    assert time.monotonic() - started < 4 * ANSWER_S  # one after the other: 8


def test_a_cancelled_task_ends_at_once(slow_url: str) -> None:
    async def cancelled() -> None:
        await asyncio.wait_for(AsyncBufferClient(slow_url).enqueue([]), 0.05)

    started = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert time.monotonic() - started < ANSWER_S


def test_reasons_of_a_wait_are_told_in_the_event_loop(slow_url: str) -> None:
    heard: list[tuple[str, bool]] = []

    async def wait() -> None:
        here = threading.get_ident()
        client = AsyncBufferClient(slow_url)
        await client.batch(1, timeout_s=0.2, on_wait=lambda text: heard.append((text, threading.get_ident() == here)))

    with pytest.raises(Exception, match=r"batch 1 did not come, and nothing moved for 0 s: 0/4"):
        asyncio.run(wait())
    assert heard == [("0/4", True)]


def test_errors_are_raised_where_the_call_is_awaited() -> None:
    async def call() -> None:
        await AsyncBufferClient("http://127.0.0.1:1", retry_s=0.0).status()

    with pytest.raises(UnavailableError, match=r"the buffer service at http://127.0.0.1:1 does not answer"):
        asyncio.run(call())


def test_the_clients_import_none_of_the_heavy_packages() -> None:
    heavy = {"torch", "vllm", "ray", "redis", "fastapi", "transformers", "pydantic", "typer", "pyarrow"}
    code = f"import bapo.clients, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.strip() == "[]"
