"""The coverage-guided fuzzer over everything that reads bytes, for some seconds (long runs: docs/threat_model.md)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RUNS = 100_000


def fuzz(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # No limit of memory: what libFuzzer reads is the peak of the process that started it, which has run other tests.
    limits = ("-len_control=0", "-max_len=4096", "-rss_limit_mb=0")
    command = [sys.executable, "-m", "tests.full.fuzz.codec", "-seed=7", *limits, *flags]
    return subprocess.run(
        [*command, f"-artifact_prefix={folder}/", str(folder / "corpus")],
        cwd=REPOSITORY,
        env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_no_bytes_make_the_codec_or_the_service_raise_anything_but_a_contract_error(tmp_path: Path) -> None:
    done = fuzz(tmp_path, f"-runs={RUNS}", "-timeout=10")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Done {RUNS} runs" in done.stderr
    found = [int(number) for number in re.findall(r"cov: (\d+)", done.stderr)]
    assert found[-1] > found[0] > 100  # it reaches our code, and learns


def test_reading_bytes_leaves_no_memory_behind(tmp_path: Path) -> None:
    done = fuzz(tmp_path, f"-runs={2 * RUNS}", BAPO_FUZZ_PLAIN="1")
    assert done.returncode == 0, done.stderr[-3000:]
    used = [int(number) for number in re.findall(r"rss_mb=(\d+)", done.stdout)]
    assert len(used) == 4
    assert used[-1] <= used[0] + 10  # a leak of 64 bytes per input would be 10 MB


def test_the_fuzzer_stops_at_an_exception_that_is_not_allowed(tmp_path: Path) -> None:
    done = fuzz(tmp_path, "-runs=5000", BAPO_FUZZ_STRICT="1")
    assert done.returncode != 0
    assert "ContractError" in done.stdout + done.stderr
    assert [path for path in tmp_path.iterdir() if path.name.startswith("crash-")]
