"""A teacher behind HTTP: its log-probs reach the group, and what it fails to say is never a number."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo.config.distillation import DistillationConfig
from bapo.config.tree import Config
from bapo.core.errors import ConfigError, ContractError, UnavailableError
from bapo.core.types import Purpose
from bapo.runtime.rank_environment import free_port
from bapo.transport.teacher_client import TeacherClient
from rollout_server.engines import scripted
from rollout_server.worker import Worker
from services.launcher.doctor.file_tokenizer import FileTokenizer
from services.launcher.doctor.situation import Situation
from services.launcher.doctor.teacher_checks import teacher as teacher_check
from tests.support.factories import make_request
from tests.support.rollout import InstantGrader, MemoryBuffer, make_config
from tests.support.teacher import Teacher, score, serving
from tests.support.wait import wait_until

MODEL = Path("models/chain-tiny")


@pytest.fixture
def teacher() -> Iterator[Teacher]:
    with serving(Teacher()) as state:
        yield state


def client_of(teacher: Teacher, **settings: Any) -> TeacherClient:
    return TeacherClient(DistillationConfig(teacher=teacher.url, timeout_s=5.0, **settings))


# -- the client


def test_each_response_gets_the_log_probs_of_its_own_tokens(teacher: Teacher) -> None:
    found = client_of(teacher).logprobs([1, 2], [[3], [4, 5, 16]])
    assert [scores.tolist() for scores in found] == [[-0.75], [-1.0, -1.25, 0.0]]
    assert teacher.asked[0]["prompt"] == [[1, 2, 3], [1, 2, 4, 5, 16]]
    assert teacher.asked[0]["model"] == "teacher"


def remove_entry(choices: list[dict[str, Any]]) -> None:
    choices[0]["prompt_logprobs"].pop()


def other_token(choices: list[dict[str, Any]]) -> None:
    choices[0]["prompt_logprobs"][-1] = {"9": {"logprob": -1.0}}


def null_entry(choices: list[dict[str, Any]]) -> None:
    choices[0]["prompt_logprobs"][-1] = None


def minus_infinity(choices: list[dict[str, Any]]) -> None:
    choices[0]["prompt_logprobs"][-1]["3"]["logprob"] = -9999.0


def positive(choices: list[dict[str, Any]]) -> None:
    choices[0]["prompt_logprobs"][-1]["3"]["logprob"] = 2.5


def one_less(choices: list[dict[str, Any]]) -> None:
    choices.pop()


def same_index(choices: list[dict[str, Any]]) -> None:
    choices[1]["index"] = 0


@pytest.mark.parametrize(
    "change", [remove_entry, other_token, null_entry, minus_infinity, positive, one_less, same_index]
)
def test_an_answer_about_other_tokens_is_refused(teacher: Teacher, change: Any) -> None:
    teacher.change = change
    with pytest.raises(ContractError, match=teacher.url):
        client_of(teacher).logprobs([1], [[3], [4]])


NAN = b'{"choices": [{"index": 0, "prompt_logprobs": [null, {"3": {"logprob": NaN}}]}]}'
NOT_VLLM = b'{"choices": [{"index": 0, "text": "3", "logprobs": null}]}'
WORDS = json.dumps({"choices": [{"index": 0, "prompt_logprobs": [None, {"3": {"logprob": "-1"}}]}]}).encode()


@pytest.mark.parametrize("fault", [401, 404, 429, 500, 503, b"<html>sign in", b'{"choices": [', NAN, NOT_VLLM, WORDS])
def test_what_may_pass_is_worth_waiting_for(teacher: Teacher, fault: int | bytes) -> None:
    teacher.faults = itertools.repeat(fault)
    with pytest.raises(UnavailableError, match=teacher.url):
        client_of(teacher).logprobs([1], [[3]])


def test_a_request_that_the_teacher_refuses_is_not_repeated(teacher: Teacher) -> None:
    teacher.faults = itertools.repeat(400)
    with pytest.raises(ContractError, match="HTTP 400"):
        client_of(teacher).logprobs([1], [[3]])


def test_a_model_that_the_server_does_not_have_is_named(teacher: Teacher) -> None:
    with pytest.raises(ConfigError, match="has no model 'big'; it has teacher"):
        client_of(teacher, model="big").model()


def test_the_key_comes_from_the_environment(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(ConfigError, match="TEACHER_KEY"):
        client_of(teacher, api_key_env="TEACHER_KEY")
    monkeypatch.setenv("TEACHER_KEY", "secret")
    client_of(teacher, api_key_env="TEACHER_KEY").model()
    assert teacher.keys == {"Bearer secret"}


# -- the worker


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("rollout_server.rollouts.taught.FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr("rollout_server.rollouts.taught.LONGEST_PAUSE_S", 0.05)
    workers: list[Worker] = []

    def begin(buffer: MemoryBuffer, url: str, **rollout: Any) -> Worker:
        settings = DistillationConfig(teacher=url, timeout_s=5.0)
        worker = Worker(
            worker_id="worker-0",
            config=make_config(**rollout).model_copy(update={"distillation": settings}),
            buffer=buffer,
            make_engine=scripted.make_engine,
            make_tokenization=scripted.make_tokenization,
            make_grader=lambda _: InstantGrader(),
        )
        workers.append(worker)
        worker.load()
        worker.begin(None)
        return worker

    yield begin
    for worker in workers:
        worker.stop()


def test_a_group_has_the_teachers_log_probs_and_an_evaluation_has_none(teacher: Teacher, start: Any) -> None:
    evaluated = make_request(prompt_id="e", purpose=Purpose.EVALUATE, label="cd34@1")
    buffer = MemoryBuffer([make_request(prompt_id="p0"), evaluated])
    start(buffer, teacher.url)
    wait_until(lambda: len(buffer.groups) == 2)
    group = buffer.groups["g-p0"]
    assert group.teacher_logprobs is not None
    want = np.array([score(token) for token in group.token_ids.tolist()], np.float32)
    np.testing.assert_array_equal(group.teacher_logprobs, want)
    assert buffer.groups["g-e"].teacher_logprobs is None


def test_while_the_teacher_is_away_groups_wait_and_evaluations_do_not(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    buffer = MemoryBuffer([make_request(prompt_id=f"p{i}") for i in range(3)])
    worker = start(buffer, f"http://127.0.0.1:{port}/v1")
    where = f"3 groups are waiting for the teacher: no answer from http://127.0.0.1:{port}/v1/models"
    wait_until(lambda: worker.report().waiting_for.startswith(where))
    buffer.add([make_request(prompt_id="e", purpose=Purpose.EVALUATE, label="cd34@1")])
    wait_until(lambda: set(buffer.groups) == {"g-e"})
    assert (len(buffer.leased), buffer.failures) == (3, [])
    assert len([line for line in caplog.messages if "are waiting for the teacher" in line]) == 1
    with serving(Teacher(), port):
        wait_until(lambda: len(buffer.groups) == 4)
    assert worker.report().waiting_for == ""
    assert all(group.teacher_logprobs is not None for name, group in buffer.groups.items() if name != "g-e")
    assert worker.report().counts["groups/fresh/stored"] == 3


def test_groups_that_wait_do_not_keep_the_engine_from_sampling_others_up_to_a_limit(start: Any) -> None:
    buffer = MemoryBuffer([make_request(prompt_id=f"p{i}") for i in range(50)])
    worker = start(buffer, f"http://127.0.0.1:{free_port()}/v1", max_groups_in_flight=4)
    wait_until(lambda: worker.report().waiting_for.startswith("9 groups"))  # 2 x 4, and a quarter ahead
    assert len(buffer.leased) == 9


def test_a_teacher_that_fails_in_a_third_of_its_calls_loses_no_group(teacher: Teacher, start: Any) -> None:
    teacher.faults = itertools.cycle([None, 500, None, None, b"<html>", None])
    buffer = MemoryBuffer([make_request(prompt_id=f"p{i}") for i in range(20)])
    start(buffer, teacher.url)
    wait_until(lambda: len(buffer.groups) == 20)
    assert buffer.failures == []
    for group in buffer.groups.values():
        assert group.teacher_logprobs is not None
        assert group.teacher_logprobs.tolist() == [score(token) for token in group.token_ids.tolist()]


def test_a_group_that_the_teacher_cannot_score_is_reported_and_never_pushed(teacher: Teacher, start: Any) -> None:
    teacher.change = one_less
    buffer = MemoryBuffer([make_request(prompt_id="p0")])
    worker = start(buffer, teacher.url)
    wait_until(lambda: len(buffer.failures) == 1)
    ((group_id, reason, detail),) = buffer.failures
    assert (group_id, reason) == ("g-p0", "no_teacher")
    assert "answered 7 of 8 sequences" in detail
    assert (buffer.groups, worker.report().state) == ({}, "sampling")


# -- before the start


def checked(url: str, **situation: Any) -> Any:
    config = Config.model_validate({"model": {"path": str(MODEL)}, "distillation": {"teacher": url}})
    (check,) = teacher_check(Situation(config=config, **situation))
    return check


def test_a_teacher_with_the_models_tokenizer_is_accepted(teacher: Teacher) -> None:
    tokenizer = FileTokenizer(MODEL)
    teacher.tokenize = lambda text: tokenizer.encode(text, add_special_tokens=False)
    check = checked(teacher.url)
    assert check.status == "ok"
    assert "218 of the 218 tokens" in check.detail


def test_a_teacher_with_one_other_token_is_refused_with_its_place(teacher: Teacher) -> None:
    tokenizer = FileTokenizer(MODEL)
    fifty = tokenizer.encode("50", add_special_tokens=False)[0]
    teacher.tokenize = lambda text: [
        999 if token == fifty else token for token in tokenizer.encode(text, add_special_tokens=False)
    ]
    check = checked(teacher.url)
    assert check.status == "fail"
    assert f"the model has {fifty}, the teacher 999" in check.detail


def test_a_teacher_for_shorter_sequences_is_refused(teacher: Teacher) -> None:
    tokenizer = FileTokenizer(MODEL)
    teacher.tokenize = lambda text: tokenizer.encode(text, add_special_tokens=False)
    teacher.longest = 100
    check = checked(teacher.url)
    assert check.status == "fail"
    assert "--max-model-len 129" in check.detail


def test_a_server_without_log_probs_of_prompts_is_refused(teacher: Teacher) -> None:
    tokenizer = FileTokenizer(MODEL)
    teacher.tokenize = lambda text: tokenizer.encode(text, add_special_tokens=False)
    teacher.faults = itertools.repeat(NOT_VLLM)
    assert "did not answer as vLLM does" in checked(teacher.url).detail


def test_a_teacher_that_is_away_stops_a_start_and_not_a_resumed_run() -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    check = checked(url)
    assert (check.status, check.error) == ("fail", UnavailableError)
    assert f"{url}/models" in check.detail
    assert checked(url, is_resumed=True).status == "warn"


def test_a_run_without_a_learner_or_without_a_teacher_asks_none() -> None:
    config = Config.model_validate({"model": {"path": str(MODEL)}, "distillation": {}})
    assert list(teacher_check(Situation(config=config, has_learner=False))) == []
    assert list(teacher_check(Situation(config=Config()))) == []
