"""A learner that runs out of memory says which settings need less, and how they are set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bapo.config.learner import LearnerConfig
from bapo.config.tree import Config
from bapo.core.errors import OutOfMemoryError, UnavailableError
from bapo.runtime.process import run_process
from learner import __main__ as learner_main
from learner import startup
from learner.startup import out_of_memory

OF_TORCH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is free"
    ". Of the allocated memory 70.00 GiB is allocated by PyTorch. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
ON_CPUS = (
    "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
)


def told(error: RuntimeError, **settings: Any) -> Exception | None:
    return out_of_memory(error, LearnerConfig(**settings), rank=1, device=torch.device("cuda", 1))


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError(OF_TORCH), RuntimeError("CUDA error: out of memory"), RuntimeError(ON_CPUS)],
)
def test_a_refused_allocation_names_the_settings_with_their_values(error: RuntimeError) -> None:
    found = told(error, microbatch_tokens=4096, logprob_chunk_tokens=512, num_ranks=2)
    assert isinstance(found, OutOfMemoryError)
    assert isinstance(found, UnavailableError)
    for words in (
        "rank 1 of the learner on cuda: ",
        ". Start a new run with: ",
        "learner.gradient_checkpointing = true (now auto)",
        "learner.microbatch_tokens (now 4096)",
        "learner.logprob_chunk_tokens (now 512)",
        "learner.num_ranks (now 2)",
    ):
        assert words in str(found)


def test_another_error_is_none_of_memory() -> None:
    assert told(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


def run_learner(error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's process, in which training raises `error`."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(startup, "_run", fail)
    monkeypatch.setattr(startup.StopFlag, "install", lambda self: None)
    monkeypatch.setattr("bapo.runtime.process.load_resolved", lambda path: Config())
    (tmp_path / "run").mkdir()
    argv = ["--config", "config.toml", "--run-dir", str(tmp_path / "run")]
    run_process("learner", learner_main.main, add_flags=learner_main._add_flags, argv=argv)


def test_the_process_ends_with_its_exit_code_and_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_learner(torch.OutOfMemoryError(OF_TORCH), tmp_path, monkeypatch)
    assert ended.value.code == 3
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert line.getMessage().startswith("OutOfMemoryError: rank 0 of the learner on cpu: CUDA out of memory.")
    assert line.exc_info is None


def test_an_error_that_is_a_bug_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run_learner(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), tmp_path, monkeypatch)
