"""Packing with pictures equals transformers' own padded forward pass, values and gradients; a picture is seen once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo.config.tree import Config, ModelConfig
from bapo.core.errors import ConfigError, ContractError
from bapo.core.sequences import sequences_of
from bapo.core.types import Group, Prompt
from bapo.runtime.vision import ImageReader, VisionModel, vision_model
from contrib.gae.critic import load_critic
from learner.batch.columns import columns_of
from learner.batch.microbatch import build
from learner.batch.packing import microbatches_of, plan_passes
from learner.canary import make_canary
from learner.distributed.world import World
from learner.model.policy import Policy, load_policy
from learner.publish_weights import gather_weights
from tests.support.factories import make_batch, make_group
from tests.support.learner import learner_config
from tests.support.tiny_vision import END, IMAGE, START, Pictures, picture, reference_logprobs, write_tiny_vision

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, device=CPU)
SIZES = ((48, 32), (64, 64), (16, 32))
"""6, 16 and 2 tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    write_tiny_vision(path)
    return path


@pytest.fixture(scope="module")
def vision(folder: Path) -> VisionModel:
    found = vision_model(str(folder))
    assert found is not None
    return found


def config_of(folder: Path, **model: Any) -> Config:
    return learner_config(folder).model_copy(update={"model": ModelConfig(path=str(folder), **model)})


def group_of(seed: int, pictures: Pictures, vision: VisionModel, num_pictures: int, lengths: tuple[int, ...]) -> Group:
    """A group with that many pictures of other sizes in its prompt."""
    rng = np.random.default_rng(seed)
    files = [picture(10 * seed + i, *SIZES[(seed + i) % 3]) for i in range(num_pictures)]
    ids = [4 + seed]
    for _ in files:
        ids += [START, IMAGE, END, int(rng.integers(4, 200))]
    ids = vision.expanded(ids, [vision.patches(data) for data in files])
    group = make_group(prompt_id=f"p{seed}", rewards=tuple(float(i % 2) for i in range(len(lengths))))
    return replace(
        group,
        prompt=Prompt(
            prompt_id=f"p{seed}", text="", task="t", answer={}, images=tuple(pictures.add(data) for data in files)
        ),
        prompt_token_ids=np.array(ids, np.int32),
        token_ids=rng.integers(4, 200, sum(lengths)).astype(np.int32),
        rollout_logprobs=np.full(sum(lengths), -1.0, np.float32),
        lengths=np.array(lengths, np.int32),
    )


@pytest.fixture(scope="module")
def groups(vision: VisionModel) -> tuple[list[Group], Pictures]:
    """Two pictures, none, one: of 3, 2 and 4 responses."""
    pictures = Pictures()
    found = [
        group_of(0, pictures, vision, 2, (5, 9, 3)),
        group_of(1, pictures, vision, 0, (4, 6)),
        group_of(2, pictures, vision, 1, (7, 1, 2, 8)),
    ]
    return found, pictures


def padded(model: Any, groups: list[Group], vision: VisionModel, pictures: Pictures) -> Tensor:
    """[M] log-probs, one row and its pictures per response."""
    reader, found = ImageReader(vision, pictures.read), []
    for group in groups:
        prompt, patches = group.prompt_token_ids.tolist(), reader.of_prompt(group.prompt)
        for response in sequences_of(group):
            whole = reference_logprobs(model, [*prompt, *response.token_ids.tolist()], patches)
            found.append(whole[len(prompt) - 1 :])
    return torch.cat(found)


@pytest.mark.parametrize("budget", [10_000, 60])
def test_values_and_gradients_are_those_of_the_padded_forward(
    folder: Path, vision: VisionModel, groups: tuple[list[Group], Pictures], budget: int
) -> None:
    found, pictures = groups
    config, reader = config_of(folder), ImageReader(vision, pictures.read)
    columns = columns_of(make_batch(groups=found), config, reader)
    weight_M = torch.linspace(-1, 1, len(columns.token_ids_M))
    ours, reference = load_policy(folder, config, ALONE), load_policy(folder, config, ALONE)
    reference.model.set_attn_implementation({"text_config": "sdpa", "vision_config": "sdpa"})
    logprobs_M, num_micro, num_patches = torch.zeros_like(weight_M), 0, 0
    for micro in microbatches_of(columns, np.arange(9), budget=budget, rank=0, num_ranks=1, device=CPU):
        got, entropy = ours(micro)
        assert torch.isfinite(entropy).all()
        (got * weight_M[micro.slot_M]).sum().backward()
        logprobs_M[micro.slot_M] = got.detach()
        num_micro += 1
        num_patches += 0 if micro.images is None else len(micro.images.pixels)
    expected_M = padded(reference.model, found, vision, pictures)
    (expected_M * weight_M).sum().backward()
    torch.testing.assert_close(logprobs_M, expected_M.detach(), rtol=0, atol=1e-5)
    for (name, mine), theirs in zip(ours.model.named_parameters(), reference.model.parameters(), strict=True):
        assert mine.grad is not None, name
        difference, size = float((mine.grad - theirs.grad).abs().max()), float(theirs.grad.abs().max())
        assert difference <= 1e-5 * max(1.0, size), (name, difference, size)
    patches = [reader.patches(digest).pixels.shape[0] for group in found for digest in group.prompt.images]
    assert (num_patches == sum(patches)) if budget > 1000 else (num_micro > 1)
    assert ours.model.model.visual.patch_embed.proj.weight.grad.norm() > 1e-3


def test_responses_of_one_token_are_those_of_the_padded_forward_and_a_rank_without_any_adds_nothing(
    folder: Path, vision: VisionModel
) -> None:
    pictures = Pictures()
    found = [group_of(5, pictures, vision, 1, (1, 1, 4, 1)), group_of(6, pictures, vision, 0, (1, 1))]
    columns = columns_of(make_batch(groups=found), config_of(folder), ImageReader(vision, pictures.read))
    policy = load_policy(folder, config_of(folder), ALONE)
    logprobs_M, sizes = torch.zeros(9), []
    for rank in range(8):
        for micro in microbatches_of(columns, np.arange(6), budget=60, rank=rank, num_ranks=8, device=CPU):
            got, _ = policy(micro)
            got.sum().backward()
            logprobs_M[micro.slot_M] = got.detach()
            sizes.append(len(got))
    assert (len(sizes), sum(sizes)) == (8, 9)
    assert 0 in sizes
    gradients = [parameter.grad for parameter in policy.parameters()]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    reference = load_policy(folder, config_of(folder), ALONE)
    reference.model.set_attn_implementation({"text_config": "sdpa", "vision_config": "sdpa"})
    expected_M = padded(reference.model, found, vision, pictures)
    torch.testing.assert_close(logprobs_M, expected_M.detach(), rtol=0, atol=1e-5)


def test_text_after_a_picture_goes_on_behind_its_longer_side(vision: VisionModel) -> None:
    pictures = [vision.patches(picture(1, 48, 32))]  # 2 rows, 3 columns
    ids = np.array(vision.expanded([9, START, IMAGE, END, 8], pictures))
    assert vision.positions(ids, pictures).tolist() == [
        [0, 1, *[2] * 6, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_positions_are_those_of_transformers(folder: Path, vision: VisionModel) -> None:
    pictures = [vision.patches(picture(i, *SIZES[i])) for i in range(3)]
    ids = vision.expanded([9, START, IMAGE, END, START, IMAGE, END, 8, 8, START, IMAGE, END], pictures)
    model = load_policy(folder, config_of(folder), ALONE).model
    tokens = torch.tensor([ids])
    grid = torch.tensor([[1, found.height, found.width] for found in pictures])
    expected, _ = model.model.get_rope_index(tokens, (tokens == IMAGE).int(), image_grid_thw=grid)
    assert np.array_equal(vision.positions(np.array(ids), pictures), expected[:, 0].numpy())


def test_patches_are_those_of_transformers(folder: Path, vision: VisionModel) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from bapo.runtime.vision import decoded

    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    for width, height in [(48, 32), (50, 41), (300, 200), (7, 9), (640, 40)]:
        data = picture(3, width, height)
        mine, theirs = vision.patches(data), processor(images=[decoded(data)], return_tensors="np")
        assert theirs["image_grid_thw"].tolist() == [[1, mine.height, mine.width]]
        np.testing.assert_allclose(mine.pixels, theirs["pixel_values"], atol=1e-6)


def test_the_patches_of_the_latest_pictures_are_kept(vision: VisionModel) -> None:
    pictures, asked = Pictures(), []
    digests = [pictures.add(picture(seed, 16, 16)) for seed in range(3)]
    size = vision.patches(picture(0, 16, 16)).pixels.nbytes

    def read(digest: str) -> bytes:
        asked.append(digests.index(digest))
        return pictures.read(digest)

    reader = ImageReader(vision, read, cache_bytes=2 * size)
    for i in (0, 1, 0, 2, 0, 1):
        reader.patches(digests[i])
    assert asked == [0, 1, 2, 1]


def test_a_prompt_and_its_pictures_must_fit_together(
    folder: Path, vision: VisionModel, groups: tuple[list[Group], Pictures]
) -> None:
    found, pictures = groups
    config, reader = config_of(folder), ImageReader(vision, pictures.read)
    with pytest.raises(ContractError, match="reads text only"):
        columns_of(make_batch(groups=found), config)
    broken = replace(found[2], prompt_token_ids=found[2].prompt_token_ids[:-3])
    columns = columns_of(make_batch(groups=[broken]), config, reader)
    with pytest.raises(ContractError, match="image tokens"):
        build(columns, plan_passes(columns, np.arange(4), budget=1000, num_ranks=1)[0][0], CPU)


def test_tokens_that_are_never_sampled_have_no_probability(folder: Path, vision: VisionModel) -> None:
    policy = load_policy(folder, config_of(folder), ALONE)
    assert set(policy.sampled_tokens).isdisjoint({START, END, IMAGE, 255})
    assert len(policy.sampled_tokens) == 218
    tokens = tuple(policy.sampled_tokens[7:207:7])
    canary = make_canary(policy, tokens, "float32")
    expected = reference_logprobs(policy_in_plain(policy), list(tokens), []).detach()
    np.testing.assert_allclose(canary.logprobs, expected, atol=1e-5)


def policy_in_plain(policy: Policy) -> Any:
    policy.model.set_attn_implementation({"text_config": "sdpa", "vision_config": "sdpa"})
    return policy.model


@pytest.mark.parametrize("frozen", [False, True])
def test_the_vision_tower_trains_unless_it_is_frozen_and_is_published_either_way(folder: Path, frozen: bool) -> None:
    policy = load_policy(folder, config_of(folder, freeze_vision=frozen), ALONE)
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert any(name.startswith("model.visual.") for name in trained) is not frozen
    assert any(name.startswith("model.language_model.") for name in trained)
    assert any(name.startswith("model.visual.") for name in gather_weights(policy, torch.float32))


def test_freezing_what_is_not_there_is_refused(model_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no vision tower"):
        load_policy(model_path, config_of(model_path, freeze_vision=True), ALONE)


def test_a_critic_sees_the_pictures(folder: Path, vision: VisionModel, groups: tuple[list[Group], Pictures]) -> None:
    found, pictures = groups
    config = config_of(folder)
    critic = load_critic(config, ALONE)
    torch.nn.init.ones_(critic.head.weight)
    values = []
    for source in (pictures, Swapped(pictures)):
        columns = columns_of(make_batch(groups=found[2:]), config, ImageReader(vision, source.read))
        (micro,) = microbatches_of(columns, np.arange(4), budget=1000, rank=0, num_ranks=1, device=CPU)
        values.append(critic(micro).detach())
    assert (values[0] - values[1]).abs().max() > 1e-3


class Swapped:
    """Another picture of the same size for every digest."""

    def __init__(self, pictures: Pictures) -> None:
        self._pictures = pictures

    def read(self, digest: str) -> bytes:
        import io

        from PIL import Image

        return picture(99, *Image.open(io.BytesIO(self._pictures.read(digest))).size)
