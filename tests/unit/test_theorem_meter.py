"""The theorem meter: one batch by hand, what it leaves out, and a real update against plain forward passes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.sequences import sequences_of
from bapo.core.types import Batch, Group, Origin
from learner.batch.columns import columns_of
from learner.batch.packing import minibatches
from learner.diagnostics.theorem_meter import Cell, Diagnosis, diagnose, theorem_fields
from tests.support.factories import make_batch, make_group
from tests.support.learner import learner_config, make_updater, random_batch, tiny_policy, true_logprobs
from tests.support.tiny_model import write_tiny_model

# V12: two responses of 3 and 2 tokens, sampled from alpha; W = e^0.3 and 1.
ALPHA = [-1.0, -0.5, -2.0, -0.7, -1.2]
POLICY = [-0.9, -0.6, -1.7, -0.8, -1.1]
NONE = [math.nan] * 5
EPS = 1e-6


def group_of(name: str, *, version: int, rewards: str = "10") -> Group:
    group = make_group(rewards=rewards, prompt_id=name, lengths=[3, 2], version=version)
    return dataclasses.replace(group, rollout_logprobs=np.array(ALPHA, dtype=np.float32))


def batch_of(groups: Sequence[Group], origins: Sequence[Origin], *, births: Sequence[int]) -> Batch:
    """A batch of step 10."""
    batch = make_batch(groups=groups, origins=origins, step=10, c2=0.25, c3=0.5)
    results = tuple(
        dataclasses.replace(result, birth=birth) for result, birth in zip(batch.results, births, strict=True)
    )
    return dataclasses.replace(batch, results=results)


def meter(batch: Batch, theta_t: Sequence[Sequence[float]], newest: Sequence[Sequence[float]]) -> Diagnosis:
    columns = columns_of(batch, learner_config())
    theta_t_M, newest_M = (np.concatenate(part).astype(np.float32) for part in (theta_t, newest))
    return diagnose(batch, columns, theta_t_M, newest_M, eps=EPS)


def cells_by_key(diagnosis: Diagnosis) -> dict[tuple[str, str, int | None], Cell]:
    return {(cell.policy, cell.origin.value, cell.age): cell for cell in diagnosis.cells}


def test_a_batch_by_hand() -> None:
    groups = [group_of("a", version=8), group_of("b", version=9), group_of("c", version=4)]
    batch = batch_of(groups, [Origin.X1, Origin.X1, Origin.X3], births=[10, 10, 7])
    diagnosis = meter(batch, [POLICY, ALPHA, POLICY], [NONE, NONE, POLICY])
    cells = cells_by_key(diagnosis)
    # X1 is as old as its weights, X3 as its birth; only c was in the last mini-batch.
    assert list(cells) == [
        ("theta_t", "x1", None), ("theta_t", "x1", 1), ("theta_t", "x1", 2), ("theta_t", "x3", None),
        ("theta_t", "x3", 3), ("theta", "x3", None),
    ]  # fmt: skip
    both, old = cells["theta_t", "x1", None], cells["theta_t", "x1", 2]
    assert (both.num_groups, both.num_responses, both.num_tokens, old.num_groups) == (2, 4, 10, 1)
    assert old.means.tv_tok == pytest.approx(0.075053, abs=1e-6)
    assert both.means.tv_tok == pytest.approx(0.075053 / 2, abs=1e-6)
    assert (both.spreads["tv_tok_p50"], both.spreads["tv_tok_max"]) == pytest.approx((0.037527, 0.075053), abs=1e-6)
    # Linear between the two groups: 95 % of the way from 0 to the larger.
    assert both.spreads["kl_fwd_p95"] == pytest.approx(0.95 * (0.059867 + 0.010008) / 2, abs=1e-6)
    assert old.delta == both.spreads["delta_max"] == pytest.approx(0.185296, abs=1e-6)
    assert cells["theta_t", "x1", 1].means.ess == 1.0
    ((origin, bound),) = diagnosis.bounds
    assert (origin, bound.num_groups) == (Origin.X3, 1)
    # J = 1.349859 / 2.349859 = .574443; mu = .5; sigma = .500001; K = .999996; both TV are delta.
    assert bound.gain == pytest.approx(0.148886, abs=2e-6)
    assert bound.tight.mean == pytest.approx(0.148886 - 0.185295 - 0.185296, abs=3e-6)
    assert bound.paper.mean == pytest.approx(0.148886 - 2 * (0.185295 + 0.185296), abs=3e-6)
    assert bound.paper.is_vacuous


def test_x2_that_theta_t_sampled_has_no_second_penalty_and_older_x2_has() -> None:
    for version, penalty in ((10, 0.0), (9, 0.185296)):
        batch = batch_of([group_of("a", version=version)], [Origin.X2], births=[10])
        ((_, bound),) = meter(batch, [POLICY], [ALPHA]).bounds
        assert bound.penalty_current == pytest.approx(penalty, abs=1e-6)
        assert bound.penalty_theta == 0.0


def test_the_bound_needs_whole_groups_with_a_signal() -> None:
    half = [*POLICY[:3], math.nan, math.nan]
    groups = [group_of("same", version=8, rewards="11"), group_of("half", version=8), group_of("whole", version=8)]
    batch = batch_of(groups, [Origin.X1] * 3, births=[10] * 3)
    ((_, bound),) = meter(batch, [POLICY] * 3, [POLICY, half, POLICY]).bounds
    assert bound.num_groups == 1
    assert meter(batch, [NONE, NONE, half], [POLICY] * 3).bounds == (), "pi_theta_t is known of no whole group"


def test_what_was_not_evaluated_is_left_out() -> None:
    batch = batch_of([group_of("a", version=8), group_of("b", version=8)], [Origin.X1] * 2, births=[10] * 2)
    cells = cells_by_key(meter(batch, [POLICY, NONE], [NONE, NONE]))
    assert set(cells) == {("theta_t", "x1", None), ("theta_t", "x1", 2)}
    assert cells["theta_t", "x1", None].num_groups == 1
    assert meter(batch, [NONE, NONE], [NONE, NONE]) == Diagnosis()


def test_an_experts_response_is_left_out_because_no_policy_sampled_it() -> None:
    batch = make_batch(groups=[make_group(rewards="10", lengths=[3, 2], experts=[1], logprob=-1.0)], step=2)
    diagnosis = meter(batch, [[-0.9, -1.1, -0.7, -7.0, -7.0]], [[-0.9, -1.1, -0.7, -7.0, -7.0]])
    cell = diagnosis.subset(Origin.X1)
    assert cell is not None
    assert (cell.num_groups, cell.num_responses) == (1, 1)
    # 1/2 * (|e^0.1 - 1| + |e^-0.1 - 1| + |e^0.3 - 1|) / 3
    assert cell.means.tv_tok == pytest.approx(0.091699, abs=1e-6)
    assert diagnosis.bounds == (), "the group is not wholly alpha's"


def plain_numbers(weights: dict[str, torch.Tensor], path: Path, batch: Batch, origin: Origin) -> tuple[float, float]:
    """(tv_tok, kl_fwd per response) of one subset by one ordinary forward pass per response."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.load_state_dict(weights, strict=False)
    tv, kl = [], []
    for entry in batch.entries:
        if entry.origin is origin:
            for response in sequences_of(entry.group):
                logp = true_logprobs(model, entry.group.prompt_token_ids, response.token_ids)
                d = logp - response.rollout_logprobs
                tv += [abs(math.exp(x) - 1) / 2 for x in d]
                kl.append(sum(math.exp(x) - 1 - x for x in d))
    return sum(tv) / len(tv), sum(kl) / len(kl)


@pytest.mark.parametrize("mode", ["decoupled", "official"])
def test_an_update_measures_what_plain_forward_passes_give(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    model = write_tiny_model(path)
    config = learner_config(path, loss={"ratio_mode": mode}, learner={"lr": 1e-3})
    batch, policy = random_batch(model), tiny_policy(config)
    updater = make_updater(config, policy, tmp_path)
    seen: list[dict[str, torch.Tensor]] = []

    def keep(*_: object) -> None:
        seen.append({name: value.clone() for name, value in policy.model.state_dict().items()})

    updater.optimizer.register_step_pre_hook(keep)
    diagnosis = updater.run(batch).diagnosis
    for origin in Origin:
        cell = diagnosis.subset(origin)
        assert cell is not None
        assert (cell.means.tv_tok, cell.means.kl_fwd) == pytest.approx(
            plain_numbers(seen[0], path, batch, origin), abs=2e-5
        )
    assert len(seen) == 3
    newest = [cell for cell in diagnosis.cells if cell.policy == "theta"]
    trained_last = {cell.origin: cell for cell in newest}
    last = minibatches(8, 3, seed=7, step=1, epoch=0)[-1]
    part = dataclasses.replace(batch, entries=tuple(batch.entries[g] for g in last))
    for origin, cell in trained_last.items():
        assert (cell.means.tv_tok, cell.means.kl_fwd) == pytest.approx(
            plain_numbers(seen[-1], path, part, origin), abs=2e-5
        )
    assert set(trained_last) == {entry.origin for entry in part.entries}


def test_in_direct_mode_only_the_first_minibatch_knows_theta_t_and_only_x2_can_do_without(tmp_path: Path) -> None:
    path = tmp_path / "model"
    model = write_tiny_model(path)
    config = learner_config(path, loss={"ratio_mode": "direct"})
    batch = random_batch(model)
    diagnosis = make_updater(config, tiny_policy(config), tmp_path).run(batch).diagnosis
    first = minibatches(8, 3, seed=7, step=1, epoch=0)[0]
    whole = [cell for cell in diagnosis.cells if cell.policy == "theta_t" and cell.age is None]
    assert sum(cell.num_groups for cell in whole) == len(first) == 3
    assert {cell.origin for cell in whole} == {batch.entries[g].origin for g in first}
    assert [origin for origin, _ in diagnosis.bounds] == [Origin.X2], "sampled by theta_1 in step 1"


def test_measuring_can_be_rare_or_off_and_changes_no_weight(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_tiny_model(path)
    losses = {}
    for every in (0, 1, 2):
        config = learner_config(path, diagnostics={"every": every})
        updater = make_updater(config, tiny_policy(config), tmp_path)
        reports = [updater.run(random_batch(step=step)) for step in (1, 2)]
        assert [bool(report.diagnosis.cells) for report in reports] == [every == 1, every > 0]
        losses[every] = [result.loss for report in reports for result in report.minibatches]
    assert losses[0] == losses[1] == losses[2]


def test_a_constant_that_does_not_exist_is_none() -> None:
    batch = dataclasses.replace(make_batch(), facts={})
    row = theorem_fields(batch, Diagnosis(), AlgorithmConfig(group_size=8, c1=0.125), 0.0)
    assert row["k3"] is None
    assert (row["divergences"], row["bounds"]) == ([], [])


def test_nothing_depends_on_the_order_of_groups() -> None:
    rng = np.random.default_rng(0)
    batch = random_batch(num_groups=9, step=3)
    turned = dataclasses.replace(batch, entries=batch.entries[::-1], results=batch.results[::-1])
    noise = [rng.normal(0, 0.1, size=len(entry.group.token_ids)) for entry in batch.entries]
    logprobs = [e.group.rollout_logprobs + shift for e, shift in zip(batch.entries, noise, strict=True)]
    one, other = meter(batch, logprobs, logprobs), meter(turned, logprobs[::-1], logprobs[::-1])
    assert [cell.row() for cell in one.cells] == [cell.row() for cell in other.cells]
    for (origin, bound), (same, again) in zip(one.bounds, other.bounds, strict=True):
        assert origin is same
        assert bound.tight.mean == pytest.approx(again.tight.mean, rel=1e-9)
