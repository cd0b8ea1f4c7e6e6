"""A teacher in vLLM's own server: its log-probs of the tokens of another model are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bapo.config.distillation import DistillationConfig
from bapo.config.tree import Config
from bapo.transport.teacher_client import TeacherClient
from services.launcher.doctor.situation import Situation
from services.launcher.doctor.teacher_checks import teacher as teacher_check
from tests.support.tiny_model import reference_logprobs
from tests.support.vllm_server import vllm_server

MODEL = Path("models/chain-tiny")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("teacher") / "log"
    options = ("--max-num-seqs", "32", "--max-model-len", "129", "--kv-cache-memory-bytes", str(256 << 20))
    with vllm_server(MODEL, "big", log, *options) as url:
        yield url


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
