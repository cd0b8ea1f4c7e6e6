"""One HTML page about a run: figures, results, settings, timings. It opens without a network, light or dark."""

from __future__ import annotations

import html
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo.errors import ConfigError, StorageError
from bapo.records import RunDirectory
from bapo.report import data, figures
from bapo.report.markup import Rows, figure, table
from bapo.report.theorem_section import theorem_meter

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: light-dark(#1f2328, #d7dbe0); background: light-dark(#fff, #14171b); }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
p.lead { margin-top: .2rem; opacity: .75; }
figure { margin: 0; } svg { width: 100%; height: auto; } figcaption { font-size: .9rem; opacity: .8; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .15rem 1.2rem .15rem 0; border-bottom: 1px solid #8884; }
td.number { text-align: right; }
details { margin-top: .5rem; } code { font-size: .9em; }
"""


def write_report(run: RunDirectory) -> Path:
    """Make RUN/report.html. Raises: ConfigError when the run has no finished step; StorageError."""
    page = make_page(run)
    try:
        run.report_path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {run.report_path}: {error.strerror}") from error
    return run.report_path


def make_page(run: RunDirectory) -> str:
    """The page as text."""
    metrics, evaluations = run.read_metrics(whole=True), run.read_evaluations(whole=True)
    if not metrics:
        raise ConfigError(f"run {run.path} has no finished step yet, so there is nothing to report")
    config = tomllib.loads(run.config_path.read_text())
    body = [
        f"<h1>{html.escape(run.name)}</h1>",
        f'<p class="lead">{html.escape(_lead(run, config, metrics))}</p>',
        *_held_out(evaluations),
        *_figures(run, config, metrics),
        *theorem_meter(metrics, config),
        "<h2>Where a step's time went</h2>",
        table(("phase of the learner's step", "mean seconds", "share"), _phase_rows(metrics)),
        *_processes(run),
        "<h2>Settings</h2>",
        *_settings(config),
    ]
    title = html.escape(f"{run.name} - BAPO run report")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n' + "\n".join(
        [*body, "</body></html>\n"]
    )


def _lead(run: RunDirectory, config: Mapping[str, Any], metrics: Sequence[data.Row]) -> str:
    fields = run.read_run()
    status = fields.get("status", "unknown")
    started = fields.get("started_at")
    when = time.strftime(", started %Y-%m-%d %H:%M", time.localtime(started)) if started else ""
    name = config["algorithm"]["name"]
    return (
        f"{name}, {config['model']['path']}, task {config['task']['name']}: {len(metrics)} of "
        f"{config['run']['num_steps']} steps, status {status}{when}"
    )


def _held_out(evaluations: Sequence[data.Row]) -> Iterator[str]:
    if not evaluations:
        return
    curves = data.held_out_curves(evaluations)
    words = "; ".join(f"{c.name} from {c.values[0]:.1%} to {c.values[-1]:.1%}" for c in curves)
    yield "<h2>Held-out accuracy</h2>"
    shared = ", ".join(f"{c.num_prompts} of {c.name}" for c in curves if c.num_prompts)
    caption = "with 95 % intervals" + (f", on the prompts that all measurements share ({shared})" if shared else "")
    yield figure(figures.held_out_figure(curves), f"Held-out accuracy over steps: {words}.", caption)
    header = ("split", "steps", "accuracy", "95 % interval", "prompts", "responses each", "cut off", "mean tokens")
    yield table(
        header,
        [
            (
                row["split"],
                str(row["step"]),
                f"{row['accuracy']:.1%}",
                f"{row['low']:.1%} to {row['high']:.1%}",
                str(row["num_prompts"]),
                str(row["num_samples"]),
                f"{row['truncated_share']:.1%}",
                f"{row['mean_tokens']:.1f}",
            )
            for row in evaluations
        ],
    )


def _figures(run: RunDirectory, config: Mapping[str, Any], metrics: Sequence[data.Row]) -> Iterator[str]:
    parts = data.composition(metrics)
    total = sum(parts.x1) + sum(parts.x2) + sum(parts.x3)
    mean = total / len(parts.steps)
    yield "<h2>What the batches were made of</h2>"
    yield figure(
        figures.composition_figure(parts),
        f"Stacked bars of X1, X2 and X3 per step, {mean:.1f} groups on average, below the line B = {parts.batch_size}.",
        "X1: informative fresh groups; X2: hard prompts that were asked again and improved; X3: reused groups "
        "(the paper's Fig. 8)",
    )
    reward = data.reward_curve(metrics)
    yield "<h2>Reward</h2>"
    yield figure(
        figures.reward_figure(reward),
        f"Mean reward over steps: {reward.values[0]:.3f} at first, {reward.values[-1]:.3f} at last.",
        "mean reward of all fresh responses of a step, before the filter (Fig. 4)",
    )
    first, last = data.quarters(run.group_steps())
    if not first:
        return
    bins = data.accuracy_bins(
        (fates for _, fates in run.read_groups(first)),
        (fates for _, fates in run.read_groups(last)),
        config["algorithm"]["group_size"],
    )
    yield "<h2>How hard the prompts were</h2>"
    yield figure(
        figures.bins_figure(bins),
        f"Fresh groups without a right answer: first quarter {bins.first[0]:.1%}, last quarter {bins.last[0]:.1%}.",
        "fresh groups by number of right answers, first against last quarter of the steps (Fig. 7)",
    )


def _phase_rows(metrics: Sequence[data.Row]) -> Rows:
    rows = [(words, f"{seconds:.3f}", f"{share:.1%}") for words, seconds, share in data.phase_seconds(metrics)]
    mean = sum(row["step_s"] for row in metrics) / len(metrics)
    return [*rows, ("the whole step", f"{mean:.3f}", "100 %")]


def _processes(run: RunDirectory) -> Iterator[str]:
    processes = run.read_run().get("processes", {})
    if not processes:
        return
    yield "<h2>Processes</h2>"
    rows = [
        (name, _or_dash(fields.get("ready_after_s")), _or_dash(fields.get("peak_mib")))
        for name, fields in processes.items()
    ]
    yield table(("process", "seconds until ready", "most memory, MiB"), rows)


def _settings(config: Mapping[str, Any]) -> Iterator[str]:
    for section, values in config.items():
        if isinstance(values, Mapping):
            rows = [(name, str(value)) for name, value in values.items()]
            yield f"<details><summary>{html.escape(section)}</summary>{table(('key', 'value'), rows)}</details>"


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)
