"""Real vLLM on CPU with images, against a plain transformers forward of the same tokens and pictures.

The model is random, but it looks: another picture changes log-probs by much more than the tolerance.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, ModelConfig
from bapo.core.errors import ConfigError, ContractError
from bapo.core.sequences import sequences_of
from bapo.core.token_arrays import Float32s
from bapo.core.types import Group, Prompt, RolloutRequest, Timing
from bapo.runtime.torchvision_build import complete_torchvision
from bapo.runtime.vision import ImageReader, vision_model
from bapo.tasks.base import make_prompt
from rollout_server.engines import vllm
from rollout_server.rollouts.base import Rollout
from tests.support.engines import Driven
from tests.support.factories import make_request

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("pip install --no-deps -r requirements/vision.txt", allow_module_level=True)
complete_torchvision()

from tests.support.tiny_model import perturb, save_weights  # noqa: E402 - transformers may be imported from here on
from tests.support.tiny_vision import (  # noqa: E402
    IMAGE,
    START,
    VIDEO,
    Pictures,
    picture,
    reference_logprobs,
    write_tiny_vision,
)

TOLERANCE = 1e-4
BLOCK_SIZE = 32
SIZES = ((48, 32), (64, 64), (32, 16), (50, 41))
"""6, 16, 2 and 9 tokens."""


@dataclass
class Rig:
    engine: vllm.VllmEngine
    learner: object
    folder: Path
    pictures: Pictures
    calls: Driven

    def prompt(self, seed: int, text: str = "<image>12,99,7->80:") -> Prompt:
        digests = [self.pictures.add(picture(seed + i, *SIZES[(seed + i) % 4])) for i in range(text.count("<image>"))]
        return make_prompt("countdown", text, {"answer": "1"}, images=digests)

    @property
    def too_long(self) -> Prompt:
        """7 pictures of 16 tokens, each between 2 others, and 4 tokens of text."""
        digest = self.pictures.add(picture(1, 64, 64))
        return make_prompt("countdown", "<image>" * 7 + "->80:,", {}, images=[digest] * 7)

    def request(self, prompt: Prompt, request_id: str, group_size: int = 4) -> RolloutRequest:
        return msgspec.structs.replace(make_request(request_id=request_id, group_size=group_size), prompt=prompt)

    def sample(self, prompts: list[Prompt]) -> dict[str, Group]:
        for i, prompt in enumerate(prompts):
            self.calls.submit(self.request(prompt, f"g{i}"))
        return self.finish()

    def finish(self) -> dict[str, Group]:
        return {group.group_id: group for group in self.calls.finish()}

    def publish(self, seed: int) -> None:
        """The learner takes a large step, vision tower included."""
        perturb(self.learner, seed=seed)
        path = self.folder / f"{seed}.safetensors"
        save_weights(self.learner, path)
        self.engine.load_weights(str(path), self.engine.policy_version + 1)

    def difference(self, group: Group, prompt: Prompt) -> float:
        return max(float(difference.max()) for difference in self.differences(group, prompt))

    def differences(self, group: Group, prompt: Prompt) -> list[Float32s]:
        """One [length] array per response: |rollout log-prob - the learner's|."""
        reader = ImageReader(vision_model(str(self.folder / "model")), self.pictures.read)
        before, patches = group.prompt_token_ids.tolist(), reader.of_prompt(prompt)
        found = []
        for response in sequences_of(group):
            reference = reference_logprobs(self.learner, before + response.token_ids.tolist(), patches)
            found.append(np.abs(reference.detach().numpy()[len(before) - 1 :] - response.rollout_logprobs))
        return found


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("vllm")
    learner = write_tiny_vision(folder / "model", tie=request.param)
    pictures = Pictures()
    config = Config(
        model=ModelConfig(path=str(folder / "model")),
        rollout=RolloutConfig(max_groups_in_flight=8, max_prompt_tokens=128, engine_options={"block_size": BLOCK_SIZE}),
    )
    os.environ.update(vllm.ENVIRONMENT)
    engine = vllm.make_engine(config)
    calls = Driven(engine, vllm.make_tokenization(config, pictures.read), config)
    yield Rig(engine=engine, learner=learner, folder=folder, pictures=pictures, calls=calls)
    engine.close()


LONG = "<image>" + ",".join(map(str, range(30))) + "<image>->80:"
"""More than two blocks of the cache before its second picture."""


def test_log_probs_are_those_of_transformers_also_with_several_pictures_and_none(rig: Rig) -> None:
    prompts = [rig.prompt(0), rig.prompt(1), rig.prompt(4, "<image>1,2<image>->3:<image>"), rig.prompt(8, LONG)]
    prompts += [make_prompt("countdown", "12,99,7->80:", {"answer": "1"})]
    groups = rig.sample(prompts)
    found = [rig.difference(groups[f"g{i}"], prompt) for i, prompt in enumerate(prompts)]
    assert max(found) < TOLERANCE, found


def test_the_model_looks(rig: Rig) -> None:
    prompt = rig.prompt(0)
    other = make_prompt("countdown", prompt.text, {"answer": "1"}, images=[rig.pictures.add(picture(77, *SIZES[0]))])
    group = rig.sample([prompt])["g0"]
    assert rig.difference(group, other) > 100 * TOLERANCE


def test_prompt_tokens_are_counted_and_returned_with_those_of_the_picture(rig: Rig) -> None:
    group = rig.sample([rig.prompt(1)])["g0"]
    ids = group.prompt_token_ids.tolist()
    assert (ids[0], ids[1:17], ids[18]) == (START, [IMAGE] * 16, 16)  # 64 x 64 pixels
    with pytest.raises(ContractError, match=r"rollout\.max_prompt_tokens"):
        rig.calls.submit(rig.request(rig.too_long, "long"))


def test_tokens_of_pictures_and_unknown_ids_are_never_sampled(rig: Rig) -> None:
    groups = rig.sample([rig.prompt(seed) for seed in range(8)])
    sampled = np.concatenate([group.token_ids for group in groups.values()])
    assert len(sampled) > 200
    assert sampled.max() < START < VIDEO


def test_after_an_update_pictures_that_were_seen_are_seen_with_the_new_weights(rig: Rig) -> None:
    prompts = [rig.prompt(0), rig.prompt(1), rig.prompt(8, LONG)]
    rig.sample(prompts)
    before = rig.sample(prompts)  # the caches are warm
    rig.publish(seed=3)
    assert max(rig.difference(before[f"g{i}"], prompt) for i, prompt in enumerate(prompts)) > 0.1
    after = rig.sample(prompts)
    found = [rig.difference(after[f"g{i}"], prompt) for i, prompt in enumerate(prompts)]
    assert max(found) < TOLERANCE, found


def test_an_update_amid_sampling_reaches_the_picture_of_a_response_in_flight(rig: Rig) -> None:
    prompt = rig.prompt(1, "<image>12,99,7->81:")
    rig.calls.submit(rig.request(prompt, "g"))
    for _ in range(6):
        assert rig.calls.step() == []
    rig.publish(seed=4)
    group = rig.finish()["g"]
    new = group.token_versions == rig.engine.policy_version
    assert new.sum() > 10
    difference = np.concatenate(rig.differences(group, prompt))
    assert difference[new].max() < TOLERANCE
    assert difference[~new].max() > TOLERANCE


def test_a_response_that_is_resumed_keeps_its_prompt_and_its_log_probs(rig: Rig) -> None:
    prompt = rig.prompt(1, "<image>12,99,7->82:<image>")
    request = rig.request(prompt, "g", group_size=1)
    rig.calls.submit(request, max_tokens=5)
    first = rig.finish()["g"]
    so_far = [*first.prompt_token_ids.tolist(), *first.token_ids.tolist()]
    rig.calls.submit(request, call_id="g#0", token_ids=so_far, max_tokens=7)
    second = rig.finish()["g#0"]
    assert second.prompt_token_ids.tolist() == so_far
    assert len(first.prompt_token_ids) == 2 + 16 + 8 + 2 + 2
    (before,), (after,) = sequences_of(first), sequences_of(second)
    whole = Rollout(
        request=request, prompt_token_ids=first.prompt_token_ids, sequences=(before.followed_by(after),)
    ).group(np.zeros(1, np.float32), worker_id="", timing=Timing(claimed_at=0, sample_s=0, grade_s=0))
    assert rig.difference(whole, prompt) < TOLERANCE


def test_the_canary_has_the_log_probs_of_the_learner(rig: Rig) -> None:
    tokens = [16, 103, 11, 214, 84, 209, 20, 30, 40]
    measured = rig.engine.logprobs(tokens)
    assert measured is not None
    assert np.abs(measured - reference_logprobs(rig.learner, tokens, []).detach().numpy()).max() < TOLERANCE


def test_prompts_are_checked_with_their_pictures_before_anything_is_sampled(rig: Rig) -> None:
    rig.calls.tokenization.check_prompts([rig.prompt(1)], rig.pictures.read)
    with pytest.raises(ConfigError, match="has 130 tokens"):
        rig.calls.tokenization.check_prompts([rig.too_long], rig.pictures.read)
