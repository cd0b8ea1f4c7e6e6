"""Files of Geometry3K in the two layouts that people have, and the configuration that trains on them."""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo.config.load import load_config
from bapo.core.errors import ConfigError
from bapo.tasks.images import digest_of
from tests.support.tasks import maker

make_task = maker("dataset")

image = pytest.importorskip("PIL.Image", reason="requirements of images")

CONFIG = Path(__file__).parents[2] / "deploy" / "configs" / "geometry-3b.toml"
PROBLEM = "<image>In $\\triangle ABC$, find $x$. Round to the nearest tenth, if necessary."
INSTRUCTION = " You FIRST think about the reasoning process. The final answer MUST BE put in \\boxed{}."
IMAGES = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def _png(shade: int) -> bytes:
    buffer = io.BytesIO()
    image.new("RGB", (60, 40), (shade, shade, 255)).save(buffer, format="PNG")
    return buffer.getvalue()


def _hub_rows(count: int) -> list[dict[str, Any]]:
    """hiyouga/geometry3k: images, problem, answer."""
    return [
        {"images": [{"bytes": _png(n), "path": None}], "problem": f"{PROBLEM} ({n})", "answer": f"{n} \\sqrt {{ 3 }}"}
        for n in range(2, 2 + count)
    ]


def _verl_rows(count: int) -> list[dict[str, Any]]:
    """What verl's examples/data_preprocess/geo3k.py writes."""
    return [
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "user", "content": row["problem"] + INSTRUCTION}],
            "images": row["images"],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"split": "train", "index": n, "answer": row["answer"], "question": row["problem"]},
        }
        for n, row in enumerate(_hub_rows(count))
    ]


def _hub(path: Path, rows: list[dict[str, Any]]) -> str:
    schema = pa.schema([("images", IMAGES), ("problem", pa.string()), ("answer", pa.string())])
    pq.write_table(pa.Table.from_pylist(rows, schema), path)
    return str(path)


def _verl(path: Path, rows: list[dict[str, Any]]) -> str:
    info = [("split", pa.string()), ("index", pa.int64()), ("answer", pa.string()), ("question", pa.string())]
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("images", IMAGES),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            ("extra_info", pa.struct(info)),
        ]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema), path)
    return str(path)


HUB_OPTIONS: dict[str, Any] = {
    "prompt_column": "problem",
    "answer_column": "answer",
    "images_column": "images",
    "question_format": "{prompt}" + INSTRUCTION,
    "reward": "bapo.tasks.mathematics:boxed",
    "gold_format": "\\boxed{{answer}}",
}
VERL_OPTIONS: dict[str, Any] = {
    "images_column": "images",
    "reward": "bapo.tasks.mathematics:boxed",
    "gold_format": "\\boxed{{answer}}",
}


@pytest.mark.parametrize("layout", ["hub", "verl"])
def test_both_layouts_give_the_same_prompts_with_their_images(tmp_path: Path, layout: str) -> None:
    if layout == "hub":
        train, test = _hub(tmp_path / "train.parquet", _hub_rows(3)), _hub(tmp_path / "test.parquet", _hub_rows(5)[3:])
        task = make_task(path=train, held_out={"test": test}, **HUB_OPTIONS)
    else:
        train, test = (
            _verl(tmp_path / "train.parquet", _verl_rows(3)),
            _verl(tmp_path / "test.parquet", _verl_rows(5)[3:]),
        )
        task = make_task(path=train, held_out={"test": test}, message_format="{content}", **VERL_OPTIONS)
    prompts = [*task.prompts("train"), *task.prompts("test")]
    assert [prompt.text for prompt in prompts] == [f"{PROBLEM} ({n}){INSTRUCTION}" for n in range(2, 7)]
    assert [prompt.images for prompt in prompts] == [(digest_of(_png(n)),) for n in range(2, 7)]
    assert [task.image(prompt.images[0]) for prompt in prompts] == [_png(n) for n in range(2, 7)]


@pytest.mark.parametrize("layout", ["hub", "verl"])
def test_boxed_answers_are_compared_as_mathematics(tmp_path: Path, layout: str) -> None:
    pytest.importorskip("math_verify", reason="an extra of the graders")
    if layout == "hub":
        task = make_task(path=_hub(tmp_path / "train.parquet", _hub_rows(1)), **HUB_OPTIONS)
    else:
        task = make_task(path=_verl(tmp_path / "train.parquet", _verl_rows(1)), **VERL_OPTIONS)
    (prompt,) = task.prompts("train")
    assert prompt.answer["answer"] == "2 \\sqrt { 3 }"
    gold = task.gold(prompt)
    assert gold is not None
    assert task.reward(prompt, gold) == 1.0
    assert task.reward(prompt, "<think>law of sines</think> \\boxed{\\sqrt{12}}") == 1.0
    assert task.reward(prompt, "\\boxed{3 \\sqrt{2}}") == 0.0
    assert task.reward(prompt, "2 \\sqrt{3}") == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": [{"bytes": b"not a picture", "path": None}]}, "row 2.*not a readable PNG or JPEG"),
        ({"images": [{"bytes": _png(9)[:90], "path": None}]}, "row 2.*broken or truncated"),
        ({"images": [{"bytes": None, "path": None}]}, "row 2.*needs `bytes` or `path`"),
        ({"images": []}, "row 2.*1 <image> for 0 images"),
        ({"problem": "Find x."}, "row 2.*0 <image> for 1 images"),
        ({"answer": None}, "row 2.*answer"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = _hub_rows(3)
    rows[1] |= change
    task = make_task(path=_hub(tmp_path / "train.parquet", rows), **HUB_OPTIONS)
    with pytest.raises(ConfigError, match=message):
        task.prompts("train")


def test_the_shipped_configuration_has_the_papers_settings_and_reads_such_files(tmp_path: Path) -> None:
    config = load_config([CONFIG], [])
    assert (config.algorithm.batch_size, config.algorithm.group_size, config.learner.minibatch_size) == (256, 8, 64)
    assert (config.algorithm.c1, config.algorithm.most_reevaluated) == (0.125, 128)
    assert (tuple(config.algorithm.c2_range), tuple(config.algorithm.c3_range)) == ((0.125, 0.5), (0.25, 0.625))
    assert (config.cadence.weight_sync_interval, config.cadence.reevaluation_interval) == (5, 5)
    assert (config.rollout.max_prompt_tokens, config.rollout.max_response_tokens) == (2048, 8192)
    assert (config.learner.lr, config.loss.kl_coef, config.loss.entropy_coef) == (1e-6, 0.001, 0.001)
    assert config.run.num_steps == 30 * 2101 // 256
    options = dict(config.task.options) | {
        "path": _hub(tmp_path / "train.parquet", _hub_rows(3)),
        "held_out": {"test": _hub(tmp_path / "test.parquet", _hub_rows(5)[3:])},
        "chat": False,  # the template is of a tokenizer that is not here
    }
    task = make_task(**options, reward=config.task.reward)
    (prompt, *_) = task.prompts("train")
    assert prompt.text.startswith(PROBLEM)
    assert prompt.text.endswith("\\boxed{}.")
    assert "process as an internal monologue and then provide the final answer." in prompt.text
    assert (len(prompt.images), task.extract(prompt, "\\boxed{5}")) == (1, "5")
