"""The geometry model: what it is taught, that it is seen as transformers and runs see it, and what is shipped."""

import io
import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
image = pytest.importorskip("PIL.Image", reason="requirements of images")

from bapo.runtime.vision import PLACEHOLDER, vision_model  # noqa: E402
from contrib.geometry.task import BASE_MODEL_BUCKETS, KINDS, random_problem  # noqa: E402
from models import geometry_card  # noqa: E402
from models.geometry_data import CHARACTERS, IGNORE, LABELS, NO_LABEL, NOTHING, batches, exercises  # noqa: E402
from models.geometry_model import (  # noqa: E402
    IMAGE_PAD,
    NUM_IMAGE_TOKENS,
    PATCH_VALUES,
    VOCABULARY,
    build_model,
    build_tokenizer,
    check_round_trips,
    embed,
    patches_of,
    positions_of,
    prompt_ids,
    save,
)

SHIPPED = Path(__file__).parents[2] / "models" / "geometry-tiny"
MAX_BYTES = 6_000_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A model with random weights, its tokenizer and its folder."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer).eval()
    save(model, tokenizer, folder)
    return model, tokenizer, folder


def _pictures(count: int) -> list[Any]:
    rng = random.Random(0)
    return [random_problem(rng, list(KINDS), BASE_MODEL_BUCKETS).drawing() for _ in range(count)]


def test_the_batched_tower_is_the_one_of_transformers(made: tuple[Any, Any, Path]) -> None:
    model, tokenizer, folder = made
    canvases = _pictures(3)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    seen = processor([image.open(io.BytesIO(canvas.png())) for canvas in canvases], return_tensors="pt")
    patches_RPD = patches_of(torch.stack([torch.from_numpy(canvas.ink) for canvas in canvases]))
    assert torch.equal(seen["pixel_values"], patches_RPD.reshape(-1, PATCH_VALUES))
    ids_RT = torch.tensor([[*prompt_ids(tokenizer, "<image>What is the angle x?"), 50, 60, 70]] * 3)
    with torch.inference_mode():
        kinds = (ids_RT == tokenizer.convert_tokens_to_ids(IMAGE_PAD)).int()
        theirs = model(
            input_ids=ids_RT,
            pixel_values=seen["pixel_values"],
            image_grid_thw=seen["image_grid_thw"],
            mm_token_type_ids=kinds,
        ).logits
        embeddings, positions = embed(model, ids_RT, patches_RPD)
        hidden = model.model.language_model(inputs_embeds=embeddings, position_ids=positions, use_cache=False)
        ours = model.lm_head(hidden.last_hidden_state)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert (theirs[0] - theirs[1]).abs().max() > 0.01  # the pictures make a difference


def test_runs_see_what_training_saw(made: tuple[Any, Any, Path]) -> None:
    _, tokenizer, folder = made
    vision = vision_model(str(folder))
    assert vision is not None
    (canvas,) = _pictures(1)
    patches = vision.patches(canvas.png())
    ours = patches_of(torch.from_numpy(canvas.ink)[None])
    assert torch.equal(torch.from_numpy(patches.pixels.copy()), ours[0])
    text = "<image>What is the area?"
    ids = vision.expanded(tokenizer(text.replace("<image>", PLACEHOLDER))["input_ids"], [patches])
    assert ids == prompt_ids(tokenizer, text)
    assert ids.count(vision.image_token) == NUM_IMAGE_TOKENS
    positions = vision.positions(torch.tensor(ids).numpy(), [patches])
    assert torch.equal(torch.from_numpy(positions), positions_of(len(ids)))


def test_the_model_is_taught_the_right_answers_of_its_own_numbers() -> None:
    tokenizer = build_tokenizer()
    unknown = tokenizer.unk_token_id
    for ids_RT, patches_RPD, targets_RT in islice(batches(random.Random(0), tokenizer, 8), 10):
        assert patches_RPD.shape == (8, 64, PATCH_VALUES)
        assert ids_RT.shape == targets_RT.shape
        assert not (ids_RT == unknown).any()
        for ids, targets in zip(ids_RT.tolist(), targets_RT.tolist(), strict=True):
            end = ids.index(tokenizer.eos_token_id)
            trained = [target for target in targets if target != IGNORE]
            assert trained == ids[end - len(trained) + 1 : end + 1]
            text = tokenizer.decode(trained, skip_special_tokens=True)
            steps, _, answer = text.partition(";")
            assert answer == f"<answer>{steps.split('=')[-1]}</answer>"


def test_exercises_say_what_stands_where() -> None:
    exercise = next(exercises(random.Random(0), 16))
    patches_RPD, characters_RP, labels_RQ = exercise.patches_RPD, exercise.characters_RP, exercise.labels_RQ
    assert patches_RPD.shape[:2] == characters_RP.shape == (16, 64)
    assert {CHARACTERS[int(c)] for c in characters_RP.unique() if c != NOTHING} == set("0123456789x")
    # No ink, no character.
    empty = (patches_RPD == 0).all(-1)
    assert (characters_RP[empty] == NOTHING).all()
    # A label begins where one of its characters is.
    for characters, label in zip(characters_RP.reshape(-1, 4), labels_RQ.flatten(), strict=True):
        if int(label) in (NO_LABEL, IGNORE):
            continue
        assert characters.ne(NOTHING).any()
        assert CHARACTERS.index(LABELS[label][0]) in characters


def test_the_shipped_tokenizer_and_folder() -> None:
    check_round_trips(SHIPPED)
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= MAX_BYTES
    config = json.loads((SHIPPED / "config.json").read_text())
    assert config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    assert config["text_config"]["vocab_size"] == len(VOCABULARY)
    assert config["image_token_id"] == VOCABULARY.index(IMAGE_PAD)
    assert geometry_card.render(SHIPPED).split("Made by")[0] == (SHIPPED / "README.md").read_text().split("Made by")[0]
