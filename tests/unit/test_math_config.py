"""deploy/configs/math-1.5b.toml, with a small file in the place of the data set and of the model's tokenizer."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bapo.config.load import load_config
from bapo.tasks.registry import load_task, with_reward
from bapo.tasks.rewards import load_reward
from tests.tiny_model import write_tokenizer

CONFIG = Path(__file__).parents[2] / "deploy" / "configs" / "math-1.5b.toml"
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


def test_its_prompts_are_questions_by_the_chat_template_and_its_gold_answers_are_right(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [
        {"problem": "What is half of one?", "answer": "\\frac{1}{2}", "solution": "It is a half."},
        {"problem": "What is 2 + 2?", "answer": "4", "solution": "Count."},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist([{"problem": "1 + 1?", "answer": "2"}]), tmp_path / "test.parquet")
    config = load_config(
        [str(CONFIG)],
        [f"--model.path={tmp_path / 'model'}", f"--task.options.path={tmp_path / 'train.parquet'}"],
    )
    options = {**config.task.options, "held_out": {"math500": str(tmp_path / "test.parquet")}}
    task = with_reward(
        load_task(config.task.name, options, tokenizer=config.model.path), load_reward(str(config.task.reward))
    )
    half, four = task.prompts("train")
    assert half.text == (
        "<|user|>What is half of one?\nPlease reason step by step, and put your final answer within \\boxed{}."
        "<|assistant|>"
    )
    assert task.gold(half) == "\\boxed{\\frac{1}{2}}"
    assert task.rewards(half, ["\\boxed{0.5}", "0.5", str(task.gold(half))]) == [1.0, 0.0, 1.0]
    assert task.rewards(four, ["\\boxed{2+2}", "\\boxed{5}"]) == [1.0, 0.0]
    assert [prompt.text[:12] for prompt in task.prompts("math500")] == ["<|user|>1 + "]
