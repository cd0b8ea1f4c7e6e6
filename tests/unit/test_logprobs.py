"""Chunked log-probs and entropies: equal to the naive ones, with gradients, without the whole table of logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner.model.logprobs import response_logprobs


def naive(
    hidden: torch.Tensor, head: torch.Tensor, target: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logp = ((hidden @ head.T) / temperature).log_softmax(-1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def example(num_tokens: int = 23, size: int = 8, vocab: int = 31) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(num_tokens, size, generator=generator).requires_grad_()
    head = torch.randn(vocab, size, generator=generator).requires_grad_()
    return hidden, head, torch.randint(vocab, (num_tokens,), generator=generator)


def test_a_uniform_head_gives_log_one_over_v_and_entropy_log_v() -> None:
    logp, entropy = response_logprobs(
        torch.ones(3, 4), torch.zeros(10, 4), torch.tensor([0, 5, 9]), temperature=1.0, chunk_tokens=2
    )
    assert logp.tolist() == pytest.approx([-math.log(10)] * 3)
    assert entropy.tolist() == pytest.approx([math.log(10)] * 3)


def test_two_tokens_by_hand_at_temperature_two() -> None:
    # logits [0, 2 ln 3] / 2 = [0, ln 3]: p = [1/4, 3/4]
    head = torch.tensor([[0.0], [2 * math.log(3)]])
    hidden = torch.ones(2, 1)
    logp, entropy = response_logprobs(hidden, head, torch.tensor([0, 1]), temperature=2.0, chunk_tokens=1)
    assert logp.tolist() == pytest.approx([math.log(0.25), math.log(0.75)])
    assert entropy.tolist() == pytest.approx([0.25 * math.log(4) + 0.75 * math.log(4 / 3)] * 2)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 100])
def test_values_and_gradients_equal_the_naive_ones(temperature: float, chunk_tokens: int) -> None:
    hidden, head, target = example()
    weights = torch.randn(2, len(target), generator=torch.Generator().manual_seed(1))

    def run(logp: torch.Tensor, entropy: torch.Tensor) -> list[torch.Tensor]:
        hidden.grad = head.grad = None
        (logp * weights[0] + entropy * weights[1]).sum().backward()
        assert hidden.grad is not None
        assert head.grad is not None
        return [logp.detach(), entropy.detach(), hidden.grad, head.grad]

    want = run(*naive(hidden, head, target, temperature))
    got = run(*response_logprobs(hidden, head, target, temperature=temperature, chunk_tokens=chunk_tokens))
    for expected, found in zip(want, got, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_no_tokens_give_nothing_and_a_zero_gradient() -> None:
    _, head, _ = example()
    hidden = torch.zeros(0, 8, requires_grad=True)
    logp, entropy = response_logprobs(hidden, head, torch.zeros(0, dtype=torch.long), temperature=1.0, chunk_tokens=4)
    (logp.sum() + entropy.sum()).backward()
    assert len(logp) == len(entropy) == 0
    assert head.grad is not None
    assert float(head.grad.abs().sum()) == 0.0


class LargestResult(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_logits_of_all_tokens_never_exist_neither_forward_nor_backward() -> None:
    num_tokens, size, vocab, chunk = 400, 8, 300, 10
    hidden, head, target = example(num_tokens, size, vocab)
    with LargestResult() as largest:
        logp, entropy = response_logprobs(hidden, head, target, temperature=0.9, chunk_tokens=chunk)
        (logp + 0.1 * entropy).sum().backward()
    assert largest.elements <= max(chunk * vocab, num_tokens * size, vocab * size)
    with LargestResult() as largest:
        naive(hidden, head, target, 0.9)[0].sum().backward()
    assert largest.elements == num_tokens * vocab


@pytest.mark.parametrize(("dtype", "of_values", "of_gradients"), [
    (torch.float32, 2e-5, 1e-6), (torch.bfloat16, 2e-5, 2.0**-8),
])  # fmt: skip
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_values_and_gradients_are_near_those_of_float64(
    dtype: torch.dtype, of_values: float, of_gradients: float, entropy_coef: float
) -> None:
    """Logits up to 40, as of a real head. Of bfloat16 inputs, log-probs are as exact as of float32 ones; only the
    gradient of the logits is rounded, relative to its size."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(40, 64, generator=generator).to(dtype)
    head = (1.5 * torch.randn(500, 64, generator=generator)).to(dtype)
    target = torch.randint(500, (40,), generator=generator)
    weights = torch.randn(40, generator=generator)

    def run(head: torch.Tensor, hidden: torch.Tensor, find: Any) -> list[torch.Tensor]:
        leaves = [hidden.detach().requires_grad_(), head.detach().requires_grad_()]
        logp, entropy = find(*leaves, target)
        loss = logp + entropy_coef * entropy if entropy_coef else logp
        (loss * weights.to(loss.dtype)).sum().backward()
        return [logp.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)]

    want = run(head.double(), hidden.double(), lambda *inputs: naive(*inputs, 0.9))
    got = run(
        head, hidden,
        lambda *inputs: response_logprobs(*inputs, temperature=0.9, chunk_tokens=7, compute_dtype=dtype),
    )  # fmt: skip
    assert (hidden.double() @ head.double().T).abs().max() > 30
    for expected, found in zip(want[:2], got[:2], strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() < of_values
    for expected, found in zip(want[2:], got[2:], strict=True):
        assert (found - expected).norm() < of_gradients * expected.norm()


def test_without_entropy_the_values_and_gradients_of_log_probs_are_the_same_and_the_entropy_is_unknown() -> None:
    found = []
    for with_entropy in (True, False):
        hidden, head, target = example()
        logp, entropy = response_logprobs(
            hidden, head, target, temperature=0.7, chunk_tokens=5, with_entropy=with_entropy
        )
        assert bool(entropy.isnan().all()) is not with_entropy
        logp.sum().backward()
        found.append([logp.detach(), hidden.grad, head.grad])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_excluded_tokens_have_no_probability_and_no_gradient() -> None:
    """As if their rows of the head were not there, in values, entropies and gradients."""
    hidden, head, _ = example()
    excluded, allowed = torch.tensor([2, 30]), torch.tensor([i for i in range(31) if i not in (2, 30)])
    places = torch.randint(29, (23,), generator=torch.Generator().manual_seed(2))
    weights = torch.randn(2, 23, generator=torch.Generator().manual_seed(1))

    def run(logp: torch.Tensor, entropy: torch.Tensor) -> list[torch.Tensor]:
        hidden.grad = head.grad = None
        (logp * weights[0] + entropy * weights[1]).sum().backward()
        assert hidden.grad is not None
        assert head.grad is not None
        return [logp.detach(), entropy.detach(), hidden.grad, head.grad]

    want = run(*naive(hidden, head[allowed], places, 0.7))
    got = run(*response_logprobs(hidden, head, allowed[places], temperature=0.7, chunk_tokens=5, excluded=excluded))
    for expected, found in zip(want, got, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not head.grad[excluded].any()
