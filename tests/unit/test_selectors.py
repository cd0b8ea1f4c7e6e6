"""The uniform order of prompts, and success counts as bytes."""

from __future__ import annotations

import pytest

from bapo.algorithms.selectors.base import PromptPool
from bapo.algorithms.selectors.uniform import DataOrder, Uniform
from bapo.core.errors import ContractError
from bapo.core.success_counts import unpack_success_counts


def test_the_uniform_order_is_the_data_order_of_the_epochs() -> None:
    uniform = Uniform(Uniform.Settings(), PromptPool(prompt_ids=tuple(map(str, range(10)))), seed=42, batch_size=4)
    order = DataOrder(num_prompts=10, seed=42, batch_size=4)
    cursors = [order.at(cursor) for cursor in range(8)]
    assert uniform.propose(1, 4).tolist() == cursors[:4]
    assert uniform.propose(2, 4).tolist() == cursors[4:]
    assert sorted(uniform.propose(2, 99).tolist()) == list(range(10))


@pytest.mark.parametrize("data", [b"", b"\x94", b"\x94\x01\x91\xa1a\xc4\x00\xc4\x00", b"\x01"])
def test_bytes_that_are_no_success_counts_are_refused(data: bytes) -> None:
    with pytest.raises(ContractError, match="success counts"):
        unpack_success_counts(data)
