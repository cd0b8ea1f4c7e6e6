"""Tasks and rewards by name: what is found, and what the messages say when it is not."""

import sys
from pathlib import Path

import pytest

from bapo.core.errors import ConfigError
from bapo.tasks.registry import load_task, with_reward
from bapo.tasks.rewards import load_reward

USER_MODULE = """
from bapo.tasks.base import make_prompt

class Echo:
    name = "echo"
    held_out_splits = ("test",)
    def __init__(self, word): self.word = word
    def prompts(self, split): return [make_prompt("echo", f"say {self.word}", {})]
    def reward(self, prompt, text): return float(text == self.word)
    def gold(self, prompt): return self.word

def make_echo(word="hello"): return Echo(word)
def make_nothing(): return object()
def make_trouble(): raise RuntimeError("no licence")
def half(prompt, text): return 0.5
def one_argument(text): return 1.0
constant = 3
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tasks.py").write_text(USER_MODULE)
    (tmp_path / "my_broken.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)


def test_a_built_in_task_is_found_by_its_file_name_and_gets_its_options() -> None:
    task = load_task("countdown", {"num_train": 7})
    assert task.name == "countdown"
    assert len(task.prompts("train")) == 7


def test_a_users_task_is_found_by_dotted_path_and_gets_its_options() -> None:
    task = load_task("my_tasks:make_echo", {"word": "ping"})
    prompt = task.prompts("train")[0]
    assert prompt.text == "say ping"
    assert task.reward(prompt, "ping") == 1.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("countdwon", {}, r"unknown task 'countdwon' \(did you mean 'countdown'\?\)"),
        ("zzz", {}, "Built-in: chain, countdown, dataset"),
        ("countdown", {"num_trian": 3}, r"task.options.num_trian.*did you mean 'num_train'"),
        ("countdown", {"cd3_share": "half"}, "failed to load: TypeError"),
        ("dataset", {}, "requires the options task.options.path"),
        ("my_tasks:make_ehco", {}, "did you mean 'make_echo'"),
        ("my_tasks:make_echo", {"wrod": "x"}, "did you mean 'word'"),
        ("my_tasks:make_nothing", {}, "object is missing name, prompts"),
        ("my_tasks:make_trouble", {}, "RuntimeError: no licence"),
        ("my_tasks:constant", {}, "constant is a int, not a function"),
        ("my_tasks:", {}, "must have the form"),
        ("no_such_module:make", {}, "importing no_such_module failed"),
        ("my_broken:make", {}, "a_package_that_is_not_there"),
    ],
)
def test_a_task_that_cannot_be_made_is_refused_with_a_reason(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(name, options)


def test_a_reward_of_ones_own_replaces_only_the_reward() -> None:
    plain = load_task("countdown", {"num_train": 3})
    task = with_reward(plain, load_reward("my_tasks:half"))
    prompt = task.prompts("train")[0]
    assert task.reward(prompt, "anything") == 0.5
    assert task.prompts("cd4") == plain.prompts("cd4")
    assert task.gold(prompt) == plain.gold(prompt)
    assert (task.name, task.held_out_splits) == ("countdown", ("cd34", "cd4"))


def test_a_reward_that_does_not_take_prompt_and_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\(prompt, text\)"):
        load_reward("my_tasks:one_argument")
