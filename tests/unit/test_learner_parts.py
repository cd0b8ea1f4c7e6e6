"""Small parts of the learner: a signal that ends a wait, the GPU of a rank, the learning rate of a step."""

from __future__ import annotations

import io
import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch

from bapo.config.learner import LearnerConfig
from bapo.core.errors import ConfigError
from learner.distributed.stopping import StopFlag, Stopped
from learner.distributed.world import pick_device
from learner.update.update import lr_at


@pytest.fixture
def stop() -> Iterator[StopFlag]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    flag = StopFlag()
    flag.install()
    yield flag
    for number, handler in before.items():
        signal.signal(number, handler)


class Interrupted(io.StringIO):
    """A log on whose writing somebody presses Ctrl-C."""

    def write(self, text: str) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return len(text)


def test_a_signal_in_the_middle_of_a_line_of_the_log_ends_the_wait(stop: StopFlag) -> None:
    log, line = logging.StreamHandler(Interrupted()), "step 3 waiting for its batch: 3/4 groups, 1 leased"
    with pytest.raises(Stopped), stop.waiting():
        log.handle(logging.makeLogRecord({"msg": line}))


# -- GPUs of ranks


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("environment", "want"),
    [({}, "cuda:0"), ({"RANK": "1"}, "cuda:1"), ({"RANK": "9", "LOCAL_RANK": "1"}, "cuda:1")],
)
@pytest.mark.usefixtures("two_gpus")
def test_a_rank_takes_the_gpu_of_its_place_on_this_machine(environment: dict[str, str], want: str) -> None:
    assert str(pick_device("auto", environment)) == want


@pytest.mark.usefixtures("two_gpus")
def test_a_rank_beyond_the_last_gpu_is_refused_and_never_put_on_another_ranks() -> None:
    words = (
        r"LOCAL_RANK \(or RANK\) is 2, but torch finds 2 GPUs \(CUDA_VISIBLE_DEVICES: 0,1\).*Reduce learner.num_ranks"
    )
    with pytest.raises(ConfigError, match=words):
        pick_device("cuda", {"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.usefixtures("two_gpus")
def test_the_cpu_is_taken_where_it_is_asked_for() -> None:
    assert str(pick_device("cpu", {"LOCAL_RANK": "5"})) == "cpu"


# -- learning rates


def _rates(num_steps: int, **settings: object) -> list[float]:
    config = LearnerConfig.model_validate({"lr": 1.0, "warmup_steps": 2, "minibatch_size": 1, **settings})
    return [round(lr_at(config, step, num_steps), 3) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"lr_schedule": "linear"}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ({"lr_schedule": "linear", "lr_final": 0.2}, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]),
        ({"lr_schedule": "cosine"}, [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]),  # (1 + cos(pi/4)) / 2 = 0.854
        ({"warmup_steps": 0, "lr_schedule": "linear"}, [1.0, 0.833, 0.667, 0.5, 0.333, 0.167]),
        ({"warmup_steps": 9, "lr_schedule": "cosine"}, [0.111, 0.222, 0.333, 0.444, 0.556, 0.667]),
    ],
)
def test_it_rises_to_the_peak_and_falls_as_the_schedule_says(settings: dict[str, object], want: list[float]) -> None:
    assert _rates(6, **settings) == want


def test_a_run_of_one_step_trains_with_the_peak() -> None:
    assert _rates(1, warmup_steps=0, lr_schedule="linear") == [1.0]


def test_steps_behind_the_last_one_have_the_final_rate() -> None:
    config = LearnerConfig.model_validate({"lr": 1.0, "warmup_steps": 0, "lr_schedule": "linear", "lr_final": 0.1})
    assert lr_at(config, 50, 6) == pytest.approx(0.1)
