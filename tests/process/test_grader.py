"""Grading in processes: right rewards, and no verifier that misbehaves becomes a reward or stops the worker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import psutil
import pytest

from bapo.config.tree import TaskConfig
from bapo.core.errors import ConfigError
from bapo.tasks.base import ROW
from bapo.tasks.grading.pool import (
    GraderPool,
    UngradedError,
    VerifierKilledError,
    VerifierMemoryError,
    VerifierRaisedError,
    VerifierTimeoutError,
)
from tests.support.factories import make_prompt
from tests.support.wait import has_ended, wait_until

HERE = "tests.process.verifiers_that_misbehave"
MakePool = Callable[..., GraderPool]

WORKER = """
from bapo.config.tree import TaskConfig
from bapo.tasks.grading.pool import GraderPool
from tests.support.factories import make_prompt
pool = GraderPool(TaskConfig(reward="{reward}", grading_timeout_s={timeout_s}), num_children=1)
pool.grade(make_prompt(), ["{pid_file}"])
"""


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    pools = []

    def make(reward: str | None = None, *, timeout_s: float = 60.0, num_children: int = 1) -> GraderPool:
        dotted = f"{HERE}:{reward}" if reward else None
        pool = GraderPool(TaskConfig(reward=dotted, grading_timeout_s=timeout_s), num_children=num_children)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


def test_the_tasks_own_verifier_grades_each_response(make_pool: MakePool) -> None:
    texts = ["<answer>1+2+3</answer>", "<answer>1+2</answer>", "no answer", "<answer>3*2*1</answer>"]
    assert make_pool().grade(make_prompt(), texts).rewards.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_an_experts_solution_comes_from_the_task_and_is_rewarded(make_pool: MakePool) -> None:
    pool = make_pool()
    solution = pool.expert(make_prompt())
    assert solution is not None
    assert pool.grade(make_prompt(), [solution, "wrong"]).rewards.tolist() == [1.0, 0.0]


def test_a_users_reward_by_dotted_path_replaces_the_tasks(make_pool: MakePool) -> None:
    grades = make_pool("text_as_reward").grade(make_prompt(), ["0.25", "true", "0"])
    assert grades.rewards.tolist() == [0.25, 1.0, 0.0]


def test_what_numpy_gives_for_a_number_is_a_reward(make_pool: MakePool) -> None:
    texts = ["np.float32", "np.true", "np.false", "np.int", "array"]
    assert make_pool("text_as_reward").grade(make_prompt(), texts).rewards.tolist() == [0.5, 1.0, 0.0, 1.0, 0.25]


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("text", ""),
        ("array of two", ""),
        ("1.5", "; set task.reward_range to the range of your reward"),
        ("-0.1", "; set task.reward_range to the range of your reward"),
        ("nan", "; return None for a response that cannot be graded, 0 for an incorrect one"),
        ("np.nan", "; return None for a response that cannot be graded, 0 for an incorrect one"),
        ("inf", "; return None for a response that cannot be graded, 0 for an incorrect one"),
    ],
)
def test_what_is_no_number_in_0_to_1_is_an_error_and_not_a_reward(make_pool: MakePool, text: str, advice: str) -> None:
    pool = make_pool("text_as_reward")
    with pytest.raises(
        VerifierRaisedError, match=rf"not a number in \[0, 1\] \(on the response '{text}'\){advice} on prompt"
    ):
        pool.grade(make_prompt(), ["1", text])


def test_none_fails_the_group_under_a_reason_of_its_own_and_is_no_reward(make_pool: MakePool) -> None:
    pool = make_pool("text_as_reward")
    with pytest.raises(UngradedError, match="left 1 of 3 responses ungraded") as caught:
        pool.grade(make_prompt(), ["1", "none", "0"])
    assert caught.value.reason == "ungraded"
    assert pool.grade(make_prompt(), ["1", "0"]).rewards.tolist() == [1.0, 0.0]


def test_a_verifier_that_raises_is_named_with_its_message_and_the_prompt(make_pool: MakePool) -> None:
    pool = make_pool("obey")
    with pytest.raises(VerifierRaisedError, match=r"ValueError: cannot read this.*on prompt p7") as caught:
        pool.grade(make_prompt(prompt_id="p7"), ["fine", "raise"])
    assert caught.value.reason == "verifier_error"
    assert pool.grade(make_prompt(), ["fine"]).rewards.tolist() == [1.0]


def test_a_verifier_that_hangs_is_killed_at_the_deadline_and_replaced(make_pool: MakePool) -> None:
    pool = make_pool("obey", timeout_s=3.0)
    pool.grade(make_prompt(), ["fine"])
    began = time.monotonic()
    with pytest.raises(VerifierTimeoutError, match=r"3 s") as caught:
        pool.grade(make_prompt(), ["hang"])
    assert 3.0 <= time.monotonic() - began < 30
    assert caught.value.reason == "verifier_timeout"
    assert pool.grade(make_prompt(), ["fine"]).rewards.tolist() == [1.0]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_verifier_that_takes_too_much_memory_is_killed_and_has_rewarded_nothing(where: str) -> None:
    with closing(GraderPool(TaskConfig(reward=f"{HERE}:hungry", grading_memory_mb=300), num_children=1)) as pool:
        with pytest.raises(
            VerifierMemoryError, match=r"because of its memory use of \d+ MB, above .*_mb = 300, on prompt"
        ) as e:
            pool.grade(make_prompt(), ["fine", where])
        assert e.value.reason == "verifier_out_of_memory"
        assert pool.grade(make_prompt(), ["fine"]).rewards.tolist() == [1.0]


def test_a_verifier_whose_process_dies_while_it_starts_has_graded_nothing(make_pool: MakePool) -> None:
    pool = make_pool("obey")
    with pytest.raises(VerifierKilledError, match="exited with code 7 while grading") as caught:
        pool.grade(make_prompt(), ["exit"])
    assert caught.value.reason == "verifier_killed"
    (its_successor,) = pool._children
    its_successor._process.kill()
    with pytest.raises(VerifierKilledError, match="exited with code -9 before it was ready to grade"):
        pool.grade(make_prompt(), ["fine"])
    assert pool.grade(make_prompt(), ["fine"]).rewards.tolist() == [1.0]


def test_a_failure_names_the_row_of_the_dataset() -> None:
    prompt = msgspec.structs.replace(make_prompt(), answer={"answer": "2", ROW: "train.parquet row 17"})
    pool = GraderPool(TaskConfig(reward=f"{HERE}:obey"), num_children=1)
    try:
        with pytest.raises(VerifierRaisedError) as caught:
            pool.grade(prompt, ["raise"])
    finally:
        pool.close()
    message = str(caught.value)
    assert "the reward 'tests.process.verifiers_that_misbehave:obey' raised ValueError" in message
    assert re.search(r"\(verifiers_that_misbehave\.py line \d+\)", message)
    assert message.endswith("on prompt p (train.parquet row 17)")


def test_a_reward_that_does_not_exist_refuses_to_start(make_pool: MakePool) -> None:
    with pytest.raises(ConfigError, match="no_such_reward"):
        make_pool("no_such_reward")


def test_closing_the_pool_leaves_no_process(make_pool: MakePool) -> None:
    before = {child.pid for child in psutil.Process().children()}
    pool = make_pool("obey", num_children=2)
    children = [child for child in psutil.Process().children() if child.pid not in before]
    assert len(children) == 2
    pool.close()
    assert not any(child.is_running() for child in children)


def test_the_kernel_would_kill_a_grader_before_its_worker(make_pool: MakePool) -> None:
    before = {child.pid for child in psutil.Process().children()}
    make_pool("obey")
    (child,) = (child for child in psutil.Process().children() if child.pid not in before)
    assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "1000\n"


def named_in(pid_file: Path) -> psutil.Process:
    wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
    return psutil.Process(int(pid_file.read_text()))


@pytest.mark.parametrize(("reward", "timeout_s"), [("pid", 600), ("child", 600), ("endless_pattern", 1)])
def test_a_grader_and_what_it_started_die_with_its_worker_even_inside_an_endless_verifier(
    tmp_path: Path, reward: str, timeout_s: float
) -> None:
    pid_file = tmp_path / "pid"
    script = WORKER.format(reward=f"{HERE}:{reward}", pid_file=pid_file, timeout_s=timeout_s)
    worker = subprocess.Popen([sys.executable, "-c", script])
    try:
        found = named_in(pid_file)
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: has_ended(found), timeout_s=20.0)


def test_what_a_hung_verifier_has_started_is_killed_with_it(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool("child", timeout_s=2.0)
    with pytest.raises(VerifierTimeoutError):
        pool.grade(make_prompt(), [str(tmp_path / "pid")])
    started = named_in(tmp_path / "pid")
    wait_until(lambda: has_ended(started), timeout_s=20.0)


def test_a_grader_that_does_not_even_read_is_killed_at_the_deadline(make_pool: MakePool) -> None:
    before = {child.pid for child in psutil.Process().children()}
    pool = make_pool("obey", timeout_s=1.0)
    (child,) = (child for child in psutil.Process().children() if child.pid not in before)
    child.suspend()
    with pytest.raises(VerifierTimeoutError):
        pool.grade(make_prompt(), ["x" * 200_000])  # more than the pipe holds
    assert pool.grade(make_prompt(), ["x"]).rewards.tolist() == [1.0]


def test_a_verifier_that_hangs_when_the_pool_is_closed_is_not_replaced(make_pool: MakePool) -> None:
    before = {child.pid for child in psutil.Process().children()}
    pool = make_pool("obey")
    failed: list[Exception] = []

    def hang() -> None:
        try:
            pool.grade(make_prompt(), ["hang"])
        except VerifierKilledError as error:
            failed.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    wait_until(lambda: pool._idle.empty())
    pool.close()
    thread.join(60.0)
    assert len(failed) == 1
    assert {child.pid for child in psutil.Process().children()} <= before


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("speechless", r"raised SpeechlessError: \(message not printable: RuntimeError\)"),
        ("long", r"raised ValueError: x{500}\.\.\. \(20000000 characters\)"),
        ("half", r"raised ValueError: half a character: \\ud800"),
        ("integer", r"returned a int that is not printable \(ValueError\), which is not a number in \[0, 1\]"),
        ("fraction", r"returned Fraction\(10+, 1\), which is not a number"),
    ],
)
def test_what_cannot_be_shown_is_the_verifiers_error_in_few_words(make_pool: MakePool, text: str, told: str) -> None:
    pool = make_pool("unspeakable")
    grader = pool._children[0]
    with pytest.raises(VerifierRaisedError, match=told) as caught:
        pool.grade(make_prompt(), [text])
    assert len(str(caught.value)) < 1000
    assert pool.grade(make_prompt(), ["fine"]).rewards.tolist() == [1.0]
    assert pool._children[0] is grader, "it had not to be replaced"


def test_a_copy_that_a_verifier_forks_answers_nothing_and_ends(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool("forks")
    assert pool.grade(make_prompt(), [str(tmp_path / "pid")]).rewards.tolist() == [0.5]
    wait_until(lambda: has_ended(named_in(tmp_path / "pid")))
    assert [pool.grade(make_prompt(), ["fine"]).rewards.tolist() for _ in range(3)] == [[1.0]] * 3


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt also where a shell runs the tests in the background, and they ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_the_answer_to_a_question_that_was_interrupted_is_not_taken_for_the_next_ones(make_pool: MakePool) -> None:
    pool = make_pool("late")
    assert pool.grade(make_prompt(), ["fine"]).rewards.tolist() == [1.0]
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pool.grade(make_prompt(), ["late"])
    assert pool.grade(make_prompt(), ["fine"]).rewards.tolist() == [1.0]


def test_a_grader_that_has_closed_its_pipe_and_does_not_end_is_killed(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bapo.tasks.grading.pool.END_S", 0.5)
    pool = make_pool("closes")
    with pytest.raises(VerifierKilledError, match="closed the pipe to its worker while grading and was killed"):
        pool.grade(make_prompt(), ["close"])
    assert pool.grade(make_prompt(), ["fine"]).rewards.tolist() == [1.0]


def test_what_a_verifier_prints_does_not_disturb_the_rewards(make_pool: MakePool) -> None:
    assert make_pool("obey").grade(make_prompt(), ["print", "fine"]).rewards.tolist() == [1.0, 1.0]


def test_a_response_that_keeps_mathematics_busy_is_incorrect_and_its_siblings_keep_their_rewards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each of the 3 responses may take a quarter of the group's 24 s."""
    task = TaskConfig(reward="bapo.tasks.mathematics:boxed", grading_timeout_s=24.0)
    prompt = msgspec.structs.replace(make_prompt(prompt_id="p7"), answer={"answer": "x^2-1", ROW: "train.jsonl row 3"})
    with closing(GraderPool(task, num_children=1)) as pool:
        grades = pool.grade(prompt, ["\\boxed{(x-1)(x+1)}", "\\boxed{9^{9^{9^9}}}", "\\boxed{x^2+1}"])
        again = pool.grade(prompt, ["\\boxed{(x+1)(x-1)}"])
    assert (grades.rewards.tolist(), grades.num_busy) == ([1.0, 0.0, 0.0], 1)
    assert (again.rewards.tolist(), again.num_busy) == ([1.0], 0)
    (line,) = [record.message for record in caplog.records]
    assert "'9^{9^{9^9}}'" in line
    assert "incorrect" in line
    assert "p7 (train.jsonl row 3)" in line
