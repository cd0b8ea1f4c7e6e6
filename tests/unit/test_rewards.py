"""Rewards of other frameworks, and what a dataset's task shows as the answer of a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.tasks.answer_formats import written_answer
from bapo.tasks.base import TaskContext, extract_of, make_prompt
from bapo.tasks.dataset import DatasetTask
from bapo.tasks.grading.answers import grade
from bapo.tasks.registry import load_task
from bapo.tasks.rewards import Verifier, load_reward, reward_columns
from tests.support.tasks import maker

make_task = maker("dataset")


def _load(tmp_path: Path, prefix: str, source: str) -> Verifier:
    path = tmp_path / "mine.py"
    path.write_text(source)
    return load_reward(f"{prefix}{path}:f")


def test_a_function_of_verl_gets_the_same_columns_whether_it_is_named_or_not(tmp_path: Path) -> None:
    path = tmp_path / "my_score.py"
    path.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    asked = {"data_source", "solution_str", "ground_truth", "extra_info"}
    assert reward_columns(f"verl:{path}") == reward_columns(f"verl:{path}:compute_score") == asked


def _dataset_prompt(tmp_path: Path, row: dict[str, Any], graded_by: str | None = None, **options: Any) -> Prompt:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return load_task(
        "dataset", {"path": str(path), **options}, TaskContext(rewards=tuple(filter(None, [graded_by])))
    ).prompts("train")[0]


def test_trl_gets_each_column_once_per_completion_and_the_prompts(tmp_path: Path) -> None:
    source = "def f(prompts, completions, solution, level, **kw):\n    return [float(prompts == ['1+1?'] * 2 and " + (
        "solution == ['2', '2'] and level == [3, 3] and 'completion_ids' not in kw)] * len(completions)\n"
    )
    reward = _load(tmp_path, "trl:", source)
    prompt = _dataset_prompt(tmp_path, {"prompt": "1+1?", "solution": "2", "level": 3}, extra_columns=["level"])
    assert list(reward(prompt, ["a", "b"])) == [1.0, 1.0]


def test_trl_gets_messages_where_the_prompt_is_a_conversation(tmp_path: Path) -> None:
    source = (
        "def f(prompts, completions, **kw):\n"
        "    assert prompts[0] == [{'role': 'user', 'content': '1+1?'}]\n"
        "    return [float(c == [{'role': 'assistant', 'content': '2'}]) for c in completions]\n"
    )
    reward = _load(tmp_path, "trl:", source)
    prompt = _dataset_prompt(tmp_path, {"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"})
    assert list(reward(prompt, ["2", "3"])) == [1.0, 0.0]


BEGUN = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "Let me think. <think>"}]
WHOLE = "Let me think. <think>two</think><answer>2</answer>"


@pytest.mark.parametrize(
    ("prefix", "source"),
    [
        ("", f"def f(prompt, text):\n    return float(text == {WHOLE!r})\n"),
        ("", f"import bapo\n@bapo.reward\ndef f(completion, answer):\n    return float(completion == {WHOLE!r})\n"),
        (
            "trl:",
            "def f(prompts, completions, **kw):\n"
            "    assert prompts[0] == [{'role': 'user', 'content': '1+1?'}]\n"
            f"    return [float(c == [{{'role': 'assistant', 'content': {WHOLE!r}}}]) for c in completions]\n",
        ),
        ("verl:", f"def f(solution_str, ground_truth, **kw):\n    return float(solution_str == {WHOLE!r})\n"),
    ],
    ids=["text", "columns", "TRL", "verl"],
)
def test_a_reward_reads_the_whole_message_that_the_prompt_begins(tmp_path: Path, prefix: str, source: str) -> None:
    prompt = _dataset_prompt(tmp_path, {"prompt": BEGUN, "answer": "2"}, message_format="{content}|")
    assert prompt.text == "1+1?|Let me think. <think>"
    rewards = grade(
        _load(tmp_path, prefix, source),
        prompt,
        ["two</think><answer>2</answer>", "<answer>2</answer>"],
        (0.0, 1.0),
    )
    assert rewards == {"rewards": [1.0, 0.0]}


def test_gold_expert_and_extracted_answers_fit_a_message_that_the_prompt_begins(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": BEGUN, "answer": "2", "solution": WHOLE}) + "\n")
    options: dict[str, Any] = {"path": str(path), "message_format": "{content}|", "expert_column": "solution"}
    task = make_task(**options, answer_column="answer", gold_format="Let me think. <think></think>{answer}")
    (prompt,) = task.prompts("train")
    assert (task.gold(prompt), task.expert(prompt)) == ("</think>2", "two</think><answer>2</answer>")
    begun = make_task(**options, answer_column="answer", gold_format="<think>{answer}</think>")
    assert begun.extract(prompt, " 2 </think> or 3") == "2"
    exact = make_task(**options, answer_column="answer")
    assert list(exact.rewards(prompt, [" 2", "3"])) == [1.0, 0.0]
    full = make_task(**options, answer_column="solution")
    (prompt,) = full.prompts("train")
    assert list(full.rewards(prompt, [full.gold(prompt) or "", "two"])) == [1.0, 0.0]


def test_an_earlier_version_closed_the_message_and_its_responses_are_whole(tmp_path: Path) -> None:
    prompt = make_prompt("t", "1+1?|Let me think. <think>|", {}, extra={"_messages": BEGUN})
    reward = _load(tmp_path, "", "def f(prompt, text):\n    return float(text == '2')\n")
    assert list(reward(prompt, ["2"])) == [1.0]


@pytest.mark.parametrize("form", ["{role}|", "{content!r}"])
def test_a_message_that_its_format_cannot_continue_is_refused_by_its_row(tmp_path: Path, form: str) -> None:
    with pytest.raises(ConfigError, match=r"train.jsonl row 1: .*is to be continued"):
        _dataset_prompt(
            tmp_path, {"prompt": [BEGUN[0], {**BEGUN[1], "content": "a\nb"}], "answer": "2"}, message_format=form
        )


def test_trl_may_return_an_array(tmp_path: Path) -> None:
    reward = _load(tmp_path, "trl:", "import numpy\ndef f(completions, **kw):\n    return numpy.array([1.0, 0.0])\n")
    assert reward(make_prompt("t", "x", {}), ["a", "b"]) == [1.0, 0.0]


KINDS_OF_REWARDS = {
    "a tensor": "torch.tensor([1.0, 0.0])",
    "half precision": "torch.tensor([1.0, 0.0], dtype=torch.bfloat16)",
    "integers": "torch.tensor([1, 0])",
    "booleans": "torch.tensor([True, False])",
    "a graph behind it": "torch.tensor([1.0, 0.0], requires_grad=True)",
    "one column": "torch.tensor([[1.0], [0.0]])",
    "0-d tensors": "[torch.tensor(1.0), torch.tensor(0.0)]",
    "1-d tensors": "[torch.tensor([1.0]), torch.tensor([0.0])]",
    "numpy": "np.array([1.0, 0.0], np.float32)",
    "numpy booleans": "np.array([True, False])",
    "numpy objects": "np.array([1.0, 0], object)",
    "numpy scalars": "[np.float16(1), np.int8(0)]",
    "0-d arrays": "[np.array(1.0), np.array(0)]",
    "a tuple": "(1.0, 0)",
    "a generator": "(r for r in (1.0, 0.0))",
    "a map": "map(float, (1, 0))",
    "mixed": "[torch.tensor(1.0), False]",
}


def _graded(tmp_path: Path, returned: str, *, signature: str = "completions, **kw", prefix: str = "trl:") -> Any:
    source = f"import numpy as np\nimport torch\ndef f({signature}):\n    return {returned}\n"
    return grade(_load(tmp_path, prefix, source), make_prompt("t", "x", {"answer": 1}), ["a", "b"], (0.0, 1.0))


@pytest.mark.parametrize("returned", KINDS_OF_REWARDS.values(), ids=list(KINDS_OF_REWARDS))
def test_trl_takes_whatever_has_a_number_for_each_completion(tmp_path: Path, returned: str) -> None:
    assert _graded(tmp_path, returned) == {"rewards": [1.0, 0.0]}


@pytest.mark.parametrize(
    "returned", ["[1.0, None]", "np.array([1.0, None])", "np.array([1.0, np.nan])", "torch.tensor([1.0, torch.nan])"]
)
def test_none_of_trl_is_ungraded_and_so_is_nan_where_none_has_no_place(tmp_path: Path, returned: str) -> None:
    assert "1 of 2 responses ungraded" in _graded(tmp_path, returned)["ungraded"]


@pytest.mark.parametrize(
    ("returned", "number"),
    [
        ("torch.tensor([1.0])", "got 1"),
        ("torch.ones(3)", "got 3"),
        ("torch.tensor([])", "got 0"),
        ("np.ones((1, 2))", "got 1"),
        ("[]", "got 0"),
        ("iter([1.0])", "got 1"),
        ("torch.tensor(1.0)", "in a list"),
        ("np.float32(1)", "in a list"),
        ("None", "in a list"),
        ("'10'", "in a list"),
        ("b'10'", "in a list"),
        ("{'a': 1.0, 'b': 0.0}", "in a list"),
        ("{0.0, 1.0}", "in a list"),
    ],
)
def test_trl_rewards_of_another_number_are_refused_with_both(tmp_path: Path, returned: str, number: str) -> None:
    failed = _graded(tmp_path, returned)["failed"]
    assert "for 2 completions" in failed
    assert number in failed


@pytest.mark.parametrize("returned", ["np.ones((2, 2))", "torch.zeros(2, 2)", "['1', '0']", "[1.0, float('nan')]"])
def test_what_is_no_number_for_each_completion_is_refused(tmp_path: Path, returned: str) -> None:
    assert "not a number in [0, 1]" in _graded(tmp_path, returned)["failed"]


@pytest.mark.parametrize(
    "returned", ["torch.tensor(1.0)", "torch.tensor([1.0])", "np.float32(1)", "np.array([1])", "np.bool_(True)", "True"]
)
@pytest.mark.parametrize("signature", ["prompt, text", "solution_str, ground_truth, **kw"])
def test_a_reward_of_one_response_may_be_a_tensor_or_array_of_one(
    tmp_path: Path, returned: str, signature: str
) -> None:
    prefix = "verl:" if "solution" in signature else ""
    assert _graded(tmp_path, returned, signature=signature, prefix=prefix) == {"rewards": [1.0, 1.0]}


@pytest.mark.parametrize("returned", ["[1.0]", "1.0", "[1.0, 0.0, 1.0]"])
def test_trl_must_return_one_reward_for_each_completion(tmp_path: Path, returned: str) -> None:
    reward = _load(tmp_path, "trl:", f"def f(completions, **kw):\n    return {returned}\n")
    failed = grade(reward, make_prompt("t", "x", {}), ["a", "b"], (0.0, 1.0))
    assert "for 2 completions; expected one reward for each" in failed["failed"]


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    reward = _load(tmp_path, "trl:", "def f(completions, nums, **kw):\n    return [1.0]\n")
    with pytest.raises(TypeError, match=r"requires 'nums'.*columns are answer\. Add columns to task"):
        reward(make_prompt("t", "x", {"answer": "2"}), ["2"])


ROW = {"prompt": "1+1?", "answer": "2", "nums": [1, 1], "level": None, "picture": "x", "note": "y"}


@pytest.mark.parametrize(
    ("prefix", "signature", "body", "kept"),
    [
        ("trl:", "completions, **kw", "[float(n == [1, 1]) for n in kw['nums']]", set(ROW) - {"prompt"}),
        ("trl:", "completions, nums, **kw", "[float(n == [1, 1]) for n in nums]", {"answer", "nums"}),
        ("", "completion, nums, *, level, **row", "float(nums == [1, 1])", {"answer", "nums", "level"}),
        ("", "completion, answer", "float(answer == '2')", {"answer"}),
    ],
)
def test_a_function_of_columns_gets_those_that_its_source_asks_for(
    tmp_path: Path, prefix: str, signature: str, body: str, kept: set[str]
) -> None:
    decorator = "" if prefix else "@bapo.reward\n"
    reward = _load(tmp_path, prefix, f"import bapo\n{decorator}def f({signature}):\n    return {body}\n")
    prompt = _dataset_prompt(tmp_path, ROW, graded_by=f"{prefix}{tmp_path / 'mine.py'}:f")
    assert set(prompt.answer) - {"_row"} == kept
    assert list(reward(prompt, ["a", "b"])) == [1.0, 1.0]
    assert prompt.prompt_id == _dataset_prompt(tmp_path, ROW).prompt_id


def test_columns_that_are_no_json_values_are_left_out_unless_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(completions, **kw):\n    return kw\n")
    path = str(tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist([{"prompt": "x", "answer": "2", "picture": b"1", "level": 3}]), path)
    task = load_task("dataset", {"path": path}, TaskContext(rewards=(f"trl:{tmp_path / 'mine.py'}:f",)))
    assert set(task.prompts("train")[0].answer) == {"answer", "level", "_row"}


def test_a_missing_key_of_a_reward_names_the_setting_that_keeps_columns(tmp_path: Path) -> None:
    reward = _load(tmp_path, "", "def f(prompt, text):\n    return prompt.answer[text]\n")
    verifier = reward
    prompt = _dataset_prompt(tmp_path, ROW)
    assert "task.options.extra_columns" in grade(verifier, prompt, ["nums"], (0.0, 1.0))["failed"]
    assert "extra_columns" not in grade(verifier, make_prompt("t", "x", {}), ["nums"], (0.0, 1.0))["failed"]


VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7},
}
SKYRL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "env_class": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
}


@pytest.mark.parametrize("row", [VERL_ROW, SKYRL_ROW])
def test_verl_gets_the_source_the_ground_truth_and_the_extra_info_of_the_row(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    source = (
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert (data_source, ground_truth, extra_info['index']) == ('openai/gsm8k', '2', 7)\n"
        "    return solution_str == ground_truth\n"
    )
    reward = _load(tmp_path, "verl:", source)
    assert list(reward(_dataset_prompt(tmp_path, row), ["2", "3"])) == [True, False]


def test_a_dict_without_a_score_is_an_error_that_shows_its_keys(tmp_path: Path) -> None:
    reward = _load(tmp_path, "verl:", "def f(solution_str, **kw):\n    return {'acc': 1.0}\n")
    with pytest.raises(TypeError, match="without 'score': it has acc"):
        reward(make_prompt("t", "x", {"answer": "2"}), ["2"])


@pytest.mark.parametrize(
    ("score", "reward_range", "reward"),
    [("-1", (-1.0, 1.0), 0.0), ("1", (-1.0, 1.0), 1.0), ("0", (-1.0, 1.0), 0.5), ("15", (10.0, 20.0), 0.5),
     ("__import__('decimal').Decimal('0.25')", (0.0, 1.0), 0.25), ("1 + 5e-7", (0.0, 1.0), 1.0),
     ("-1.000001", (-1.0, 1.0), 0.0)],
)  # fmt: skip
def test_a_reward_range_is_mapped_to_0_to_1(
    tmp_path: Path, score: str, reward_range: tuple[float, float], reward: float
) -> None:
    verifier = _load(tmp_path, "", f"def f(prompt, text):\n    return {score}\n")
    assert grade(verifier, make_prompt("t", "x", {}), ["a"], reward_range) == {"rewards": [reward]}


def test_the_number_that_is_stored_is_the_one_that_is_checked(tmp_path: Path) -> None:
    code = (
        "class Half(float):\n    def __float__(self):\n        return 7.0\ndef f(prompt, text):\n    return Half(0.5)\n"
    )
    verifier = _load(tmp_path, "", code)
    assert "failed" in grade(verifier, make_prompt("t", "x", {}), ["a"], (0.0, 1.0))


def test_a_reward_outside_of_its_range_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    verifier = _load(tmp_path, "", "def f(prompt, text):\n    return -1\n")
    failed = grade(verifier, make_prompt("t", "x", {}), ["a"], (0.0, 1.0))["failed"]
    assert "returned -1, which is not a number in [0, 1]" in failed
    assert "task.reward_range" in failed


# -- answers of responses


TAGS, MARK, BOXED = "<answer>{answer}</answer>", "#### {answer}", "\\boxed{{answer}}"


@pytest.mark.parametrize(
    ("form", "text", "want"),
    [
        (TAGS, "so <answer> 42 </answer>", "42"),
        (TAGS, "<answer>1</answer> no: <answer>2</answer>.", "2"),
        (TAGS, "<answer>1</answer> and then <answer>2", "1"),  # cut off: the last that is whole
        (TAGS, "<answer>a\nb</answer>", "a\nb"),
        (TAGS, "42", None),
        (TAGS, "</answer>42<answer>", None),
        (f"Because.\n{TAGS}\n", "I say <answer>42</answer>", "42"),  # only the line with the answer is looked for
        (MARK, "3 + 4 = 7\n#### 7", "7"),
        (MARK, "#### 7\nwait\n####  1,000 \nbye", "1,000"),
        (MARK, "####", ""),
        (MARK, "7", None),
        (BOXED, r"hence \boxed{42}.", "42"),
        (BOXED, r"\boxed{\frac{1}{2}} or so", r"\frac{1}{2}"),
        (BOXED, r"\boxed{1} and \boxed{2", "1"),
        (BOXED, r"\boxed{", None),
        ("**{answer}**", "**1** or **2**", "2"),
        ("{answer}", "42", None),  # nothing says where it stands
        ("{answer} it is", "42 it is", None),
        ("no field", "42", None),
    ],
)
def test_the_answer_stands_where_the_format_has_it(form: str, text: str, want: str | None) -> None:
    assert written_answer(form, text) == want


def test_a_long_text_with_many_marks_is_read_in_time_that_grows_with_its_length() -> None:
    text = "\\boxed{" * 100_000
    assert written_answer(BOXED, text) is None  # quadratic work would take minutes
    assert written_answer(TAGS, "<answer>" * 100_000) is None


def task_of(tmp_path: Path, **options: Any) -> DatasetTask:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": "6*7?", "answer": "42"}) + "\n")
    return make_task(path=str(path), **options)


@pytest.mark.parametrize(
    ("options", "another", "want"),
    [
        ({}, False, "so <answer>42</answer>"),  # exact match compares all of it
        ({}, True, None),  # and another reward something else
        ({"reward": "mine.py:f"}, False, None),  # which does not say what it reads
        ({"reward": "mine.py:f", "gold_format": TAGS}, False, "42"),
        ({"gold_format": TAGS}, True, "42"),
        ({"gold_format": "{answer}"}, True, None),
    ],
)
def test_a_dataset_shows_what_its_reward_reads_as_far_as_that_is_known(
    tmp_path: Path, options: dict[str, Any], another: bool, want: str | None
) -> None:
    task = task_of(tmp_path, **options)
    extract = extract_of(task, another_reward=another)
    (prompt,) = task.prompts("train")
    assert (extract(prompt, " so <answer>42</answer>\n") if extract else None) == want


@pytest.mark.parametrize("form", [TAGS, MARK, BOXED])
def test_the_answer_of_a_gold_response_is_the_answer_of_the_row(tmp_path: Path, form: str) -> None:
    task = task_of(tmp_path, reward="mine.py:f", gold_format=form)
    (prompt,) = task.prompts("train")
    assert task.extract(prompt, str(task.gold(prompt))) == "42"
