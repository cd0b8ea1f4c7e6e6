"""A Redis that comes back without its last second, under clients that go on: what was asked then is asked again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bapo.algorithms.composers.registry import load_composer
from bapo.config.tree import Config
from bapo.core.codec import pack_group
from bapo.core.types import Progress, Purpose
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.buffer_client import BufferClient
from services.evaluator.loop import Evaluator
from services.evaluator.plan import Target
from services.scheduler.loop import Scheduler
from services.scheduler.plan import FreshPlan
from tests.support.buffer import answer, new_store
from tests.support.buffer_app import serving
from tests.support.factories import make_prompt, make_request
from tests.support.learner import FakeFleet, learner_config, make_test_learner
from tests.support.redis_server import RedisServer
from tests.support.tiny_model import write_tiny_model
from tests.support.wait import PATIENCE_S, wait_until
from tests.unit.test_evaluator import TwoSplits

CONFIG = Config.model_validate(
    {
        "run": {"num_steps": 4},
        "algorithm": {"batch_size": 4, "max_reevaluated": 4},
        "cadence": {"weight_sync_interval": 1, "reevaluation_interval": 2, "max_steps_ahead": 0},
        "learner": {"minibatch_size": 4},
        "evaluation": {"temperatures": []},
    }
)
PROMPTS = [make_prompt(prompt_id=f"p{i}") for i in range(16)]


class ForgetfulRedis(RedisServer):
    """Its last second can be lost."""

    @property
    def _file(self) -> Path:
        (found,) = (self.folder / "appendonlydir").glob("*.incr.aof")
        return found

    def lose(self, calls: Callable[[], Any]) -> None:
        """Make these calls, and come back from a power failure before them."""
        kept = self._file.stat().st_size
        calls()
        self.kill()
        with self._file.open("r+b") as file:
            file.truncate(kept)
        self.start()


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[ForgetfulRedis]:
    server = ForgetfulRedis(tmp_path, aof=True, options=("--appendfsync", "always"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def buffer(forgetful: ForgetfulRedis) -> Iterator[BufferClient]:
    with serving(new_store(forgetful.url, in_step_order=True), CONFIG) as client:
        yield client


def answer_all(buffer: BufferClient, version: int, rewards: str) -> int:
    """What workers with these weights do. Returns: how many groups."""
    claimed = buffer.claim("w", limit=64, policy_version=version)
    buffer.push([pack_group(answer(request, rewards[: request.group_size], version=version)) for request in claimed])
    return len(claimed)


def work_until(buffer: BufferClient, is_over: Callable[[], bool]) -> None:
    """Answer whatever is asked for."""

    def work() -> bool:
        answer_all(buffer, 1, "11000000")
        return is_over()

    wait_until(work)


def train(buffer: BufferClient, step: int) -> None:
    buffer.batch(step, timeout_s=10.0)
    buffer.commit(step, checkpointed=0)


def test_a_re_evaluation_round_that_was_lost_is_issued_again(forgetful: ForgetfulRedis, buffer: BufferClient) -> None:
    scheduler = Scheduler(CONFIG, FreshPlan(CONFIG, PROMPTS), load_composer(CONFIG.algorithm), buffer, Telemetry())
    scheduler.poll(0)
    answer_all(buffer, 1, "00000000")
    buffer.report_progress(Progress(step=1, policy_version=1))
    scheduler.poll(1)
    train(buffer, 1)
    buffer.report_progress(Progress(step=2, policy_version=2))
    forgetful.lose(lambda: scheduler.poll(2))
    scheduler.poll(2)
    assert buffer.status().reevaluation_rounds == {2: 4}
    assert answer_all(buffer, 2, "11000000") == 8, "the round, and the fresh groups of step 2"
    assert buffer.batch(2, timeout_s=10.0).step == 2


def test_a_learner_that_waits_says_again_where_it_is(
    forgetful: ForgetfulRedis, buffer: BufferClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bapo.transport.buffer_client.POLL_S", 0.2)
    write_tiny_model(tmp_path / "model")
    learner = make_test_learner(learner_config(tmp_path / "model"), tmp_path, buffer=buffer, fleet=FakeFleet())
    forgetful.lose(lambda: buffer.report_progress(Progress(step=1, policy_version=1)))
    assert buffer.progress().step == 0
    waits = threading.Thread(target=learner.next_frame, args=(1,), daemon=True)
    waits.start()
    wait_until(lambda: buffer.progress().step == 1)
    buffer.enqueue([make_request(prompt_id=f"p{i}") for i in range(4)], cursor=4)
    answer_all(buffer, 1, "11000000")
    waits.join(PATIENCE_S)
    assert not waits.is_alive()


def test_an_evaluation_that_was_lost_is_asked_for_again(
    forgetful: ForgetfulRedis, buffer: BufferClient, tmp_path: Path
) -> None:
    run = RunDirectory.create(tmp_path / "run")
    evaluator = Evaluator(CONFIG, TwoSplits(), buffer, run, Telemetry())
    measures = threading.Thread(target=evaluator.measure, args=(Target(version=1, num_prompts=3),), daemon=True)

    def ask() -> None:
        measures.start()
        wait_until(lambda: buffer.status().num_open(Purpose.EVALUATE) == 6)

    forgetful.lose(ask)
    work_until(buffer, lambda: not measures.is_alive())
    assert [(row["split"], row["num_prompts"], row["num_dropped"]) for row in run.read_evaluations()] == [
        ("easy", 3, 0),
        ("hard", 3, 0),
    ]


def test_an_evaluation_goes_on_when_a_checkpoints_snapshot_is_restored(buffer: BufferClient, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    evaluator = Evaluator(CONFIG, TwoSplits(), buffer, run, Telemetry())
    measures = threading.Thread(target=evaluator.measure, args=(Target(version=1, num_prompts=3),), daemon=True)
    snapshot = buffer.snapshot()
    measures.start()
    wait_until(lambda: buffer.status().num_open(Purpose.EVALUATE) == 6)
    buffer.restore(snapshot)
    work_until(buffer, lambda: not measures.is_alive())
    assert len(run.read_evaluations()) == 2
