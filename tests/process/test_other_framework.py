"""The example of another framework's training loop, as its readers run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from bapo.transport.buffer_admin import BufferAdmin
from bapo.transport.buffer_client import BufferClient
from tests.buffer_app import serving, small_config
from tests.buffer_setup import new_store

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "other_framework.py"
STEP = re.compile(r"step +(\d+)  x1 +(\d+)  x2 +(\d+)  x3 +(\d+)  reward ([\d.]+)  hard prompts (\d+)")


def run_example(client: BufferClient, num_steps: int) -> list[tuple[int, ...]]:
    """(step, x1, x2, x3) of every line that it prints."""
    command = [sys.executable, str(EXAMPLE), client.url, str(num_steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=EXAMPLE.parents[1])
    assert done.returncode == 0, done.stderr
    return [tuple(map(int, found[:4])) for found in STEP.findall(done.stdout)]


def test_a_loop_of_forty_lines_trains_on_the_buffer_alone_and_goes_on_where_it_was(redis_url: str) -> None:
    config = small_config(algorithm={"batch_size": 16}, learner={"minibatch_size": 1})
    with serving(new_store(redis_url), config) as client:
        first = run_example(client, 20)
        assert [step for step, *_ in first] == list(range(1, 21))
        assert all(x1 + x2 + x3 <= 16 for _, x1, x2, x3 in first)
        x1, x2, x3 = (sum(line[i] for line in first) for i in (1, 2, 3))
        assert min(x1, x2, x3) > 0, "one of the three parts of the batch never came"
        status = client.status()
        assert (status.committed_step, status.checkpointed_step, status.fresh_ready) == (20, 20, 0)
        assert BufferAdmin(client.url).verify().violations == []
        assert [step for step, *_ in run_example(client, 23)] == [21, 22, 23]
        assert run_example(client, 23) == []


def test_the_example_stays_small_enough_to_be_read() -> None:
    code = EXAMPLE.read_text().rpartition('"""\n\nimport')[2]
    lines = [line for line in code.splitlines() if line.strip()]
    loop = lines[lines.index("buffer = BufferClient(sys.argv[1])") :]
    assert (len(lines) <= 45, len(loop) <= 15) == (True, True)


def test_the_example_imports_none_of_the_heavy_packages(redis_url: str) -> None:
    heavy = {"torch", "ray", "vllm", "fastapi", "pydantic", "transformers"}
    with serving(new_store(redis_url), small_config(algorithm={"batch_size": 16})) as client:
        code = (
            f"import runpy, sys; sys.argv = ['x', {client.url!r}, '1']; runpy.run_path({str(EXAMPLE)!r}); "
            f"print(sorted({heavy} & set(sys.modules)))"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=EXAMPLE.parents[1])
    assert done.stdout.splitlines()[-1] == "[]"
