"""Which GPU a rank computes on, where torch says that there are some."""

from __future__ import annotations

import pytest
import torch

from bapo.core.errors import ConfigError
from learner.distributed.world import pick_device


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
    words = r"LOCAL_RANK \(or RANK\) is 2, and torch sees 2 \(CUDA_VISIBLE_DEVICES: 0,1\).*fewer learner.num_ranks"
    with pytest.raises(ConfigError, match=words):
        pick_device("cuda", {"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.usefixtures("two_gpus")
def test_the_cpu_is_taken_where_it_is_asked_for() -> None:
    assert str(pick_device("cpu", {"LOCAL_RANK": "5"})) == "cpu"
