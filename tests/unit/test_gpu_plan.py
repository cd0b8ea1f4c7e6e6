"""Whose GPU is whose, on machines that are written down by hand; and what the launcher then tells its children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime import machine
from services.launcher.gpus.plan import GpuPlan, share_gpus
from tests.support.gpu_plan import specs

FOUR = ("0", "1", "2", "3")
SLICES = ("MIG-aa", "MIG-bb", "MIG-cc")
SHARES = {"gpu_memory_utilization": 0.4}


@pytest.fixture(autouse=True)
def builds(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed, as far as the plan knows: torch and vLLM for GPUs."""
    found = {"torch": "2.13.0", "vllm": "0.32.0"}
    monkeypatch.setattr(machine, "installed", found.get)
    return found


def plan(
    visible: tuple[str, ...],
    ranks: int = 1,
    workers: int = 1,
    *,
    learner: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    **how: bool,
) -> GpuPlan:
    sections = {
        "learner": {"num_ranks": ranks, **(learner or {})},
        "rollout": {"num_workers": workers, **(rollout or {})},
    }
    return share_gpus(Config.model_validate(sections), visible, **how)


def test_engines_of_several_gpus_do_not_share_them_with_the_learner() -> None:
    options = {"engine_options": SHARES | {"tensor_parallel_size": 2}, "worker_resources": {"GPU": 2}}
    with pytest.raises(ConfigError, match="engines of 2 GPUs"):
        plan(FOUR[:2], ranks=1, rollout=options)
    assert plan(FOUR[:3], ranks=1, rollout=options).workers == (1, 2)


def test_sleep_mode_which_nothing_uses_is_refused() -> None:
    with pytest.raises(ValidationError, match="nothing puts an engine to sleep"):
        Config.model_validate({"rollout": {"engine_options": {"enable_sleep_mode": True}}})


def test_a_host_of_several_needs_gpus_for_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    assert plan(FOUR, ranks=4).learner == (0, 1)


@pytest.mark.parametrize(
    ("visible", "ranks", "workers", "lists", "want", "words"),
    [
        (FOUR, 1, 3, ({}, {}), ((0,), (1, 2, 3)), "GPU 0: learner; GPUs 1-3: workers"),
        (FOUR, 2, 1, ({}, {}), ((0, 1), (2, 3)), "GPUs 0-1: learner; GPUs 2-3: workers"),
        (FOUR, 1, 1, ({"gpus": [3]}, {}), ((3,), (0, 1, 2)), "GPU 3: learner; GPUs 0-2: workers"),
        (FOUR, 2, 1, ({}, {"gpus": [0, 2]}), ((1, 3), (0, 2)), "GPUs 1, 3: learner; GPUs 0, 2: workers"),
        (FOUR, 1, 1, ({"gpus": [2]}, {"gpus": [1]}), ((2,), (1,)),
         "GPU 2: learner; GPU 1: workers; GPUs 0, 3: not used"),
        (FOUR, 1, 4, ({"device": "cpu"}, {}), ((), (0, 1, 2, 3)), "GPUs 0-3: workers"),
        (FOUR, 1, 8, ({}, {"engine": "scripted"}), ((0,), ()), "GPU 0: learner; GPUs 1-3: not used"),
        (FOUR, 1, 6, ({}, {"worker_resources": {"GPU": 0.5}}), ((0,), (1, 2, 3)), "GPU 0: learner; GPUs 1-3: workers"),
        (("2", "3"), 1, 1, ({}, {}), ((0,), (1,)), "GPU 2: learner; GPU 3: workers"),
        (SLICES, 1, 2, ({}, {}), ((0,), (1, 2)), "GPU MIG-aa: learner; GPUs MIG-bb, MIG-cc: workers"),
        (("0",), 1, 1, ({}, {"engine_options": SHARES}), ((0,), (0,)), "GPU 0: learner and workers"),
        (("0", "1"), 2, 1, ({}, {"engine_options": SHARES}), ((0, 1), (1,)),
         "GPU 0: learner; GPU 1: learner and workers"),
        (("0", "1"), 1, 1, ({}, {"engine_options": SHARES}), ((0,), (1,)), "GPU 0: learner; GPU 1: workers"),
        (("0", "1"), 1, 2, ({}, {"gpus": [0, 1], "engine_options": SHARES}), ((0,), (0, 1)),
         "GPU 0: learner and workers; GPU 1: workers"),
        ((), 1, 1, ({}, {"engine": "scripted"}), ((), ()), "no GPU: CPU profile"),
    ],
)  # fmt: skip
def test_the_learners_ranks_come_first_and_the_workers_get_the_rest(
    visible: tuple[str, ...],
    ranks: int,
    workers: int,
    lists: tuple[dict[str, Any], dict[str, Any]],
    want: tuple[tuple[int, ...], tuple[int, ...]],
    words: str,
) -> None:
    found = plan(visible, ranks, workers, learner=lists[0], rollout=lists[1])
    assert ((found.learner, found.workers), found.sentence()) == (want, words)


@pytest.mark.parametrize(
    ("visible", "ranks", "workers", "lists", "words"),
    [
        (("0",), 1, 1, ({}, {}), "1 GPU is visible .* and the learner uses GPU 0; there is no room for any, or let "
         "them share GPUs: rollout.engine_options = { gpu_memory_utilization = 0.4"),
        (FOUR, 1, 8, ({}, {}), "num_workers = 8 with 1 GPU each are too many: 4 GPUs are visible .*use "
         "--rollout.num_workers 3"),
        (FOUR, 1, 3, ({}, {"worker_resources": {"GPU": 2}}), "use --rollout.num_workers 1"),
        (FOUR, 1, 4, ({}, {"worker_resources": {"GPU": 0.6}}), "use --rollout.num_workers 3"),
        (FOUR, 5, 1, ({}, {}), "learner.num_ranks = 5 needs one GPU per rank, 4 GPUs are visible"),
        (("0", "1"), 3, 1, ({}, {"engine_options": SHARES}), "learner.num_ranks = 3 needs one GPU per rank"),
        (FOUR, 3, 1, ({}, {"gpus": [0, 1]}), "rollout.gpus leaves 2"),
        (FOUR, 1, 1, ({"gpus": [1]}, {"gpus": [0, 1]}), "learner.gpus and rollout.gpus both include GPU 1: "),
        (FOUR, 1, 3, ({}, {"gpus": [1, 2]}), "rollout.gpus has 2 GPUs; use --rollout.num_workers 2"),
        (FOUR, 2, 1, ({"gpus": [1]}, {}), "learner.gpus has 1 GPUs for learner.num_ranks = 2"),
        (FOUR, 1, 1, ({"gpus": [4]}, {}), "learner.gpus includes GPU 4, but 4 GPUs are visible"),
        (FOUR, 1, 1, ({}, {"gpus": [7]}), "rollout.gpus includes GPU 7"),
        (FOUR, 1, 1, ({"device": "cpu", "gpus": [0]}, {}), "learner.gpus is set, but the learner runs on the CPU"),
        (FOUR, 1, 1, ({}, {"gpus": [0], "engine": "scripted"}), "rollout.gpus is set, but workers use no GPU"),
        (FOUR, 1, 1, ({}, {"worker_resources": {"CPU": 1}}), "has no GPU, but the CUDA build of vLLM"),
        ((), 1, 1, ({}, {}), "no worker can start: workers need GPUs, but no GPU is visible"),
        ((), 1, 1, ({"device": "cuda"}, {"engine": "scripted"}), "num_ranks = 1 needs one GPU per rank, no GPU is"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_to_write(
    visible: tuple[str, ...], ranks: int, workers: int, lists: tuple[dict[str, Any], dict[str, Any]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(visible, ranks, workers, learner=lists[0], rollout=lists[1])


def test_without_a_learner_the_workers_have_everything() -> None:
    assert plan(FOUR, 4, 4, with_learner=False).workers == (0, 1, 2, 3)


def test_part_of_a_gpu_never_lies_on_two() -> None:
    pairs = [(1, 0.5), (3, 0.6), (1, 0.1), (4, 1), (5, 2)]
    assert [machine.workers_on(*pair) for pair in pairs] == [2, 3, 10, 4, 2]


def test_without_a_plan_children_see_what_the_launcher_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(specs(tmp_path, monkeypatch, GpuPlan(), ranks=1).values()) == {"4,5,6,7"}
