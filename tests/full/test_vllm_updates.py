"""Weight updates of a busy vLLM: how long the canary waits, and what happens to the KV cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, ModelConfig
from bapo.core.errors import WeightMismatchError
from bapo.core.sequences import sequences_of
from bapo.core.types import Canary, Group, RolloutRequest, WeightUpdate
from rollout_server.engines import vllm
from rollout_server.weights.canary import Agreement
from rollout_server.weights.receive import load_verified
from tests.full.test_vllm_engine import BLOCK_SIZE, CANARY_TOKENS, TOLERANCE, Rig, reference_of
from tests.support.engines import Driven
from tests.support.factories import make_request
from tests.support.tiny_model import reference_logprobs, write_tiny_model

NUM_GROUPS = 4
GROUP_SIZE = 8
NUM_TOKENS = 48
LONG_PROMPT = ",".join(map(str, range(10, 44))) + "->80:"
NUM_PROMPT_TOKENS = 69
"""Two blocks of the KV cache and a part of one."""


@dataclass
class Counted:
    """An engine, and what vLLM's own scheduler has given out."""

    rig: Rig
    keeps: bool
    num_steps: int = 0
    num_scheduled: int = 0

    @property
    def engine(self) -> vllm.VllmEngine:
        return self.rig.engine


@pytest.fixture(scope="module", params=["recompute", "keep"])
def counted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counted]:
    folder = tmp_path_factory.mktemp("updates")
    learner = write_tiny_model(folder / "model")
    config = Config(
        model=ModelConfig(path=str(folder / "model")),
        rollout=RolloutConfig(
            max_groups_in_flight=NUM_GROUPS,
            max_prompt_tokens=128,
            max_response_tokens=NUM_TOKENS,
            kv_cache_at_update=request.param,
            engine_options={"block_size": BLOCK_SIZE},
        ),
    )
    os.environ.update(vllm.ENVIRONMENT)
    engine = vllm.make_engine(config)
    engine._sampling.ignore_eos = True  # every response has its full length
    calls = Driven(engine, vllm.make_tokenization(config), config)
    rig = Rig(engine=engine, learner=learner, folder=folder, temperature=1.0, calls=calls)
    found = Counted(rig, keeps=request.param == "keep")
    count(found)
    yield found
    engine.close()


def count(counted: Counted) -> None:
    step, schedule = counted.engine._engine.step, counted.engine._scheduler.schedule

    def counted_step() -> Any:
        counted.num_steps += 1
        return step()

    def counted_schedule(*arguments: Any) -> Any:
        output = schedule(*arguments)
        counted.num_scheduled += output.total_num_scheduled_tokens
        return output

    counted.engine._engine.step = counted_step  # type: ignore[method-assign]
    counted.engine._scheduler.schedule = counted_schedule


def long_request(prompt_id: str) -> RolloutRequest:
    request = make_request(prompt_id=prompt_id, group_size=GROUP_SIZE)
    return msgspec.structs.replace(request, prompt=msgspec.structs.replace(request.prompt, text=LONG_PROMPT))


def fill(counted: Counted, num_groups: int, num_steps: int) -> None:
    for i in range(num_groups):
        counted.rig.calls.submit(long_request(f"p{i}"))
    for _ in range(num_steps):
        assert counted.rig.calls.step() == []


def test_the_canary_is_answered_within_three_steps_of_an_update_under_full_load(counted: Counted) -> None:
    fill(counted, num_groups=NUM_GROUPS * 3 // 2, num_steps=8)
    assert counted.engine.occupancy.running == NUM_GROUPS * GROUP_SIZE
    assert counted.engine.occupancy.waiting == NUM_GROUPS * GROUP_SIZE // 2
    update = counted.rig.publish(1)
    counted.engine.load_weights(update.path, update.version)
    before = counted.num_steps
    logprobs = counted.engine.logprobs(CANARY_TOKENS)
    assert counted.num_steps - before <= 3
    assert logprobs == pytest.approx(update.canary.logprobs, abs=TOLERANCE)
    groups = counted.rig.finish()
    assert len(groups) == NUM_GROUPS * 3 // 2
    assert {int(length) for group in groups for length in group.lengths} == {NUM_TOKENS}
    assert counted.engine.occupancy.running == counted.engine.occupancy.waiting == 0


def test_tokens_in_flight_are_computed_again_or_kept_as_configured(counted: Counted) -> None:
    num_steps = 10
    fill(counted, num_groups=NUM_GROUPS, num_steps=num_steps)
    before = reference_of(counted.rig)
    update = counted.rig.publish(2)
    counted.num_scheduled, already = 0, tokens_so_far(counted)
    counted.engine.load_weights(update.path, update.version)
    groups = counted.rig.finish()
    num_responses = NUM_GROUPS * GROUP_SIZE
    # A response of N tokens is N - 1 tokens after its prompt: the last one is never an input.
    decoded = num_responses * NUM_TOKENS - already
    again = counted.num_scheduled - decoded
    if counted.keeps:
        assert again == 0
    else:
        # The prompt is the same for all: its two whole blocks are computed once, its last tokens by each response.
        assert again == already + 2 * BLOCK_SIZE + num_responses * (NUM_PROMPT_TOKENS - 2 * BLOCK_SIZE)
    check_log_probs(counted, before, groups)


def tokens_so_far(counted: Counted) -> int:
    return sum(len(request.output_token_ids) for request in counted.engine._scheduler.requests.values())


def check_log_probs(counted: Counted, before: Rig, groups: list[Group]) -> None:
    """Log-probs are those of the policy that each token's version names; after the update they are off where keys and
    values are old."""
    for group in groups:
        olds, news = before.differences([group]), counted.rig.differences([group])
        oldest = group.policy_version
        for old, new, response in zip(olds, news, sequences_of(group), strict=True):
            num_old = int((response.versions == oldest).sum())
            assert 0 < num_old < len(old)
            assert old[:num_old].max() < TOLERANCE
            assert new[:num_old].max() > 0.01
            if counted.keeps:
                assert old[num_old:].max() > 0.01
                assert new[num_old:].max() > 0.01
            else:
                assert new[num_old:].max() < TOLERANCE


def test_a_new_request_never_uses_a_prefix_of_older_weights(counted: Counted) -> None:
    fill(counted, num_groups=1, num_steps=4)  # its prompt is cached, and in use
    update = counted.rig.publish(3)
    counted.engine.load_weights(update.path, update.version)
    counted.rig.calls.submit(long_request("new"))
    (group,) = [group for group in counted.rig.finish() if group.group_id == "g-new"]
    assert max(float(difference.max()) for difference in counted.rig.differences([group])) < TOLERANCE


@dataclass
class Bfloat16:
    """An engine in bfloat16 with two updates, and the learner's weights in float32."""

    engine: vllm.VllmEngine
    learner: LlamaForCausalLM
    agreement: Agreement
    folder: Path

    def publish(self, size: float = 0.02) -> dict[str, torch.Tensor]:
        """A step of the learner. Returns: the weights as they are published."""
        generator = torch.Generator().manual_seed(self.engine.policy_version)
        with torch.no_grad():
            for parameter in self.learner.parameters():
                parameter += size * torch.randn(parameter.shape, generator=generator)
        return {name: value.detach().to(torch.bfloat16) for name, value in self.learner.named_parameters()}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """The learner's canary with these weights. Raises: WeightMismatchError."""
        path = self.folder / "weights.safetensors"
        save_file(tensors, path)
        logprobs = reference_logprobs(self.learner, list(CANARY_TOKENS)).tolist()
        load_verified(
            self.engine,
            WeightUpdate(
                version=self.engine.policy_version + 1,
                path=str(path),
                digest="",
                num_bytes=0,
                canary=Canary(token_ids=CANARY_TOKENS, logprobs=tuple(logprobs), tolerance=0.5),
            ),
            self.agreement,
        )


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bfloat16]:
    folder = tmp_path_factory.mktemp("bfloat16")
    learner = write_tiny_model(folder / "model")
    config = Config(model=ModelConfig(path=str(folder / "model"), dtype="bfloat16"))
    os.environ.update(vllm.ENVIRONMENT)
    engine = vllm.make_engine(config)
    found = Bfloat16(engine, learner, Agreement(), folder)
    for _ in range(2):
        found.load(found.publish())
    yield found
    engine.close()


def test_a_layer_of_the_previous_version_is_noticed_far_below_the_bound(bfloat16: Bfloat16) -> None:
    # The bound is 0.5 nats; three times what two updates have differed by is less than 0.2.
    old = bfloat16.publish()
    bfloat16.load(old)
    new = bfloat16.publish()
    mixed = {name: old[name] if ".layers.1." in name else value for name, value in new.items()}
    with pytest.raises(WeightMismatchError):
        bfloat16.load(mixed)
    bfloat16.load(new)
    bfloat16.publish(size=0.01)
    with pytest.raises(WeightMismatchError):
        bfloat16.load(new)
