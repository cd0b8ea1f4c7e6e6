"""Two ranks over gloo with FSDP2, of which one may have no picture, against one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.spawn_ranks import TIMEOUT_S, spawn_ranks
from tests.support.tiny_vision import write_tiny_vision


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_two_ranks_with_unevenly_many_pictures_give_the_losses_of_one(tmp_path: Path) -> None:
    write_tiny_vision(tmp_path)
    [alone] = spawn_ranks("vision_rank", [str(tmp_path), "1"], 1)
    first, second = spawn_ranks("vision_rank", [str(tmp_path), "2"], 2)
    assert first == second
    np.testing.assert_allclose(first, alone, rtol=1e-4, atol=1e-5)
    assert min(norm for _, norm in alone) > 1e-2
