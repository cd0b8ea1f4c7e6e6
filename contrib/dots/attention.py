"""Predict how hard a prompt is from prompts whose difficulty was measured: attention over frozen embeddings (DOTS).

    z = e W                      e [D] frozen, W [D, H] trained
    a = softmax(z z_i / sqrt H)  over the K references
    d = sum_i a_i d_i            mean reward of the references, weighted
    d' = sigmoid(logit(d) / T + b),  T = softplus(t . x), b = tanh(s . x),  x = (1, mean, std) of the references' d_i

W, t and s are trained by binary cross-entropy, each reference predicted from the others (docs/methods.md).
Shapes: N prompts, K references, D and H dimensions. numpy: a few hundred rows need no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bapo.algorithms.selectors.base import Floats

EDGE = 1e-3
"""Predictions are kept so far from 0 and 1, where the logit ends."""
SHARPNESS = 10.0
"""Of the attention before any training: its logit for a prompt and itself."""
ROWS_AT_ONCE = 4096
BETAS, STABILITY = (0.9, 0.999), 1e-8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictor:
    """W, t and s in one vector, and the state of Adam."""

    parameters: Floats
    """[D * H + 6]"""
    first: Floats
    """Mean of the gradients."""
    second: Floats
    """Mean of their squares."""
    num_updates: int
    dims: tuple[int, int]
    """(D, H)"""

    @property
    def projection(self) -> Floats:
        """W [D, H]"""
        return self.parameters[:-6].reshape(self.dims)


def new_predictor(num_embedded: int, num_projected: int, rng: np.random.Generator) -> Predictor:
    """Random W, so that the attention is that of the cosine of the embeddings; T = 1 and b = 0 for any references."""
    scale = np.sqrt(SHARPNESS / np.sqrt(num_projected))
    projection = scale * rng.normal(size=num_embedded * num_projected)
    calibration = [np.log(np.e - 1), 0.0, 0.0, 0.0, 0.0, 0.0]
    parameters = np.concatenate([projection, calibration])
    zeros = np.zeros_like(parameters)
    return Predictor(
        parameters=parameters, first=zeros, second=zeros, num_updates=0, dims=(num_embedded, num_projected)
    )


def normalised(embeddings: NDArray[np.float32]) -> Floats:
    """[N, D] without their common mean, each of length 1 (one that equals the mean stays 0)."""
    centred = embeddings.astype(np.float64) - embeddings.mean(axis=0, dtype=np.float64)
    lengths = np.linalg.norm(centred, axis=1, keepdims=True)
    unit: Floats = centred / np.where(lengths > 0, lengths, 1.0)
    return unit


def predict(predictor: Predictor, embeddings_ND: Floats, references_KD: Floats, difficulty_K: Floats) -> Floats:
    """[N] calibrated mean reward of each prompt. `difficulty_K` is the mean reward of each reference."""
    keys_KH = references_KD @ predictor.projection / np.sqrt(predictor.dims[1])
    parts = [
        _attended(embeddings_ND[first : first + ROWS_AT_ONCE] @ predictor.projection @ keys_KH.T, difficulty_K)
        for first in range(0, len(embeddings_ND), ROWS_AT_ONCE)
    ]
    return _calibrated(predictor, np.concatenate(parts), difficulty_K)


def trained(predictor: Predictor, references_KD: Floats, difficulty_K: Floats, *, epochs: int, lr: float) -> Predictor:
    """After `epochs` steps of Adam on all references. At least two are needed."""
    for _ in range(epochs):
        _, gradient = loss_and_gradient(predictor, references_KD, difficulty_K)
        predictor = _adam(predictor, gradient, lr)
    return predictor


def loss_and_gradient(predictor: Predictor, references_KD: Floats, difficulty_K: Floats) -> tuple[float, Floats]:
    """Mean binary cross-entropy of each reference, predicted from the others, and its gradient."""
    num, scale = len(difficulty_K), 1.0 / np.sqrt(predictor.dims[1])
    z_KH = references_KD @ predictor.projection
    scores_KK = z_KH @ z_KH.T * scale
    np.fill_diagonal(scores_KK, -np.inf)
    attention_KK = _softmax(scores_KK)
    raw_K = attention_KK @ difficulty_K
    inner_K = np.clip(raw_K, EDGE, 1 - EDGE)
    logit_K = np.log(inner_K / (1 - inner_K))
    x, temperature, bias = _calibration(predictor, difficulty_K)
    p_K = _sigmoid(logit_K / temperature + bias)
    loss = -np.mean(difficulty_K * np.log(p_K) + (1 - difficulty_K) * np.log(1 - p_K))

    d_u_K = (p_K - difficulty_K) / num
    is_inner_K = (raw_K > EDGE) & (raw_K < 1 - EDGE)
    d_raw_K = np.where(is_inner_K, d_u_K / (temperature * inner_K * (1 - inner_K)), 0.0)
    d_scores_KK = d_raw_K[:, None] * attention_KK * (difficulty_K[None, :] - raw_K[:, None]) * scale
    d_projection = references_KD.T @ ((d_scores_KK + d_scores_KK.T) @ z_KH)
    d_temperature = -np.sum(d_u_K * logit_K) / temperature**2
    d_softplus = 1.0 - np.exp(-temperature)  # the derivative of softplus, in terms of its value
    gradient = [d_projection.ravel(), d_temperature * d_softplus * x, np.sum(d_u_K) * (1 - bias**2) * x]
    return float(loss), np.concatenate(gradient)


def _adam(predictor: Predictor, gradient: Floats, lr: float) -> Predictor:
    count, (beta1, beta2) = predictor.num_updates + 1, BETAS
    first = beta1 * predictor.first + (1 - beta1) * gradient
    second = beta2 * predictor.second + (1 - beta2) * gradient**2
    step = first / (1 - beta1**count) / (np.sqrt(second / (1 - beta2**count)) + STABILITY)
    return replace(
        predictor, parameters=predictor.parameters - lr * step, first=first, second=second, num_updates=count
    )


def _attended(scores_NK: Floats, difficulty_K: Floats) -> Floats:
    attended: Floats = _softmax(scores_NK) @ difficulty_K
    return attended


def _calibrated(predictor: Predictor, raw_N: Floats, difficulty_K: Floats) -> Floats:
    _, temperature, bias = _calibration(predictor, difficulty_K)
    inner = np.clip(raw_N, EDGE, 1 - EDGE)
    return _sigmoid(np.log(inner / (1 - inner)) / temperature + bias)


def _calibration(predictor: Predictor, difficulty_K: Floats) -> tuple[Floats, float, float]:
    """x, T and b."""
    x = np.array([1.0, difficulty_K.mean(), difficulty_K.std()])
    scale, shift = predictor.parameters[-6:-3], predictor.parameters[-3:]
    return x, float(np.logaddexp(0.0, scale @ x)), float(np.tanh(shift @ x))


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    normal: Floats = weights / weights.sum(axis=1, keepdims=True)
    return normal


def _sigmoid(values: Floats) -> Floats:
    result: Floats = 1.0 / (1.0 + np.exp(-values))
    return result
