"""The README.md of a model on the Hugging Face Hub: what was trained how, what it measured, and how to load it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import bapo
from bapo.config.load import dump_toml
from bapo.config.tree import Config, TaskConfig
from bapo.core.correctness import measure_of
from bapo.core.statistics import change, over_shared
from bapo.core.text import with_interval
from bapo.runtime.model_files import is_hub_id
from bapo.runtime.run_directory.best import named_weights, sampled_after
from bapo.runtime.run_directory.curves import base_rows

LOAD_MODEL = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo}")
tokenizer = AutoTokenizer.from_pretrained("{repo}")
```"""
LOAD_ADAPTER = """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "{repo}")
```"""


def model_card(
    repo: str, config: Config, step: int, evaluations: Sequence[Mapping[str, Any]], *, is_adapter: bool
) -> str:
    """The page of a checkpoint.

    Args:
        repo: ORG/NAME; step: of the checkpoint; is_adapter: a LoRA adapter, not a whole model.
        evaluations: rows of evaluations.jsonl.
    """
    load = (LOAD_ADAPTER if is_adapter else LOAD_MODEL).format(repo=repo, base=config.model.path)
    return f"""\
---
{_metadata(config, is_adapter=is_adapter)}---
# {repo.partition("/")[2]}

{_fine_tuned(config, step) if config.sft is not None else _reinforced(config, step)}
## Held-out results

{_results(evaluations, step)}
## How to load it

{load}

## Configuration

<details><summary>config.toml</summary>

```toml
{dump_toml(_public(config)).strip()}
```

</details>
"""


def _reinforced(config: Config, step: int) -> str:
    run, task, algorithm, base = config.run, config.task, config.algorithm, config.model.path
    return f"""\
`{base}`, post-trained with reinforcement learning from verifiable rewards by BAPO {bapo.__version__}
([paper](https://arxiv.org/abs/2602.20722)).

- method: `{config.method}`, {step} of {run.num_steps} learner steps of {algorithm.batch_size} prompts x \
{algorithm.group_size} responses, seed {run.seed}
- base model: `{base}`
- task: `{task.name}`{_data(task.options)}
- reward: {_reward(task)}
"""


def _fine_tuned(config: Config, step: int) -> str:
    """Of `bapo sft`: task, method, group size and reward of the config have no part in it."""
    assert config.sft is not None
    run, base, epochs = config.run, config.model.path, config.sft.epochs
    return f"""\
`{base}`, fine-tuned on conversations by BAPO {bapo.__version__}.

- method: supervised fine-tuning, {step} of {run.num_steps} steps of {config.algorithm.batch_size} conversations \
({epochs} {"epoch" if epochs == 1 else "epochs"}), seed {run.seed}
- base model: `{base}`
- data: `{config.sft.data}`
"""


def _metadata(config: Config, *, is_adapter: bool) -> str:
    base = config.model.path
    named = f"base_model: {base}\n" if is_hub_id(base) else ""  # the Hub refuses the path of a folder
    kind = "sft" if config.sft is not None else "reinforcement-learning"
    return f"library_name: {'peft' if is_adapter else 'transformers'}\n{named}tags:\n- bapo\n- {kind}\n"


def _data(options: Mapping[str, Any]) -> str:
    return f" with `{options['path']}`" if "path" in options else ""


def _reward(task: TaskConfig) -> str:
    if isinstance(task.reward, tuple):
        return "weighted mean of " + ", ".join(f"`{one.function}` ({one.weight:g})" for one in task.reward)
    return f"`{task.reward}`" if task.reward else "that of the task"


def _public(config: Config) -> Config:
    """Without addresses in the network of the run."""
    return config.model_copy(update={"buffer": config.buffer.model_copy(update={"redis_url": None, "url": None})})


def _results(evaluations: Sequence[Mapping[str, Any]], step: int) -> str:
    rows = list(_rows(evaluations, step))
    if not rows:
        return f"The weights after step {step} were not measured on held-out data.\n"
    head = ("split", "measure", "prompts x responses", "base model", "this model", "change in points")
    table = "".join(f"| {' | '.join(row)} |\n" for row in (head, ("---",) * len(head), *rows))
    return f"{table}\n95 % intervals in brackets; all of a row is over the prompts that both measurements have.\n"


def _rows(evaluations: Sequence[Mapping[str, Any]], step: int) -> Iterator[tuple[str, ...]]:
    base = base_rows(evaluations)
    own = {row["split"]: row for row in evaluations if row["version"] == step + 1}
    for split, measured in own.items():
        before, row = base.get(split), measured
        if before:  # during a run fewer prompts are measured, and the first may be easier than the others
            before, row = over_shared(before, row)
        found = change(before, row) if before else None
        yield (
            split,
            measure_of(evaluations, split),
            f"{row['num_prompts']} x {row['num_samples']}",
            _cell(before) if before else "not measured",
            _cell(row),
            found.in_points if found else "",
        )


def _cell(row: Mapping[str, Any]) -> str:
    """Its mean, and which other weights it is of: a measurement during a run is often by newer ones."""
    return with_interval(row) + named_weights(sampled_after(row))
