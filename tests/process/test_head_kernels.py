"""The head's Triton kernels give the numbers of float64, in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from learner.model import head_kernels
from tests.support.launch import REPOSITORY


def test_log_probs_entropies_and_gradients_are_those_of_float64() -> None:
    """On fresh random inputs, in Triton's interpreter, with words that are never sampled and a temperature."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.support.head_kernels"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["check"] < head_kernels.TOLERANCE, "the check at the start finds the same"
    assert found["logprobs"] < 1e-4, found
    assert found["entropies"] < 1e-4, found
    assert found["hidden"] < 1e-4, found
    assert found["head"] < 1e-4, found
