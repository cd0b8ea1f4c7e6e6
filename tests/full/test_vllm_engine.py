"""Real vLLM on CPU against a plain transformers forward of the same tokens: before, during and after weight updates.

Two engines: a tied head at temperature 1 (the shipped model's kind), an own head at temperature 0.7.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from bapo.algorithms.settings import CadenceConfig
from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, ModelConfig, RunConfig
from bapo.core.errors import ContractError, WeightMismatchError
from bapo.core.sequences import group_columns, sequences_of
from bapo.core.token_arrays import Float32s
from bapo.core.types import Canary, Group, WeightUpdate
from bapo.runtime.file_digest import digest_of
from bapo.runtime.sampling_limits import LIMITS
from rollout_server.engines import vllm
from rollout_server.weights.canary import Agreement
from rollout_server.weights.receive import load_verified
from tests.support.engines import Driven
from tests.support.factories import make_request
from tests.support.tiny_model import EOS, perturb, reference_logprobs, save_weights, write_tiny_model

TOLERANCE = 1e-4
BLOCK_SIZE = 32
CANARY_TOKENS = (16, 103, 11, 214, 84, 209, 20, 30, 40)


@dataclass
class Rig:
    """An engine, and the same weights in transformers: what the learner holds."""

    engine: vllm.VllmEngine
    learner: object
    folder: Path
    temperature: float
    calls: Driven

    def publish(self, seed: int) -> WeightUpdate:
        """The learner takes a step and writes its weights for the next version."""
        perturb(self.learner, seed=seed)
        return self.write(self.engine.policy_version + 1)

    def write(self, version: int) -> WeightUpdate:
        path = self.folder / f"version-{version}.safetensors"
        save_weights(self.learner, path)
        logprobs = tuple(reference_logprobs(self.learner, list(CANARY_TOKENS)).tolist())
        return WeightUpdate(
            version=version,
            path=str(path),
            digest=digest_of(path),
            num_bytes=path.stat().st_size,
            canary=Canary(token_ids=CANARY_TOKENS, logprobs=logprobs, tolerance=TOLERANCE),
        )

    def sample(self, num_groups: int = 4) -> list[Group]:
        return self.calls.finish(make_request(prompt_id=f"p{i}") for i in range(num_groups))

    def finish(self) -> list[Group]:
        return self.calls.finish()

    def differences(self, groups: list[Group]) -> list[Float32s]:
        """One [length] array per response: |rollout log-prob - the learner's|."""
        result = []
        for group in groups:
            prompt = group.prompt_token_ids.tolist()
            for response in sequences_of(group):
                tokens = response.token_ids.tolist()
                reference = reference_logprobs(self.learner, prompt + tokens, temperature=self.temperature)
                result.append(np.abs(reference[len(prompt) - 1 :].numpy() - response.rollout_logprobs))
        return result


def tensors_of(rig: Rig) -> tuple[dict[str, tuple[int, int]], dict[str, Float32s]]:
    """(identity, address) and the values of every parameter and buffer of vLLM's model."""

    def look(worker: Any) -> Any:
        model = worker.model_runner.get_model()
        named = dict([*model.named_parameters(), *model.named_buffers()])
        where = {name: (id(tensor), tensor.data_ptr()) for name, tensor in named.items()}
        return where, {name: tensor.detach().float().numpy().copy() for name, tensor in named.items()}

    (found,) = rig.engine._engine.collective_rpc(look)
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=[(True, 1.0), (False, 0.7)], ids=["tied-T1", "untied-T0.7"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    tie, temperature = request.param
    folder = tmp_path_factory.mktemp("vllm")
    learner = write_tiny_model(folder / "model", tie=tie)
    config = Config(
        run=RunConfig(deterministic=not tie),
        cadence=CadenceConfig(max_steps_ahead=0, wait_for_reevaluation=True),
        model=ModelConfig(path=str(folder / "model")),
        rollout=RolloutConfig(
            temperature=temperature,
            max_groups_in_flight=8,
            max_prompt_tokens=128,
            engine_options={"block_size": BLOCK_SIZE},
        ),
    )
    os.environ.update(vllm.ENVIRONMENT)
    engine = vllm.make_engine(config)
    calls = Driven(engine, vllm.make_tokenization(config), config)
    yield Rig(engine=engine, learner=learner, folder=folder, temperature=temperature, calls=calls)
    engine.close()


def test_log_probs_equal_the_learners_before_and_after_two_updates_in_place(rig: Rig) -> None:
    for seed in (None, 1, 2):
        if seed is not None:
            load_verified(rig.engine, rig.publish(seed), Agreement())
        groups = rig.sample()
        assert len(groups) == 4
        assert max(float(difference.max()) for difference in rig.differences(groups)) < TOLERANCE
        assert {tuple(pair) for group in groups for pair in group.versions.tolist()} == {
            (rig.engine.policy_version,) * 2
        }


def test_an_evaluation_is_sampled_at_its_own_temperature_and_training_at_that_of_the_run(rig: Rig) -> None:
    rig.calls.submit(
        msgspec.structs.replace(make_request(prompt_id="cold", group_size=8), temperature=1e-4), max_tokens=4
    )
    rig.calls.submit(make_request(prompt_id="warm", group_size=8), max_tokens=4)
    cold, warm = sorted(rig.finish(), key=lambda group: group.group_id)
    assert len(set(map(tuple, np.split(cold.token_ids, np.cumsum(cold.lengths)[:-1])))) == 1
    assert len(set(map(tuple, np.split(warm.token_ids, np.cumsum(warm.lengths)[:-1])))) > 1


def words_of(rig: Rig, token_ids: list[int]) -> str:
    return str(rig.calls.tokenization._tokenizer.decode(token_ids, skip_special_tokens=False))


def test_a_stop_text_ends_a_response_which_keeps_its_tokens_with_the_learners_log_probs(rig: Rig) -> None:
    request = make_request(prompt_id="stopped", group_size=8)
    stop = (*"+-*/,:", "</answer>")
    rig.calls.submit(request, stop=stop)
    (group,) = rig.finish()
    ended = [row for row in sequences_of(group) if any(text in words_of(rig, row.token_ids.tolist()) for text in stop)]
    assert ended, "one token of 31 is one of them"
    for row in ended:
        ids = row.token_ids.tolist()
        assert not any(text in words_of(rig, ids[:-1]) for text in stop)
        assert not row.truncated
        assert any(text in rig.calls.tokenization.decode([ids])[0] for text in stop), "it is graded with the text"
    largest = max(float(difference.max()) for difference in rig.differences([group]))
    assert largest < TOLERANCE
    assert np.exp(largest) == pytest.approx(1.0, abs=1e-4), "the ratio of the first step"


def test_a_stop_text_of_several_tokens_changes_nothing_that_is_sampled_before_its_end(rig: Rig) -> None:
    request = make_request(prompt_id="by-seed", group_size=2)
    rig.calls.submit(request, seed=5)
    free = [row.token_ids.tolist() for group in rig.finish() for row in sequences_of(group)]
    stop = words_of(rig, free[0][3:6])
    rig.calls.submit(request, seed=5, stop=(stop,))
    stopped = [row for group in rig.finish() for row in sequences_of(group)]
    num = next(n for n in range(1, 7) if stop in words_of(rig, free[0][:n]))
    assert stopped[0].token_ids.tolist() == free[0][:num]
    assert not stopped[0].truncated
    assert rig.calls.tokenization.num_until_stop(free[0], [stop]) == num
    assert rig.calls.tokenization.num_until_stop(free[0][: num - 1], [stop]) is None


def test_the_text_of_a_special_token_is_a_stop_text_too(rig: Rig) -> None:
    rig.calls.submit(make_request(prompt_id="special", group_size=64), stop=("<unk>", "<bos>"))
    (group,) = rig.finish()
    rows = [row.token_ids.tolist() for row in sequences_of(group)]
    assert any(ids[-1] in (2, 3) for ids in rows)
    assert not any({2, 3} & set(ids[:-1]) for ids in rows)


@pytest.mark.parametrize("asked", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}], ids=str)
def test_an_evaluation_of_the_most_likely_tokens_is_greedy(rig: Rig, asked: dict[str, Any]) -> None:
    request = make_request(prompt_id="greedy", group_size=4)
    rig.calls.submit(msgspec.structs.replace(request, **asked, max_response_tokens=8))
    (group,) = rig.finish()
    prompt, rows = group.prompt_token_ids.tolist(), [row.token_ids.tolist() for row in sequences_of(group)]
    greedy: list[int] = []
    while len(greedy) < 8 and greedy[-1:] != [EOS]:
        logits = rig.learner(torch.tensor([prompt + greedy])).logits[0, -1]  # type: ignore[operator]
        greedy.append(int(logits.argmax()))
    assert rows == [greedy] * 4


def test_an_evaluation_may_forbid_an_early_end_and_penalize_repetition(rig: Rig) -> None:
    request = msgspec.structs.replace(make_request(prompt_id="long", group_size=256), temperature=2.0)
    rig.calls.submit(request)
    (free,) = rig.finish()
    assert free.lengths.min() < 50
    rig.calls.submit(msgspec.structs.replace(request, min_tokens=50))
    (group,) = rig.finish()
    assert group.lengths.min() >= 50
    request = msgspec.structs.replace(request, group_size=32, max_response_tokens=20)
    for asked in ({"repetition_penalty": 1e6}, {"presence_penalty": 2.0, "frequency_penalty": 2.0}):
        repeated = []
        for further in ({}, asked):
            rig.calls.submit(msgspec.structs.replace(request, temperature=0.5, **further))
            (group,) = rig.finish()
            rows = [row.token_ids.tolist() for row in sequences_of(group)]
            repeated.append(sum(len(row) - len(set(row)) for row in rows) / sum(map(len, rows)))
        assert repeated[1] < repeated[0] / 2, asked


def test_a_deterministic_run_samples_the_same_tokens_whatever_else_its_engine_samples(rig: Rig) -> None:
    def sample(others: int) -> list[int]:
        for i in range(others):
            rig.calls.submit(make_request(prompt_id=f"before-{i}"))
        rig.calls.submit(make_request(prompt_id="looked-at", group_size=8))
        found = [group for group in rig.finish() if group.group_id == "g-looked-at"]
        return found[0].token_ids.tolist()

    alone, among_others = sample(0), sample(5)
    is_deterministic = rig.temperature == 0.7
    assert (alone == among_others) == is_deterministic


def test_an_update_keeps_every_tensor_of_the_model_at_its_address_as_cuda_graphs_need_it(rig: Rig) -> None:
    before, old = tensors_of(rig)
    load_verified(rig.engine, rig.publish(7), Agreement())
    after, new = tensors_of(rig)
    assert after == before
    # Some of them (with packed copies) are empty on CPUs; these hold numbers, and the update has changed them.
    held = [name for name in old if old[name].size]
    assert [name for name in held if "norm" in name]
    assert [name for name in held if not np.array_equal(old[name], new[name])]


def test_a_response_in_flight_goes_on_with_the_new_weights_and_says_so(rig: Rig) -> None:
    old_version = rig.engine.policy_version
    rig.calls.submit(make_request(prompt_id="long", group_size=8))
    for _ in range(6):
        assert rig.calls.step() == []
    before = reference_of(rig)
    load_verified(rig.engine, rig.publish(3), Agreement())
    (group,) = rig.finish()
    with_new = rig.differences([group])
    with_old = before.differences([group])
    mixed = [i for i, pair in enumerate(group.versions.tolist()) if pair == [old_version, old_version + 1]]
    assert mixed
    for i in mixed:
        # The tokens of the first six steps are the old policy's, every later one is the new policy's.
        assert with_old[i][:6].max() < TOLERANCE
        assert with_new[i][6:].max() < TOLERANCE
        assert with_new[i][:6].max() > 0.01


def test_a_response_that_is_continued_has_each_tokens_log_prob_under_the_weights_that_sampled_it(rig: Rig) -> None:
    old_version, request = rig.engine.policy_version, make_request(prompt_id="segments", group_size=8)
    rig.calls.submit(request, max_tokens=6)
    (group,) = rig.finish()
    before, rows = reference_of(rig), list(sequences_of(group))
    load_verified(rig.engine, rig.publish(7), Agreement())
    prompt, open_rows = group.prompt_token_ids.tolist(), [i for i, row in enumerate(rows) if row.truncated]
    assert open_rows
    for i in open_rows:
        rig.calls.submit(
            request, call_id=str(i), token_ids=[*prompt, *rows[i].token_ids.tolist()], num=1, max_tokens=16
        )
    for part in rig.finish():
        rows[int(part.group_id)] = rows[int(part.group_id)].followed_by(next(sequences_of(part)))
    whole = replace(group, **group_columns(rows))
    with_new, with_old = rig.differences([whole]), before.differences([whole])
    for i in open_rows:
        assert with_old[i][:6].max() < TOLERANCE
        assert with_new[i][6:].max() < TOLERANCE
        assert with_new[i][:6].max() > 0.01
        assert rows[i].versions.tolist() == [old_version] * 6 + [old_version + 1] * (len(rows[i].token_ids) - 6)


def reference_of(rig: Rig) -> Rig:
    """The learner as it is now, whatever steps it takes later."""
    return replace(rig, learner=copy.deepcopy(rig.learner))


def test_a_prompt_that_was_cached_under_old_weights_is_computed_again(rig: Rig) -> None:
    # Longer than two blocks of the key-value cache: only whole blocks are ever reused.
    request = make_request(group_size=4)
    prompt = msgspec.structs.replace(request.prompt, text=",".join(map(str, range(10, 44))) + "->80:")
    for seed in (4, 40):
        rig.calls.submit(msgspec.structs.replace(request, prompt=prompt))
        (group,) = rig.finish()
        assert len(group.prompt_token_ids) > 2 * BLOCK_SIZE
        assert max(float(difference.max()) for difference in rig.differences([group])) < TOLERANCE
        load_verified(rig.engine, rig.publish(seed), Agreement())


def test_weights_that_the_canary_was_not_measured_on_are_detected(rig: Rig) -> None:
    update = rig.publish(5)
    shifted = tuple(value + 0.01 for value in update.canary.logprobs)
    other = replace(update, canary=replace(update.canary, logprobs=shifted))
    with pytest.raises(WeightMismatchError):
        load_verified(rig.engine, other, Agreement())


@pytest.mark.parametrize("field", [{"temperature": 2.6}, {"top_p": 1.5}, {"max_response_tokens": 0}, {"min_p": 1.5}])
def test_a_request_that_vllm_refuses_is_refused_alone(rig: Rig, field: dict[str, Any]) -> None:
    rig.calls.submit(make_request(prompt_id="good"))
    with pytest.raises(ContractError):
        rig.calls.submit(msgspec.structs.replace(make_request(prompt_id="bad"), **field))
    rig.calls.submit(make_request(prompt_id="after"))
    assert len(rig.finish()) == 2


def test_the_limits_of_temperatures_are_those_of_vllm() -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError

    limits = LIMITS["vllm"]
    for kept in (limits.lowest_temperature, limits.highest_temperature):
        assert SamplingParams(temperature=kept).temperature == kept
    assert SamplingParams(temperature=0.99 * limits.lowest_temperature).temperature == limits.lowest_temperature
    with pytest.raises(VLLMClientError):
        SamplingParams(temperature=1.01 * limits.highest_temperature)
