"""DOTS: its draw (vector V19), its predictor against differences, and what it learns where embeddings tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bapo.algorithms.selectors.base import Floats, PromptPool
from bapo.core.errors import ConfigError
from bapo.core.success_counts import success_counts_of
from contrib.dots.attention import (
    Predictor,
    loss_and_gradient,
    new_predictor,
    normalised,
    predict,
    trained,
)
from contrib.dots.selector import Dots, log_weights
from tests.support.vectors import vector


def plain(num_dims: int = 2) -> Predictor:
    """W = I: attention by the dot product of the embeddings; T = 1, b = 0."""
    made = new_predictor(num_dims, num_dims, np.random.default_rng(0))
    return replace(made, parameters=np.concatenate([np.eye(num_dims).ravel(), made.parameters[-6:]]))


def test_v19_prompts_are_drawn_by_their_distance_from_half_right() -> None:
    given = vector("V19.dots_softmax")
    weights = np.exp(log_weights(np.array(given["d"]), 1e-3))
    assert (weights / weights.sum()).tolist() == pytest.approx(given["p"], abs=1e-6)


def test_a_prompt_is_as_hard_as_the_references_that_it_resembles() -> None:
    """Scores e_i . r_j / sqrt 2 with r = (1, 0) right, (0, 1) wrong; e = (sqrt 2 ln 3, 0): weights 3/4 and 1/4."""
    asked = np.array([[np.sqrt(2) * np.log(3), 0.0], [0.0, np.sqrt(2) * np.log(3)], [0.0, 0.0]])
    got = predict(plain(), asked, np.eye(2), np.array([1.0, 0.0]))
    assert got.tolist() == pytest.approx([0.75, 0.25, 0.5], abs=1e-9)


def test_the_calibration_bends_predictions_by_the_mean_and_spread_of_the_references() -> None:
    """x = (1, 1/2, 1/2). T = softplus(ln(e^2 - 1)) = 2 and b = tanh(2 (1/2)): sigmoid(ln 3 / 2 + tanh 1)."""
    made = plain()
    calibration = [np.log(np.e**2 - 1), 0.0, 0.0, 0.0, 2.0, 0.0]
    made = replace(made, parameters=np.concatenate([made.parameters[:-6], calibration]))
    asked = np.array([[np.sqrt(2) * np.log(3), 0.0]])
    got = predict(made, asked, np.eye(2), np.array([1.0, 0.0]))
    assert got.tolist() == pytest.approx([0.787664], abs=1e-6)


def test_the_gradient_is_that_of_differences() -> None:
    rng = np.random.default_rng(3)
    references, difficulty = normalised(rng.normal(size=(7, 4)).astype(np.float32)), rng.integers(0, 9, 7) / 8
    predictor = new_predictor(4, 3, rng)
    nudged = predictor.parameters + 0.3 * rng.normal(size=predictor.parameters.shape)
    predictor = replace(predictor, parameters=nudged)
    _, gradient = loss_and_gradient(predictor, references, difficulty)

    def loss_at(parameters: Floats) -> float:
        return loss_and_gradient(replace(predictor, parameters=parameters), references, difficulty)[0]

    for i in range(len(gradient)):
        step = np.zeros_like(nudged)
        step[i] = 1e-6
        difference = (loss_at(nudged + step) - loss_at(nudged - step)) / 2e-6
        assert gradient[i] == pytest.approx(difference, abs=1e-6), i


def hidden_direction(num: int, *, seed: int) -> tuple[Floats, Floats]:
    """Embeddings of 16 dimensions, of which one says how hard a prompt is and the others nothing."""
    embeddings = np.random.default_rng(seed).normal(size=(num, 16))
    return normalised(embeddings.astype(np.float32)), 1 / (1 + np.exp(-3 * embeddings[:, 0]))


def make_dots(num: int = 200, **settings: float) -> tuple[Dots, Floats]:
    """The selector over prompts p0, p1, ... with the hidden direction, and their difficulty."""
    embeddings, difficulty = hidden_direction(num, seed=5)
    pool = PromptPool(prompt_ids=tuple(f"p{i}" for i in range(num)), embed=lambda: embeddings.astype(np.float32))
    config = Dots.Settings.model_validate({"reference_prompts": 40, "projection_lr": 0.02} | settings)
    return Dots(config, pool, seed=1, batch_size=8), difficulty


def test_references_are_drawn_at_the_first_step_of_each_selection() -> None:
    dots, _ = make_dots(reference_every=3)
    assert [len(dots.references(step)) for step in range(1, 8)] == [40, 0, 0, 40, 0, 0, 40]
    assert len(set(dots.references(1).tolist())) == 40
    assert dots.references(1).tolist() != dots.references(4).tolist()


def test_the_steps_of_one_selection_share_no_prompt() -> None:
    dots, _ = make_dots(reference_every=3)
    shares = [set(dots.propose(step, 8).tolist()) for step in (1, 2, 3)]
    assert len(set.union(*shares)) == 24
    spares = dots.propose(2, 20).tolist()[8:]
    assert not set(spares) & set.union(*shares)


def test_chosen_prompts_come_nearer_to_half_right_than_the_uniform_order() -> None:
    dots, difficulty = make_dots()
    distance = []
    for step in range(1, 21):
        references = dots.references(step)
        if len(references):
            dots.observe_references(
                step, success_counts_of(step, ((f"p{i}", 8 * difficulty[i], 8) for i in references))
            )
        distance.append(float(np.mean(np.abs(difficulty[dots.propose(step, 8)] - 0.5))))
    assert np.mean(distance[-6:]) < 0.6 * np.mean(np.abs(difficulty - 0.5))


def test_references_that_are_all_alike_make_all_prompts_alike() -> None:
    embeddings, _ = hidden_direction(50, seed=4)
    for level in (0.0, 1.0):
        difficulty = np.full(20, level)
        after = trained(new_predictor(16, 8, np.random.default_rng(2)), embeddings[:20], difficulty, epochs=5, lr=0.01)
        got = predict(after, embeddings, embeddings[:20], difficulty)
        assert np.all(np.isfinite(got))
        assert np.ptp(got) == pytest.approx(0.0, abs=1e-9)


def test_references_that_all_failed_leave_the_predictions_as_they_were() -> None:
    dots, _ = make_dots()
    before = dots.propose(1, 8).tolist()
    dots.observe_references(1, success_counts_of(1, []))
    assert dots.propose(1, 8).tolist() == before


def test_a_pool_without_embeddings_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs embeddings of the prompts"):
        Dots(Dots.Settings(), PromptPool(prompt_ids=("a", "b")), seed=1, batch_size=1)
