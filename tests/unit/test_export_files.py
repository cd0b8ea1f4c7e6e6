"""What a base model's authors wrote is exported as it is, what cannot be is found before the first step, and an export
that fails at the end loses no run."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo.config.tree import ModelConfig
from bapo.core.errors import ConfigError
from bapo.runtime.base_files import export_problem, vocabulary_problem
from bapo.runtime.run_directory.layout import EXPORT_FAILED
from learner.checkpoint import Checkpoint
from learner.export import check_export, export_last, export_model
from learner.startup import newest_checkpoint
from services.launcher.doctor.checks import model_files
from tests.support.launcher_config import make_config
from tests.support.learner import FakeBuffer, FakeFleet, learner_config, make_test_learner, random_batch
from tests.support.tiny_model import write_tiny_model


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


SAMPLING = {"temperature": 0.9, "top_p": 0.6, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}
EDITS: dict[str, Callable[[Path], object]] = {
    "sampling values without do_sample": lambda base: (base / "generation_config.json").write_text(
        json.dumps(SAMPLING)
    ),
    "values that transformers refuses": lambda base: (base / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "temperature": 0.0, "mine": [1]})
    ),
    "no generation config": lambda base: (base / "generation_config.json").unlink(missing_ok=True),
    "a generation config that is none": lambda base: (base / "generation_config.json").write_text("later"),
    "settings of another version": lambda base: edit(
        base / "config.json", torch_dtype="bfloat16", unknown_setting={"a": 1}, temperature=0.7, num_beams=4
    ),
    "code of its own": lambda base: (
        edit(base / "config.json", auto_map={"AutoConfig": "configuration_mine.MineConfig"}),
        (base / "configuration_mine.py").write_text("class MineConfig: ...\n"),
    ),
    "templates and a license": lambda base: (
        (base / "chat_template.jinja").write_text("{{ messages }}"),
        (base / "additional_chat_templates").mkdir(),
        (base / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}"),
        (base / "LICENSE.txt").write_text("free"),
        (base / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}'),
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and the checkpoints of a step on it."""
    base, run = tmp_path_factory.mktemp("base") / "model", tmp_path_factory.mktemp("run")
    write_tiny_model(base)
    buffer = FakeBuffer(lambda step: random_batch(step=step))
    make_test_learner(learner_config(base, run={"num_steps": 1}), run, buffer=buffer, fleet=FakeFleet()).run(1)
    return base, run / "checkpoints"


@pytest.fixture
def checkpoint(trained: tuple[Path, Path], tmp_path: Path) -> Checkpoint:
    shutil.copytree(trained[1], tmp_path / "checkpoints")
    found = newest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    return found


@pytest.fixture
def base(trained: tuple[Path, Path], tmp_path: Path) -> Path:
    shutil.copytree(trained[0], tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("edited", EDITS.values(), ids=EDITS)
def test_the_base_models_own_files_are_exported_as_they_are(
    base: Path, checkpoint: Checkpoint, tmp_path: Path, edited: Callable[[Path], object]
) -> None:
    edited(base)
    check_export(str(base))
    assert export_problem(str(base)) == ""
    out = tmp_path / "out"
    export_model(checkpoint, ModelConfig(path=str(base)), out)
    given = {str(file.relative_to(base)): file.read_bytes() for file in base.rglob("*") if file.is_file()}
    for name, content in given.items():
        if name not in ("model.safetensors", "config.json"):
            assert (out / name).read_bytes() == content, name
    config = json.loads(given["config.json"])
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    expected = config | {key: "float32" for key in ("dtype", name) if key in config or key == name}
    assert json.loads((out / "config.json").read_text()) == expected
    if (base / "generation_config.json").exists() and "later" in (base / "generation_config.json").read_text():
        return
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(base))
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 0


BROKEN: dict[str, Callable[[Path], object]] = {
    "a link to nothing": lambda base: (base / "merges.txt").symlink_to(base / "nowhere"),
    "a config that is no object": lambda base: (base / "config.json").write_text("[]"),
    "a config that is cut": lambda base: (base / "config.json").write_text('{"model_type": "lla'),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_files_that_an_export_cannot_copy_are_refused_before_anything_starts(
    base: Path, tmp_path: Path, broken: Callable[[Path], object]
) -> None:
    broken(base)
    with pytest.raises(ConfigError, match=r"model.path"):
        check_export(str(base))
    assert export_problem(str(base)).startswith("model.path")


def test_a_model_that_cannot_be_built_from_its_exported_config_is_refused(base: Path) -> None:
    edit(base / "config.json", model_type="no-such-type")
    with pytest.raises(ConfigError, match="could not be exported"):
        check_export(str(base))


def test_an_export_that_fails_at_the_end_leaves_a_finished_run_and_says_how_to_repeat_it(
    base: Path, checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = base / "merges.txt"
    link.symlink_to(base / "nowhere")
    with caplog.at_level(logging.ERROR):
        export_last(checkpoint, ModelConfig(path=str(base)), tmp_path)
    assert f"bapo export {tmp_path}" in caplog.text
    assert "merges.txt" in (checkpoint.folder / EXPORT_FAILED).read_text()
    link.unlink()
    export_model(checkpoint, ModelConfig(path=str(base)))
    assert (checkpoint.model_path / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer.json", {"added_tokens": [{"id": 300, "content": "<more>"}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": {"content": "<more>"}}}),
        ("tokenizer.json", {"model": {"type": "Unigram", "vocab": [["a", 0.0]] * 301}}),
        ("config.json", {"vocab_size": 2}),
        ("config.json", {"text_config": {"vocab_size": 217}}),
    ],
    ids=["added", "added in the config", "listed", "a smaller embedding", "of a part"],
)
def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(
    base: Path, tmp_path: Path, file: str, changes: dict[str, object]
) -> None:
    assert vocabulary_problem(base) == ""
    edit(base / file, **changes)
    last = 217 if file == "config.json" else 300
    assert f"has ids up to {last}" in vocabulary_problem(base)
    lengths = {"max_prompt_tokens": 20, "max_response_tokens": 20}
    (tmp_path / "run").mkdir()
    check = model_files(make_config(tmp_path / "run", model={"path": str(base)}, rollout=lengths))
    assert (check.status, f"ids up to {last}" in check.detail) == ("fail", True)
