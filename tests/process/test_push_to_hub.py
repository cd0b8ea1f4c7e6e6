"""`bapo export --push-to-hub` against a server with the Hub's API: what arrives, and what is said when it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo.config.load import dump_toml, load_config
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.hub_server import TOKEN, FakeHub, Repository, fake_hub
from tests.support.run_rows import make_evaluation

WEIGHTS = b"weights" * 1000


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as found:
        yield found


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with an exported checkpoint of step 8."""
    settings = ["--model.path", "acme/base-1b", "--task.reward", "mine.py:score", "--run.num_steps", "8"]
    settings += ["--buffer.redis_url", "redis://cache.internal:6379/0"]
    made = RunDirectory.create(tmp_path / "run", dump_toml(load_config(["grpo"], settings)))
    folder = made.checkpoint_dir(8) / "hf"
    folder.mkdir(parents=True)
    (made.checkpoint_dir(8) / "state.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    for version, mean, other in ((1, 0.25, 0.0), (9, 0.75, 1.0)):
        rewards = {f"p{i}": [1.0 if i == 0 or mean > 0.5 else 0.0, other] for i in range(4)}
        made.append_evaluation(make_evaluation("test", version, mean, rewards=rewards))
    return made


def push(run: RunDirectory, url: str, *options: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    # Without a token of the person who runs the tests; hf_xet speaks to servers of its own.
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(run.path / "hf_home"), "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_TOKEN": token} if token else {}
    command = [sys.executable, "-m", "bapo.cli", "export", str(run.path), *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_a_model_arrives_with_a_card_of_its_method_data_figures_and_config(run: RunDirectory, hub: FakeHub) -> None:
    done = push(run, hub.url, "--push-to-hub", "me/mine", "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{hub.url}/me/mine"
    found = hub.repositories["me/mine"]
    assert found.private
    assert found.files.keys() == {"config.json", "model.safetensors", "README.md"}
    assert found.files["model.safetensors"] == WEIGHTS
    card = found.files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers\nbase_model: acme/base-1b\ntags:\n")
    assert "`grpo`, 8 of 8 learner steps" in card
    assert "reward: `mine.py:score`" in card
    assert 'AutoModelForCausalLM.from_pretrained("me/mine")' in card
    # Prompt means: 0.5, 0, 0, 0 before and 1, 1, 1, 1 after; the mean change is 87.5 points.
    row = next(line for line in card.splitlines() if line.startswith("| test |"))
    assert "| 25.0 % [23.0, 27.0] | 75.0 % [73.0, 77.0] | +87.5 [+63.0, +112.0] |" in row
    assert 'reward = "mine.py:score"' in card
    assert "cache.internal" not in card


def test_a_second_upload_keeps_a_card_that_was_edited(run: RunDirectory, hub: FakeHub) -> None:
    card = run.checkpoint_dir(8) / "hf" / "README.md"
    card.write_text("my own words")
    for _ in range(2):
        done = push(run, hub.url, "--push-to-hub", "me/mine")
        assert done.returncode == 0, done.stderr
    assert "is kept as it is" in done.stdout
    assert hub.repositories["me/mine"].files["README.md"] == b"my own words"


STALE = {
    "adapter_config.json", "adapter_model.safetensors", "model.safetensors.index.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
}  # fmt: skip
"""Of an adapter and of a model in several files: transformers would load them with model.safetensors, or instead."""


def test_weights_of_an_earlier_upload_leave_and_other_files_stay(run: RunDirectory, hub: FakeHub) -> None:
    own = {".gitattributes", "notes.md", "older/model.safetensors"}
    hub.repositories["me/mine"] = Repository(files=dict.fromkeys([*STALE, *own, "model.safetensors"], b"old"))
    done = push(run, hub.url, "--push-to-hub", "me/mine")
    assert done.returncode == 0, done.stderr
    found = hub.repositories["me/mine"].files
    assert found.keys() == {*own, "config.json", "model.safetensors", "README.md"}
    assert found["model.safetensors"] == WEIGHTS


@pytest.mark.parametrize(
    ("options", "token", "words"),
    [
        (["--push-to-hub", "me/mine"], None, "no token for the Hugging Face Hub: log in with hf auth login"),
        (["--push-to-hub", "me/mine"], "hf_wrong", "the Hub does not accept the token"),
        (["--push-to-hub", "them/new"], TOKEN, "the token needs write access to repositories of them"),
        (["--push-to-hub", "them/theirs"], TOKEN, "or them/theirs belongs to others"),
        (["--push-to-hub", "mine"], TOKEN, "name a repository as ORG/NAME"),
        (["--push-to-hub", "me/public", "--private"], TOKEN, "exists already and is public"),
        (["--private"], TOKEN, "--private is only for --push-to-hub"),
    ],
)
def test_a_refusal_says_what_to_do_and_uploads_nothing(
    options: list[str], token: str | None, words: str, run: RunDirectory, hub: FakeHub
) -> None:
    hub.repositories |= {"them/theirs": Repository(), "me/public": Repository()}
    done = push(run, hub.url, *options, token=token)
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert all(not found.files for found in hub.repositories.values())


def test_without_a_network_the_model_stays_and_the_command_can_be_repeated(run: RunDirectory) -> None:
    done = push(run, "http://127.0.0.1:9", "--push-to-hub", "me/mine")
    assert done.returncode == 3, done.stderr
    assert "cannot upload to http://127.0.0.1:9" in done.stderr
    assert f"the model is in {run.checkpoint_dir(8) / 'hf'}" in done.stderr
