"""Write the geometry model's card from what training and evaluation recorded, so that no figure is typed by hand.

python -m models.geometry_card models/geometry-tiny
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---
# geometry-tiny

A Qwen2.5-VL of {num_parameters:,} parameters (float32), {in_vision:,} of them for vision. It reads a drawing of 64 x 64
pixels and computes an angle, a length or an area. It exists to be improved by reinforcement learning on a laptop.

    prompt    <image>What is the perimeter?        (a rectangle with 24 below and 17 at its right)
    response  24+17=41,2*41=82;<answer>82</answer><eos>

Made by `python -m models.train_geometry_model --out {folder}`.

## Accuracy
{num_problems:,} held-out problems, {group_size} responses each, at most {max_new_tokens} new tokens. No problem with
their numbers, in whatever order or shape, is in the training of the model or of a run; shapes and labels stand
elsewhere in each drawing. The interval is the 95 % bootstrap over problems.

| pictures | temperature | accuracy | 95 % interval | solved in {group_size} | mixed groups |
|---|---|---|---|---|---|
{accuracy_rows}

Greedy: {greedy:.3f}; blank {blank_greedy:.3f}, swapped {swapped_greedy:.3f}. Blank: white paper. Swapped: the picture
of another problem of the same kind. A model that guesses does as well on those as on its own.

| kind | problems | accuracy | solved in {group_size} | mixed groups |
|---|---|---|---|---|
{kind_rows}

Groups of {group_size} by number of right responses at temperature 1:

| prompts | {num_right_header} |
|---|{num_right_rule}
{histogram_rows}

All figures are in `evaluation.json`.

## Recipe
1. {num_reading_iterations:,} iterations of reading exercises for the vision tower alone: pictures of lines, circles and
   many labels, and two heads, thrown away afterwards, that say which character is in which patch and which label begins
   at which token. At the end they read {characters_read:.1%} of the characters and {labels_read:.1%} of the labels.
   {reading_cpu_s:.0f} CPU seconds of one core ({reading_wall_s:.0f} s of wall clock).
2. {num_iterations:,} iterations of worked answers for the whole model, loss on the response only: last loss
   {answering_loss}. {answering_cpu_s:.0f} CPU seconds ({answering_wall_s:.0f} s of wall clock).

{reading_rows} and {answering_rows} pictures per iteration, Muon for the layers' matrices and AdamW for the rest,
learning rate {lr:g} after {num_warmup} iterations of warm-up, linear decay to 0, seed {seed}. All problems of the
examples have numbers of buckets 0 to 7 of `crc32(sorted numbers) % 10`; reinforcement learning trains on buckets 0 to 8
and is measured on bucket 9. The exercises show every number, and no problem. Numbers start as points on circles
(`models/geometry_model.py`). White paper is 0 for the model (mean 1, deviation 0.5).

{did_not_work}

## Format
Hugging Face folder; transformers, AutoTokenizer and vLLM load it. A picture is 16 tokens (patches of 8 pixels, 2 x 2 of
them a token). Every integer 0 to 399 is one token, so decoding is ambiguous ([3][5] and [35] both read "35"): train on
token ids. Embedding and head are not tied.
"""

DID_NOT_WORK = """\
What did not work, with the same examples and at temperature 1: no exercises 0.003, as on blank paper; exercises of 500
iterations with characters alone 0.006, whole labels are what the decoder needs. One run each, 500 held-out problems."""


def render(folder: Path) -> str:
    """The card as Markdown. Raises: OSError if `recipe.json` or `evaluation.json` is not there."""
    made = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    measured = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    reading, answering, size = made["took"]["reading"], made["took"]["answering"], measured["group_size"]
    rows = [("own", 1.0, "temperature_1"), ("own", 0.3, "temperature_0.3")]
    rows += [("blank", 1.0, "blank"), ("swapped", 1.0, "swapped")]
    histograms = [("held out", "temperature_1"), ("training", "train"), ("held out, blank", "blank")]
    return CARD.format(
        **made["recipe"],
        num_parameters=made["num_parameters"],
        in_vision=made["in_vision"],
        folder=folder.as_posix(),
        num_problems=measured["num_problems"],
        group_size=size,
        max_new_tokens=measured["max_new_tokens"],
        greedy=measured["greedy"],
        blank_greedy=measured["blank"]["greedy"],
        swapped_greedy=measured["swapped"]["greedy"],
        accuracy_rows="\n".join(_accuracy_row(name, heat, measured[key]) for name, heat, key in rows),
        kind_rows="\n".join(_kind_row(name, row) for name, row in measured["by_kind"].items()),
        num_right_header=" | ".join(f"{k}/{size}" for k in range(size + 1)),
        num_right_rule="---|" * (size + 1),
        histogram_rows="\n".join(
            f"| {name} | {' | '.join(map(str, measured[key]['groups_by_num_right']))} |" for name, key in histograms
        ),
        characters_read=reading["characters_read"],
        labels_read=reading["labels_read"],
        reading_cpu_s=reading["cpu_s"],
        reading_wall_s=reading["wall_s"],
        answering_loss=answering["loss"],
        answering_cpu_s=answering["cpu_s"],
        answering_wall_s=answering["wall_s"],
        did_not_work=DID_NOT_WORK,
    )


def _accuracy_row(pictures: str, temperature: float, row: dict[str, Any]) -> str:
    low, high = row["interval95"]
    cells = [
        pictures,
        f"{temperature:g}",
        f"**{row['accuracy']:.3f}**",
        f"{low:.3f} to {high:.3f}",
        f"{row['solved_at_least_once']:.3f}",
        f"{row['mixed']:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def _kind_row(name: str, row: dict[str, Any]) -> str:
    figures = [f"{row[key]:.3f}" for key in ("accuracy", "solved_at_least_once", "mixed")]
    return f"| {' | '.join([name, str(row['num_problems']), *figures])} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model")
    folder = parser.parse_args().model
    (folder / "README.md").write_text(render(folder), encoding="utf-8")


if __name__ == "__main__":
    main()
