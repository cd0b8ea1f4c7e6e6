"""What a replay found, compared with what the run recorded: as text for people, as JSON for programs. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bapo.config.tree import Config
from learner.diagnostics import MinibatchResult

NOT_COMPARED = ("time", "tokens_per_s", "policy_version")
"""Fields of a row that depend on the clock or on the workers, besides those that end in _s."""
SHOWN = ("loss", "grad_norm", "entropy", "clip_ratio", "kl", "ratio_max", "num_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One value that came out otherwise."""

    name: str
    recorded: Any
    replayed: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedStep:
    """One step that was redone."""

    step: int
    row: Mapping[str, Any]
    """As the learner would write it to metrics.jsonl."""
    recorded: Mapping[str, Any] | None
    """As the run wrote it; None when it never did, as for a step that diverged."""
    minibatches: Sequence[MinibatchResult]

    @property
    def compared(self) -> list[str]:
        """Fields that both rows have and that should be equal."""
        both = [name for name in self.row if self.recorded is not None and name in self.recorded]
        return [name for name in both if name not in NOT_COMPARED and not name.endswith("_s")]

    @property
    def differences(self) -> list[Difference]:
        """Fields that are not equal to the last bit."""
        recorded = self.recorded or {}
        pairs = ((name, recorded[name], self.row[name]) for name in self.compared)
        return [
            Difference(name=name, recorded=then, replayed=now) for name, then, now in pairs if not _equal(then, now)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The redone steps, the wanted one last."""

    run: str
    start: int
    steps: Sequence[RepeatedStep]
    weights_differ_by: float | None
    """Largest difference of any weight from the checkpoint of the last step; None when there is no such checkpoint."""

    @property
    def exact(self) -> bool:
        """Everything that could be compared is equal to the last bit."""
        return not any(step.differences for step in self.steps) and not self.weights_differ_by


def as_json(found: Replay) -> str:
    """One document."""
    steps = [
        {
            "step": step.step,
            "compared": len(step.compared),
            "differences": [asdict(difference) for difference in step.differences],
            "row": dict(step.row),
            "minibatches": [asdict(result) for result in step.minibatches],
        }
        for step in found.steps
    ]
    document = {"run": found.run, "start": found.start, "exact": found.exact, "steps": steps}
    return json.dumps({**document, "weights_differ_by": found.weights_differ_by}, indent=2)


def as_text(found: Replay, config: Config) -> str:
    """The wanted step in full, the ones before it in a line each."""
    return "\n".join(_lines(found, config))


def _lines(found: Replay, config: Config) -> Iterator[str]:
    last = found.steps[-1]
    origin = f"the checkpoint of step {found.start}" if found.start else "the base model"
    yield f"run {found.run}, step {last.step}, repeated from {origin} with the kept batches of {len(found.steps)} steps"
    yield from (_line(step) for step in found.steps[:-1])
    yield ""
    yield f"{'':<16}{'recorded':>16}{'replayed':>16}{'difference':>14}"
    recorded = last.recorded or {}
    numbers = [value.name for value in last.differences if isinstance(value.replayed, int | float)]
    for name in dict.fromkeys([*SHOWN, *numbers]):
        cells = f"{_shown(recorded.get(name)):>16}{_shown(last.row.get(name)):>16}{_gap(recorded, last, name):>14}"
        yield f"{name:<16}{cells}"
    yield ""
    yield from _minibatch_lines(last.minibatches)
    yield ""
    yield _line(last)
    if found.weights_differ_by is not None:
        equal = not found.weights_differ_by
        how = "are, bit by bit, those" if equal else f"differ by at most {found.weights_differ_by:.3g} from those"
        yield f"weights after it {how} of the checkpoint of step {last.step}"
    yield from _notes(found, config)


def _line(step: RepeatedStep) -> str:
    if step.recorded is None:
        return f"step {step.step}: the run has no row of this step to compare with"
    num, different = len(step.compared), step.differences
    text = f"step {step.step}: {num - len(different)} of {num} values are exactly those of metrics.jsonl"
    return f"{text}; others: {', '.join(difference.name for difference in different)}" if different else text


def _minibatch_lines(results: Sequence[MinibatchResult]) -> Iterator[str]:
    yield f"{'mini-batch':<12}{'loss':>14}{'grad_norm':>14}{'entropy':>12}{'kl':>14}{'ratio_max':>12}{'tokens':>10}"
    for number, result in enumerate(results, start=1):
        yield (
            f"{number:<12}{result.loss:>14.6g}{result.grad_norm:>14.6g}{result.entropy:>12.5g}{result.kl:>14.5g}"
            f"{result.ratio_max:>12.5g}{result.num_tokens:>10}"
        )


def _notes(found: Replay, config: Config) -> Iterator[str]:
    """Why it may not be exact."""
    if found.exact:
        return
    if config.learner.num_ranks > 1:
        yield f"the run had {config.learner.num_ranks} ranks and the replay has one: sums are taken in another order"
    if config.learner.device != "cpu":
        yield "on a GPU sums may be taken in another order each time; on the CPU a replay is exact"
    yield "another version of torch, another processor or another number of threads also changes the last bits"


def _gap(recorded: Mapping[str, Any], step: RepeatedStep, name: str) -> str:
    then, now = recorded.get(name), step.row.get(name)
    if then is None or now is None:
        return "-"
    return "0" if _equal(then, now) else f"{now - then:.3g}"


def _equal(then: Any, now: Any) -> bool:
    """To the last bit, also for NaN, which is unlike itself."""
    return json.dumps(then, sort_keys=True) == json.dumps(now, sort_keys=True)


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.8g}" if isinstance(value, float) else str(value)
