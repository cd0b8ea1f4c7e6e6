"""The models that are shipped are neither too weak nor too strong to train, within the errors of small samples."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from models.evaluate_base_model import summary  # noqa: E402
from models.sampler import sample_groups  # noqa: E402
from tests.support.tasks import maker  # noqa: E402

MODELS = Path(__file__).parents[2] / "models"
COUNTDOWN, GEOMETRY = MODELS / "countdown-tiny", MODELS / "geometry-tiny"
countdown_task, geometry_task = maker("countdown"), maker("geometry")


def test_the_countdown_model_leaves_room_to_learn() -> None:
    """40 held-out problems with 8 responses: standard errors of about 0.04 and 0.03 around the card's figures."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(COUNTDOWN).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(COUNTDOWN)
    task = countdown_task(num_held_out=40, held_out=["cd3", "cd4"])
    accuracy = {}
    for split in task.held_out_splits:
        generator = torch.Generator().manual_seed(0)
        groups = sample_groups(
            model, tokenizer, task, task.prompts(split), group_size=8, max_new_tokens=64, generator=generator
        )
        accuracy[split] = summary(groups)["accuracy"]
    assert 0.25 < accuracy["cd3"] < 0.7
    assert 0.04 < accuracy["cd4"] < 0.3


def test_the_geometry_model_looks_and_leaves_room_to_learn() -> None:
    """60 held-out problems with 8 responses: a standard error of about 0.05 around the card's figures."""
    pytest.importorskip("PIL.Image", reason="requirements of images")
    from models.evaluate_geometry_model import Sampler

    torch.set_num_threads(1)
    model = transformers.AutoModelForImageTextToText.from_pretrained(GEOMETRY).eval()
    task = geometry_task(num_held_out=60, num_train=1, held_out=["geometry", "geometry-blank", "geometry-swapped"])
    sampler = Sampler(model, transformers.AutoTokenizer.from_pretrained(GEOMETRY), task, seed=0)

    def accuracy(split: str) -> float:
        groups = sampler.groups(task.prompts(split), 8, 1.0)
        return sum(response.reward for group in groups for response in group) / (8 * len(groups))

    measured = json.loads((GEOMETRY / "evaluation.json").read_text())
    assert abs(accuracy("geometry") - measured["temperature_1"]["accuracy"]) < 0.2
    assert accuracy("geometry-blank") < 0.08
    assert accuracy("geometry-swapped") < 0.12
