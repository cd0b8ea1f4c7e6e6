"""One step of the learner against a plain padded rendering of the same mathematics, and its rules one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bapo.config.tree import Config
from bapo.core.codec import unpack_batch
from bapo.core.errors import DivergenceError
from bapo.core.sequences import sequences_of
from bapo.core.types import Batch, Group, Origin
from learner.advantages.formulas import group_advantages
from learner.batch.packing import minibatches
from learner.distributed.stopping import StopFlag, Stopped
from learner.model.policy import Policy
from learner.update.reference import Reference
from learner.update.step import policy_shares, step_inputs
from learner.update.update import Updater
from tests.support.episodes import forked, histories_of, with_turns
from tests.support.factories import make_batch, make_group
from tests.support.learner import (
    ALONE,
    CPU,
    learner_config,
    make_updater,
    random_batch,
    tiny_policy,
    with_groups,
    with_truncated,
)
from tests.support.tiny_model import perturb


def plain_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()


def plain_logprobs(model: PreTrainedModel, batch: Batch) -> list[list[torch.Tensor]]:
    """[group][response] log-probs and entropies [2, T], one ordinary forward pass per turn."""
    found = []
    for entry in batch.entries:
        rows = []
        for row in range(entry.group.size):
            turns = []
            for history, sampled in histories_of(entry.group, row):
                ids = torch.tensor([history + sampled])
                logp = model(ids).logits[0, len(history) - 1 : -1].log_softmax(-1)
                chosen = logp.gather(1, ids[0, len(history) :, None]).squeeze(1)
                turns.append(torch.stack((chosen, -(logp.exp() * logp).sum(-1))))
            rows.append(torch.cat(turns, dim=1))
        found.append(rows)
    return found


def plain_step(
    config: Config, path: Path, batches: Sequence[Batch], anchors: str
) -> tuple[list[float], PreTrainedModel]:
    """Losses of the mini-batches and the trained model, written again from docs/paper.md, Equations, token by token."""
    model = plain_model(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learner.lr, weight_decay=0.0)
    losses = [loss for batch in batches for loss in plain_losses(config, model, optimizer, batch, anchors)]
    return losses, model


def plain_losses(
    config: Config, model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch, anchors: str
) -> list[float]:
    """One step of `plain_step`."""
    loss_of, losses = config.loss, []
    with torch.no_grad():
        theta_t = plain_logprobs(model, batch)
    for chosen in minibatches(len(batch.entries), config.learner.minibatch_size, seed=7, step=batch.step, epoch=0):
        logprobs, terms = plain_logprobs(model, batch), []
        for g in chosen:
            group = batch.entries[g].group
            advantages = group_advantages(group.rewards, loss_of.advantage_norm, loss_of.advantage_eps)
            for j, response in enumerate(sequences_of(group)):
                rollout = torch.from_numpy(response.rollout_logprobs.copy())
                anchor = {"theta_t": theta_t[g][j][0], "rollout": rollout}[anchors]
                logp, entropy = logprobs[g][j]
                ratio = (logp - anchor).exp()
                a = float(advantages[j])
                gain = torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
                weight = (anchor - rollout).exp().clamp(max=3.0) if anchors == "theta_t" else 1.0
                rho = (logp - rollout).exp()
                kl = rho * rho.log() - rho + 1
                terms.append(-weight * gain + loss_of.kl_coef * kl - loss_of.entropy_coef * entropy)
        loss = torch.cat(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.learner.grad_clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def sampled_by(model: PreTrainedModel, batch: Batch) -> Batch:
    """The same tokens, with log-probs that differ a little from those of the model."""
    rng, entries = np.random.default_rng(0), []
    for entry, rows in zip(batch.entries, plain_logprobs(model, batch), strict=True):
        logprobs = torch.cat([row[0] for row in rows]).numpy()
        noisy = np.minimum(logprobs + rng.normal(0, 0.1, len(logprobs)), 0).astype(np.float32)
        group = dataclasses.replace(entry.group, rollout_logprobs=noisy)
        entries.append(dataclasses.replace(entry, group=group))
    return dataclasses.replace(batch, entries=tuple(entries))


def assert_same_weights(policy: Policy, model: PreTrainedModel, atol: float = 2e-5) -> None:
    for name, expected in model.named_parameters():
        torch.testing.assert_close(dict(policy.model.named_parameters())[name], expected, rtol=0, atol=atol)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(
    ("mode", "anchors"), [("decoupled", "theta_t"), ("official", "theta_t"), ("direct", "rollout")]
)
def test_a_step_is_the_plain_step(mode: str, anchors: str, turns: bool, model_path: Path, tmp_path: Path) -> None:
    loss = {"ratio_mode": mode, "kl_coef": 0.1, "entropy_coef": 0.01}
    # A small lr, because AdamW turns gradients that are pure rounding error into whole steps.
    config = learner_config(model_path, loss=loss, learner={"lr": 1e-4})
    batch = random_batch(plain_model(model_path))
    batch = sampled_by(plain_model(model_path), with_turns(batch)) if turns else batch
    want, model = plain_step(config, model_path, [batch], anchors)
    policy = tiny_policy(config)
    report = make_updater(config, policy, tmp_path).run(batch)
    assert [result.loss for result in report.minibatches] == pytest.approx(want, abs=1e-5)
    assert report.num_tokens == sum(len(entry.group.token_ids) for entry in batch.entries)
    assert_same_weights(policy, model)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "const_len"])
def test_losses_and_weights_do_not_depend_on_the_token_budget(
    aggregation: str, model_path: Path, tmp_path: Path
) -> None:
    batch = random_batch(plain_model(model_path))
    losses, policies = [], []
    for budget in (64, 100, 5000):
        config = learner_config(
            model_path, loss={"aggregation": aggregation}, learner={"microbatch_tokens": budget, "lr": 1e-4}
        )
        policies.append(tiny_policy(config))
        losses.append([r.loss for r in make_updater(config, policies[-1], tmp_path).run(batch).minibatches])
    assert losses[0] == pytest.approx(losses[2], abs=1e-5)
    assert losses[1] == pytest.approx(losses[2], abs=1e-5)
    assert_same_weights(policies[0], policies[2].model)


def test_histories_that_fork_change_neither_losses_nor_gradients(model_path: Path, tmp_path: Path) -> None:
    merged = sampled_by(plain_model(model_path), with_turns(random_batch(), seed=3))
    for aggregation in ("token_mean", "seq_mean_token_mean"):
        config = learner_config(model_path, loss={"aggregation": aggregation}, learner={"minibatch_size": 8})
        one, other = (
            make_updater(config, tiny_policy(config), tmp_path).run(batch).minibatches[0]
            for batch in (merged, forked(merged))
        )
        assert one.loss == pytest.approx(other.loss, abs=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)


def test_the_gradient_does_not_depend_on_the_order_of_groups(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, learner={"minibatch_size": 8, "lr": 1e-4})
    batch = random_batch(plain_model(model_path))
    turned = dataclasses.replace(batch, entries=batch.entries[::-1])
    one, other = (make_updater(config, tiny_policy(config), tmp_path).run(given) for given in (batch, turned))
    assert one.minibatches[0].grad_norm == pytest.approx(other.minibatches[0].grad_norm, rel=1e-5)


class CountingPolicy(Policy):
    """Notes how many response tokens each forward pass evaluated, and whether it kept a graph."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.model)
        self.passes: list[tuple[bool, int]] = []

    def forward(self, micro: Any, temperature: float | None = None, *, with_entropy: bool = True) -> Any:
        assert with_entropy is torch.is_grad_enabled(), "only the passes that train report an entropy"
        self.passes.append((torch.is_grad_enabled(), len(micro.target_M)))
        return super().forward(micro, temperature, with_entropy=with_entropy)

    def tokens(self, *, trained: bool) -> int:
        return sum(size for graph, size in self.passes if graph is trained)


def with_rewards(batch: Batch, rewards: dict[int, list[float]]) -> Batch:
    """The same batch, but for the rewards of these groups."""
    entries = list(batch.entries)
    for number, values in rewards.items():
        group = dataclasses.replace(entries[number].group, rewards=np.array(values, dtype=np.float32))
        entries[number] = dataclasses.replace(entries[number], group=group)
    return dataclasses.replace(batch, entries=tuple(entries))


@pytest.mark.parametrize(("silent", "size"), [((0, 3, 4), 3), (tuple(range(8)), 3)])
def test_homogeneous_groups_count_but_are_not_computed_when_they_add_nothing(
    silent: tuple[int, ...], size: int, model_path: Path, tmp_path: Path
) -> None:
    learner = {"lr": 1e-4, "minibatch_size": size}
    config = learner_config(model_path, loss={"kl_coef": 0.0, "entropy_coef": 0.0}, learner=learner)
    mixed = random_batch(plain_model(model_path))
    batch = with_rewards(mixed, {number: [float(number % 2)] * 4 for number in silent})
    sizes = [len(entry.group.token_ids) for entry in batch.entries]
    # A step before, so that AdamW has moments that go on moving weights whose gradient is zero.
    want, model = plain_step(config, model_path, [mixed, dataclasses.replace(batch, step=2)], "theta_t")
    policy = CountingPolicy(tiny_policy(config))
    updater = make_updater(config, policy, tmp_path)
    updater.run(mixed)
    policy.passes.clear()
    report = updater.run(dataclasses.replace(batch, step=2))
    assert policy.tokens(trained=True) == sum(size for g, size in enumerate(sizes) if g not in silent)
    assert report.num_tokens == sum(sizes)
    assert [result.loss for result in report.minibatches] == pytest.approx(want[3:], abs=1e-5)
    assert_same_weights(policy, model)


def test_anchors_of_the_first_minibatch_equal_a_prox_pass(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, loss={"ratio_mode": "official"}, learner={"minibatch_size": 8})
    batch = random_batch()
    updater = make_updater(config, tiny_policy(config), tmp_path)
    report = updater.run(batch)
    assert report.minibatches[0].ratio_max == 1.0
    exact = plain_logprobs(plain_model(model_path), batch)
    for entry, responses in zip(batch.entries, exact, strict=True):
        want = torch.cat([response[0] for response in responses]).detach().numpy()
        remembered = updater.memory.columns.get(entry.group.group_id)
        assert remembered is not None
        np.testing.assert_allclose(remembered, want, atol=1e-5)


def test_a_second_epoch_keeps_the_anchors_of_theta_t(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, learner={"minibatch_size": 8, "epochs": 2, "lr": 1e-3})
    report = make_updater(config, tiny_policy(config), tmp_path).run(random_batch(plain_model(model_path)))
    first, second = report.minibatches
    assert first.ratio_max == 1.0
    assert second.ratio_max > 1.001


def test_official_mode_centres_a_reused_group_on_the_policy_of_its_first_use(model_path: Path, tmp_path: Path) -> None:
    model = plain_model(model_path)
    config = learner_config(model_path, loss={"ratio_mode": "official"}, learner={"minibatch_size": 8, "lr": 1e-2})
    updater = make_updater(config, tiny_policy(config), tmp_path)
    first = random_batch(model, num_groups=2, step=1)
    updater.run(first)
    reused = with_groups(first, [entry.group for entry in first.entries], Origin.X3, step=2)
    again = updater.run(reused)
    assert again.minibatches[0].ratio_max > 1.01, "rho is against theta_1, not theta_2"
    assert set(updater.memory.steps.values()) == {1}, "the first use counts"
    decoupled = learner_config(model_path, loss={"ratio_mode": "decoupled"}, learner={"minibatch_size": 8})
    fresh_centre = make_updater(decoupled, tiny_policy(decoupled), tmp_path).run(reused)
    assert fresh_centre.minibatches[0].ratio_max == 1.0


def test_a_response_without_a_pass_takes_no_anchors_from_the_others_of_its_group(
    model_path: Path, tmp_path: Path
) -> None:
    model = plain_model(model_path)
    config = learner_config(model_path, loss={"ratio_mode": "official"}, shaping={"overlong_filter": True})
    updater = make_updater(config, tiny_policy(config), tmp_path)
    first = with_truncated(random_batch(model, num_groups=1, step=1))  # the second of four responses
    group = first.entries[0].group
    ends = np.cumsum(group.lengths).tolist()
    updater.run(first)
    remembered = updater.memory.columns[group.group_id]
    assert np.isnan(remembered).tolist() == [ends[0] <= place < ends[1] for place in range(ends[-1])]
    whole = dataclasses.replace(group, outcomes=np.zeros_like(group.outcomes))
    updater.run(with_groups(first, [whole], Origin.X3, step=2))
    again = updater.memory.columns[group.group_id]
    assert not np.isnan(again).any(), "its first pass is its anchor"
    np.testing.assert_array_equal(again[~np.isnan(remembered)], remembered[~np.isnan(remembered)])
    assert updater.memory.steps == {group.group_id: 1}


def test_a_second_epoch_keeps_the_remembered_anchors(model_path: Path, tmp_path: Path) -> None:
    model, loss = plain_model(model_path), {"ratio_mode": "official"}
    settings = {"minibatch_size": 8, "epochs": 2, "lr": 1e-2}
    config = learner_config(model_path, loss=loss, learner=settings)
    updater = make_updater(config, tiny_policy(config), tmp_path)
    first = random_batch(model, num_groups=2, step=1)
    updater.run(first)
    updater._config = learner_config(model_path, loss=loss, learner={**settings, "lr": 1e-9})
    again = updater.run(with_groups(first, [entry.group for entry in first.entries], Origin.X3, step=2))
    # The policy stands still in step 2, so both epochs see the same ratio to theta_1.
    assert again.minibatches[1].ratio_max == pytest.approx(again.minibatches[0].ratio_max, rel=1e-4)
    assert again.minibatches[0].ratio_max > 1.01


def test_kl_to_the_reference_is_zero_at_the_base_model_and_grows_when_the_policy_leaves_it(
    model_path: Path, tmp_path: Path
) -> None:
    config = learner_config(model_path, loss={"kl_ref": "reference", "kl_coef": 0.1}, learner={"minibatch_size": 8})
    policy = tiny_policy(config)
    updater = make_updater(config, policy, tmp_path)
    assert updater.run(random_batch(step=1)).minibatches[0].kl == pytest.approx(0.0, abs=1e-6)
    perturb(policy.model, seed=1)  # type: ignore[arg-type]
    assert updater.run(random_batch(step=2)).minibatches[0].kl > 0.01
    [reference] = (part.model for part in updater.parts.values() if isinstance(part, Reference))
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_an_empty_batch_changes_nothing(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path)
    policy = tiny_policy(config)
    report = make_updater(config, policy, tmp_path).run(random_batch(num_groups=0))
    assert (report.minibatches, report.num_tokens, report.mean("loss")) == ((), 0, None)
    assert_same_weights(policy, plain_model(model_path), atol=0)


@pytest.mark.parametrize(("step", "want"), [(1, 1e-4), (5, 5e-4), (10, 1e-3), (11, 1e-3)])
def test_the_learning_rate_rises_linearly_over_learner_steps(
    step: int, want: float, model_path: Path, tmp_path: Path
) -> None:
    config = learner_config(model_path, learner={"warmup_steps": 10, "lr": 1e-3})
    updater = make_updater(config, tiny_policy(config), tmp_path)
    assert updater.run(random_batch(num_groups=0, step=step)).lr == pytest.approx(want)
    assert updater.optimizer.param_groups[0]["lr"] == pytest.approx(want)


def test_divergence_names_the_batch_keeps_it_and_leaves_the_weights_finite(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, learner={"lr": 1e30, "grad_clip": 1e-3})
    policy, batch = tiny_policy(config), random_batch(step=12)
    # The first optimizer step throws the weights to 1e30; the second mini-batch then has no finite log-prob.
    with pytest.raises(DivergenceError) as refused:
        make_updater(config, policy, tmp_path).run(batch)
    message = str(refused.value)
    assert "step 12, mini-batch 2 of 3: loss is" in message
    assert "gradient norm nan" in message
    second = minibatches(8, 3, seed=7, step=12, epoch=0)[1]
    assert all(batch.entries[g].group.group_id in message for g in second)
    assert all(bool(parameter.isfinite().all()) for parameter in policy.parameters())

    kept = unpack_batch((tmp_path / "diverged" / "step-000012.frame").read_bytes())
    assert kept.step == 12
    for a, b in zip(kept.entries, batch.entries, strict=True):
        assert (a.group.group_id, a.origin) == (b.group.group_id, b.origin)
        np.testing.assert_array_equal(a.group.token_ids, b.group.token_ids)


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path)
    policy = tiny_policy(config)
    with torch.no_grad():
        policy.model.model.norm.weight[0] = float("inf")
    before = [parameter.clone() for parameter in policy.parameters()]
    with pytest.raises(DivergenceError, match="mini-batch 1 of 3"):
        make_updater(config, policy, tmp_path).run(random_batch())
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_a_stop_ends_the_step_after_the_current_minibatch(model_path: Path, tmp_path: Path) -> None:
    config, stop = learner_config(model_path), StopFlag()
    policy = CountingPolicy(tiny_policy(config))
    updater = Updater(config=config, policy=policy, world=ALONE, stop=stop, run_path=tmp_path)
    stop.ask()
    batch = random_batch()
    with pytest.raises(Stopped, match="after mini-batch 1 of 3"):
        updater.run(batch)
    first = minibatches(8, 3, seed=7, step=1, epoch=0)[0]
    assert policy.tokens(trained=True) == sum(len(batch.entries[g].group.token_ids) for g in first)


def run_counted(config: Config, batch: Batch, path: Path, minibatches_wanted: int) -> CountingPolicy:
    policy = CountingPolicy(tiny_policy(config))
    report = make_updater(config, policy, path).run(batch)
    assert len(report.minibatches) == minibatches_wanted
    return policy


def test_with_kl_or_entropy_every_response_is_computed(model_path: Path, tmp_path: Path) -> None:
    batch = with_rewards(random_batch(), {0: [1.0] * 4, 5: [0.0] * 4})
    total = sum(len(entry.group.token_ids) for entry in batch.entries)
    for loss in ({"kl_coef": 0.1, "entropy_coef": 0.0}, {"kl_coef": 0.0, "entropy_coef": 0.1}):
        policy = run_counted(learner_config(model_path, loss=loss), batch, tmp_path, minibatches_wanted=3)
        assert policy.tokens(trained=True) == total


def test_prox_is_skipped_where_the_mode_or_the_first_minibatch_makes_it_needless(
    model_path: Path, tmp_path: Path
) -> None:
    batch = random_batch()
    total = sum(len(entry.group.token_ids) for entry in batch.entries)
    sizes = [len(entry.group.token_ids) for entry in batch.entries]
    first = sum(sizes[g] for g in minibatches(8, 3, seed=7, step=1, epoch=0)[0])
    for mode, size, want in (
        ("direct", 3, 0),  # the anchor is alpha, which is stored
        ("decoupled", 8, 0),  # one optimizer step: the policy is its own anchor throughout
        ("decoupled", 3, total - first),
        ("official", 3, total - first),
        ("interpolated", 3, 0),  # alpha is stored, and the policy's own pass gives the other end
    ):
        config = learner_config(model_path, loss={"ratio_mode": mode}, learner={"minibatch_size": size})
        policy = run_counted(config, batch, tmp_path, minibatches_wanted=-(-8 // size))
        assert (policy.tokens(trained=False), policy.tokens(trained=True)) == (want, total), mode


def test_the_share_of_the_policy_in_an_interpolated_anchor_follows_the_age_of_each_token() -> None:
    # Step 5. One response by version 5, one by version 4, one that versions 3 and 2 sampled in turn, and an expert's.
    group = make_group(rewards="1010", prompt_id="p", lengths=[1, 1, 3, 1], experts=[3])
    versions = np.array([[5, 5], [4, 4], [2, 3], [5, 5]], dtype=np.int32)
    spans = np.array([[1, 5], [1, 4], [1, 3], [2, 2], [1, 5]], dtype=np.int32)
    batch = make_batch(groups=[dataclasses.replace(group, versions=versions, spans=spans)], step=5)
    config = learner_config(loss={"ratio_mode": "interpolated"})
    shares = policy_shares(step_inputs(batch, config, CPU))
    assert shares is not None
    # Ages 0, 1 | 2, 3, 3 -> (age - 1) / age, at least 0; nobody sampled the expert's token.
    assert shares.tolist() == pytest.approx([0.0, 0.0, 1 / 2, 2 / 3, 2 / 3, 1.0])


def test_an_interpolated_anchor_is_alpha_for_what_the_step_before_sampled(model_path: Path, tmp_path: Path) -> None:
    batch = random_batch(plain_model(model_path), step=2, version=1)
    found = []
    for mode in ("interpolated", "direct"):
        config = learner_config(model_path, loss={"ratio_mode": mode}, learner={"lr": 1e-4})
        found.append([r.loss for r in make_updater(config, tiny_policy(config), tmp_path).run(batch).minibatches])
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_an_interpolated_anchor_is_that_of_its_own_token_in_any_micro_batch(model_path: Path, tmp_path: Path) -> None:
    batch = random_batch(plain_model(model_path), step=4, version=1)
    entries = [dataclasses.replace(entry, group=aged(entry.group, age % 4)) for age, entry in enumerate(batch.entries)]
    found = []
    for mode, budget in (("interpolated", 64), ("interpolated", 5000), ("direct", 5000)):
        learner = {"microbatch_tokens": budget, "lr": 1e-4}
        config = learner_config(model_path, loss={"ratio_mode": mode}, learner=learner)
        given = dataclasses.replace(batch, entries=tuple(entries))
        found.append([r.loss for r in make_updater(config, tiny_policy(config), tmp_path).run(given).minibatches])
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert found[0] != pytest.approx(found[2], abs=1e-4), "ages 2 and 3 have another anchor than alpha"


def aged(group: Group, age: int) -> Group:
    """Sampled so many versions before step 4."""
    return dataclasses.replace(group, versions=np.full_like(group.versions, 4 - age))


def test_remembered_anchors_are_forgotten_when_the_group_cannot_come_back(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(model_path, loss={"ratio_mode": "official"}, algorithm={"high_window": 3})
    updater = make_updater(config, tiny_policy(config), tmp_path)
    for step in (1, 2, 3):
        updater.run(random_batch(num_groups=1, step=step))
    assert dict(updater.memory.steps) == {"g-1-0": 1, "g-2-0": 2, "g-3-0": 3}
    updater.run(random_batch(num_groups=1, step=4))
    # B_high of step 5 holds births 2, 3 and 4.
    assert dict(updater.memory.steps) == {"g-2-0": 2, "g-3-0": 3, "g-4-0": 4}


def test_anchors_are_remembered_for_as_long_as_the_composer_reuses_groups(model_path: Path, tmp_path: Path) -> None:
    remix = {"composer": "remix", "options": {"window": 6}}
    config = learner_config(model_path, loss={"ratio_mode": "official"}, algorithm=remix)
    assert config.algorithm.high_window == 3
    assert make_updater(config, tiny_policy(config), tmp_path).memory.window == 6
