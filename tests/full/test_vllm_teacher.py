"""A teacher in vLLM's own server: its log-probs of the tokens of another model are those of transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bapo.config.distillation import DistillationConfig
from bapo.config.tree import Config
from bapo.core.errors import UnavailableError
from bapo.runtime.rank_environment import free_port
from bapo.transport.teacher_client import TeacherClient
from services.launcher.doctor.situation import Situation
from services.launcher.doctor.teacher_checks import teacher as teacher_check
from tests.support.tiny_model import reference_logprobs
from tests.support.wait import wait_until

MODEL = Path("models/chain-tiny")
START_S = 180.0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    port = free_port()
    options = {"--model": MODEL, "--port": port, "--max-model-len": 129, "--dtype": "float32", "--max-num-seqs": 32}
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--served-model-name", "big"]
        + [str(word) for option in options.items() for word in option],
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    )
    url = f"http://127.0.0.1:{port}/v1"
    try:
        wait_until(lambda: process.poll() is not None or is_up(url), timeout_s=START_S)
        assert process.poll() is None
        yield url
    finally:
        process.terminate()
        process.wait(30)


def is_up(url: str) -> bool:
    try:
        client_of(url).model()
    except UnavailableError:
        return False
    return True


def client_of(url: str) -> TeacherClient:
    return TeacherClient(DistillationConfig(teacher=url))


def test_the_log_probs_of_a_teacher_are_those_of_transformers(address: str) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(4, 200, 9).tolist()
    responses = [rng.integers(4, 200, size).tolist() for size in (1, 7, 64, 30)]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for response, found in zip(responses, client_of(address).logprobs(prompt, responses), strict=True):
        want = reference_logprobs(model, [*prompt, *response])[-len(response) :]
        np.testing.assert_allclose(found, want, atol=1e-3)


@pytest.mark.parametrize(("model", "status"), [("chain-tiny", "ok"), ("countdown-tiny", "ok"), ("lookup-tiny", "fail")])
def test_only_a_model_with_the_teachers_tokenizer_may_learn_from_it(address: str, model: str, status: str) -> None:
    config = Config.model_validate({"model": {"path": f"models/{model}"}, "distillation": {"teacher": address}})
    (check,) = teacher_check(Situation(config=config))
    assert check.status == status, check.detail
    assert ("another tokenizer" in check.detail) == (status == "fail")
