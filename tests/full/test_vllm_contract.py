"""What every engine promises, of real vLLM: the tests of tests/contract/test_engines.py on one engine."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from tests.contract import test_engines as contract
from tests.support.engines import Driven


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    with contract.made("vllm", tmp_path_factory.mktemp("vllm")) as found:
        yield found


for _name, _test in vars(contract).items():
    if _name.startswith("test_") and "engine" in inspect.signature(_test).parameters:
        globals()[_name] = _test
