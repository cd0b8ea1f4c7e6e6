"""Tasks and rewards by name: what is found, and what the messages say when it is not."""

import sys
from pathlib import Path

import pytest

from bapo.config.tree import TaskConfig
from bapo.core.errors import ConfigError
from bapo.tasks.base import Task, TaskContext, extract_of
from bapo.tasks.grading.components import components_of
from bapo.tasks.registry import load_task
from bapo.tasks.rewards import load_reward

USER_MODULE = """
from __future__ import annotations
from typing import TYPE_CHECKING
from bapo.tasks.base import Task, TaskContext, TaskOptions, make_prompt

if TYPE_CHECKING:
    from nowhere import Word

class Echo:
    name = "echo"
    held_out_splits = ("test",)
    def __init__(self, word): self.word = word
    def prompts(self, split): return [make_prompt("echo", f"say {self.word}", {})]
    def reward(self, prompt, text): return float(text == self.word)
    def gold(self, prompt): return self.word

class Loud(Echo):
    extracts_by_gold = True
    def level(self, prompt): return 2.0
    def extract(self, prompt, text): return text.upper()
    def rewards(self, prompt, texts): return [0.25] * len(texts)

class Options(TaskOptions):
    word: str = "hello"
    times: int

class Derived(Task):
    def __init__(self, options: Options, run: TaskContext):
        self.held_out_splits = ()
        self.name, self.text = "derived", f"{options.word * options.times} {run.tokenizer} {run.rewards[0]}"
    def prompts(self, split): return [make_prompt("derived", self.text, {})]
    def reward(self, prompt, text): return float(text == "right")

class Unfinished(Task):
    name = "unfinished"
    def prompts(self, split): return []
    def reward(self, prompt, text): return 0.0

def make_echo(word: Word = "hello"): return Echo(word)
def make_loud(): return Loud("hello")
def make_spoken(word="hello", tokenizer=None): return Echo(word)
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
        ("countdwon", {}, r"unknown task \(did you mean 'countdown'\?\)"),
        ("zzz", {}, "use one of chain, countdown, dataset"),
        ("countdown", {"num_trian": 3}, r"task.options.num_trian.*did you mean 'task.options.num_train'"),
        ("countdown", {"cd3_share": "half"}, r"task.options.cd3_share = \"half\": input should be a valid number"),
        ("dataset", {}, "task.options.path is required"),
        ("my_tasks:make_ehco", {}, "did you mean 'make_echo'"),
        ("my_tasks:make_echo", {"wrod": "x"}, "did you mean 'word'"),
        (
            "dataset",
            {"path": "a.jsonl", "chatt": True},
            r"task.options.chatt: unknown key \(did you mean 'task.options.chat'",
        ),
        (
            "dataset",
            {"path": "a.jsonl", "extra_columns": "level"},
            'task.options.extra_columns = "level": input should',
        ),
        (
            "my_tasks:Derived",
            {"times": "x", "wrod": 1},
            r"(?s)options.wrod: unknown key.*options.times = .x.: input",
        ),
        ("my_tasks:Unfinished", {}, "Unfinished is missing held_out_splits"),
        ("countdown:four", {}, "countdown is a single task"),
        ("reasoning_gym", {}, "use reasoning_gym:NAME"),
        ("my_tasks:make_nothing", {}, "object is missing name, held_out_splits, prompts, reward; derive it from"),
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


def test_a_task_gets_its_options_and_its_run_by_the_types_that_it_declares() -> None:
    context = TaskContext(tokenizer="owner/model", rewards=("mine.py:f",))
    task = load_task("my_tasks:Derived", {"word": "ho", "times": 2}, context)
    (prompt,) = task.prompts("train")
    assert prompt.text == "hoho owner/model mine.py:f"
    assert task.rewards(prompt, ["right", "wrong"]) == [1.0, 0.0]
    assert (task.gold(prompt), task.expert(prompt), task.level(prompt), extract_of(task)) == (None, None, None, None)
    with pytest.raises(ConfigError, match="must define image"):
        task.image("0" * 64)


def test_an_argument_that_earlier_versions_filled_by_its_name_is_not_left_at_its_default() -> None:
    with pytest.raises(ConfigError, match=r"bapo\.tasks\.base\.TaskContext and read tokenizer"):
        load_task("my_tasks:make_spoken", {})
    assert load_task("my_tasks:make_spoken", {"tokenizer": "of my own"}).name == "echo"


def test_an_object_with_the_members_of_a_task_keeps_all_of_them() -> None:
    plain, task = load_task("my_tasks:make_echo", {}), load_task("my_tasks:make_loud", {})
    assert isinstance(plain, Task)
    (prompt,) = plain.prompts("test")
    assert (plain.name, plain.held_out_splits, plain.expert(prompt), extract_of(plain)) == (
        "echo", ("test",), "hello", None,
    )  # fmt: skip
    assert plain.rewards(prompt, ["hello", "x"]) == [1.0, 0.0]
    assert (task.level(prompt), task.rewards(prompt, ["a"]), task.gold(prompt)) == (2.0, [0.25], "hello")
    extract = extract_of(task, another_reward=True)
    assert extract is not None
    assert extract(prompt, "word") == "WORD"


def test_a_reward_of_ones_own_replaces_only_the_reward() -> None:
    task = load_task("countdown", {"num_train": 3})
    prompt = task.prompts("train")[0]
    (own,), (half,) = components_of(task, TaskConfig()), components_of(task, TaskConfig(reward="my_tasks:half"))
    assert half.verifier(prompt, ["anything"]) == [0.5]
    assert own.verifier(prompt, [task.gold(prompt) or "", "anything"]) == [1.0, 0.0]


def test_a_reward_that_does_not_take_prompt_and_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\(prompt, text\)"):
        load_reward("my_tasks:one_argument")
