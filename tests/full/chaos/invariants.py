"""What must hold of a run whatever befell it. Each check yields one sentence per violation, with the ids.

They compare what producers and consumers wrote down with what is stored; no counter of the service is believed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from tests.full.chaos.evidence import Evidence
from tests.full.chaos.ledger import Line
from tests.full.chaos.model import Model, Seen

SHOWN = 5
LEASE_SLACK_S = 5.0


def violations(found: Evidence) -> list[str]:
    """Every sentence of every check; empty for a run that kept all promises."""
    return [f"{check.__name__}: {sentence}" for check in CHECKS for sentence in check(found)]


def no_acknowledged_group_is_lost(found: Evidence) -> Iterator[str]:
    """Acknowledged = stored + consumed by a batch + evicted by rule + collected by the evaluator."""
    stored = found.stored
    known = (stored.records & set(stored.frames)) | found.looked_at.keys() | found.collected | stored.stale
    # A re-evaluation or evaluation that failed for good has no group, and was never acknowledged as one.
    if lost := found.acknowledged - known:
        yield f"{len(lost)} of {len(found.acknowledged)} acknowledged groups are gone: {_some(lost)}"


def nothing_comes_from_nowhere(found: Evidence) -> Iterator[str]:
    """What is stored or was trained is, in every byte of its columns, what some producer has sent under that id."""
    contents = {group_id: {group["digest"] for group in groups} for group_id, groups in found.sent.items()}
    if foreign := [key for key, digest in found.stored.frames.items() if digest not in contents.get(key, ())]:
        yield f"{len(foreign)} stored groups were never sent like that: {_some(foreign)}"
    for step, batch in found.batches.items():
        if wrong := [key for key, _, digest in batch["trained"] if digest not in contents.get(key, ())]:
            yield f"batch {step} trains groups that were never sent like that: {_some(wrong)}"
        rewards = {key: [group["rewards"] for group in found.sent.get(key, [])] for key in _ids(batch["results"])}
        if wrong := [result["id"] for result in batch["results"] if result["rewards"] not in rewards[result["id"]]]:
            yield f"batch {step} has other rewards than its workers sent: {_some(wrong)}"


def a_batch_never_changes(found: Evidence) -> Iterator[str]:
    """Batch t is the same, to the byte, whenever and by whomever it is asked for."""
    contents: defaultdict[int, set[str]] = defaultdict(set)
    for line in found.of("batch"):
        contents[line["step"]].add(line["digest"])
        if line["step"] != line["asked"]:
            yield f"batch {line['asked']} was asked for and batch {line['step']} came"
    for step, digests in sorted(contents.items()):
        if len(digests) > 1:
            yield f"batch {step} came in {len(digests)} different forms"
    for step, kept in found.stored.batches.items():
        if step in found.batches and kept["groups"] != [key for key, _, _ in found.batches[step]["trained"]]:
            yield f"batch {step} in Redis is another than the learner got"


def every_group_is_consumed_once(found: Evidence) -> Iterator[str]:
    """A group is fresh in one step only, trained at most once as X1 and as X2, and not twice in one batch."""
    steps: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for step, batch in found.batches.items():
        for result in batch["results"]:
            if result["reason"] != "reused":
                steps[result["id"], "looked at"].append(step)
        for group_id, origin, _ in batch["trained"]:
            if origin != "x3":
                steps[group_id, f"trained as {origin}"].append(step)
        trained = [key for key, _, _ in batch["trained"]]
        prompts = Counter(result["prompt"] for result in batch["results"] if result["id"] in set(trained))
        if len(set(trained)) < len(trained) or max(prompts.values(), default=0) > 1:
            yield f"batch {step} holds a group or a prompt twice"
    for (group_id, what), where in steps.items():
        if len(where) > 1:
            yield f"group {group_id} was {what} in steps {where}"


def steps_follow_each_other(found: Evidence) -> Iterator[str]:
    """The learner got batches 1, 2, 3, ..., each with B fresh groups, and committed them in that order."""
    size = found.config.algorithm.batch_size
    if list(found.batches) != list(range(1, len(found.batches) + 1)):
        yield f"the learner got batches {_some(map(str, found.batches))} ... {max(found.batches, default=0)}, with gaps"
    for step, batch in found.batches.items():
        fresh = _inputs(batch, "fresh")
        if len(fresh) != size or len(batch["trained"]) > size:
            yield f"batch {step} has {len(fresh)} fresh groups and trains {len(batch['trained'])}, B = {size}"
    yield from _commits_follow_batches(found)


def _commits_follow_batches(found: Evidence) -> Iterator[str]:
    """A commit is of a batch that the learner had got, and of the next step; or of one behind the newest checkpoint,
    from which a learner that died goes on."""
    got: set[int] = set()
    last = checkpointed = 0
    for line in found.lines:
        if line["event"] == "batch":
            got.add(line["step"])
        elif line["event"] == "resume":
            last = checkpointed = line["step"]
        elif line["event"] == "commit":
            step = line["step"]
            if step not in got:
                yield f"step {step} was committed before the learner got its batch"
            if not checkpointed < step <= last + 1:
                yield f"step {step} was committed after step {last}, with a checkpoint of step {checkpointed}"
            last, checkpointed = step, max(checkpointed, line["upto"])
    # A learner that dies between its checkpoint and the commit says by its resume that it is done with the step.
    resumed = max((line["step"] for line in found.of("resume")), default=0)
    committed = {line["step"] for line in found.of("commit")} | set(range(resumed + 1))
    if missing := [step for step in list(found.batches)[:-1] if step not in committed]:
        yield f"later batches were asked for, but these were not committed: {_some(map(str, missing))}"


def tables_equal_algorithm_1(found: Evidence) -> Iterator[str]:
    """X1, X2, X3, r_tot, B_bad and B_high of every step are what a plain model makes of the same groups."""
    model = Model(found.config)
    batches = {**found.batches}
    for step, batch in batches.items():
        expected = model.step(step, _inputs(batch, "fresh"), _inputs(batch, "reevaluate"))
        for origin in ("x1", "x2", "x3"):
            trained = sorted(key for key, name, _ in batch["trained"] if name == origin)
            if trained != sorted(getattr(expected, origin)):
                yield f"step {step}: {origin} is {_some(trained)}, Algorithm 1 has {_some(getattr(expected, origin))}"
        if abs(batch["r_tot"] - expected.r_tot) > 1e-6:
            yield f"step {step}: r_tot is {batch['r_tot']}, Algorithm 1 has {expected.r_tot}"
        sizes = (batch["num_bad"], batch["num_high"])
        if sizes != (len(expected.bad), len(expected.high)):
            yield f"step {step}: |B_bad|, |B_high| = {sizes}, not {len(expected.bad)}, {len(expected.high)}"
    if batches and found.stored.assembled == max(batches):
        if list(found.stored.bad) != expected.bad:
            yield f"B_bad in Redis is {list(found.stored.bad)[:SHOWN]}, Algorithm 1 has {expected.bad[:SHOWN]}"
        if list(found.stored.high) != expected.high:
            yield f"B_high in Redis is {list(found.stored.high)[:SHOWN]}, Algorithm 1 has {expected.high[:SHOWN]}"


def every_request_is_somewhere(found: Evidence) -> Iterator[str]:
    """What was asked for is open, or settled by a group; what is open is queued or leased, and was asked for."""
    stored = found.stored
    asked = {key for line in found.of("asked") for key in line["ids"] if line["num"]}
    settled = found.looked_at.keys() | found.collected | stored.records | stored.done | found.acknowledged
    if lost := asked - stored.open - settled:
        yield f"{len(lost)} requests vanished: {_some(lost)}"
    asking = {key for line in found.of("asking") for key in line["ids"]}
    if foreign := {key for key in stored.open if key.partition("~")[0] not in asking}:
        yield f"{len(foreign)} open requests were never asked for: {_some(foreign)}"
    places = Counter([*stored.queued, *stored.leased])
    if wrong := {key for key in places.keys() | stored.open if places[key] != 1 or key not in stored.open}:
        yield f"{len(wrong)} requests are not in exactly one of queue and leases: {_some(wrong)}"
    if both := stored.open & (stored.records | stored.done):
        yield f"{len(both)} requests are open although their groups are there: {_some(both)}"


def nothing_is_given_up(found: Evidence) -> Iterator[str]:
    """What was asked for is answered: no request is dropped, by whatever rule, and what is done has a group."""
    if dropped := {key: number for key, number in found.stored.counters.items() if key.startswith("dropped_requests:")}:
        yield f"requests were dropped: {dropped}"
    groups = found.looked_at.keys() | found.collected | found.stored.records | found.acknowledged
    if empty := found.stored.done - groups:
        yield f"{len(empty)} requests are done without a group: {_some(empty)}"


def staleness_is_bounded(found: Evidence) -> Iterator[str]:
    """A trained fresh group was sampled by weights at most v - 1 + max_steps_ahead steps old, and not by later ones."""
    most = found.config.cadence.weight_sync_interval - 1 + found.config.cadence.max_steps_ahead
    for step, batch in found.batches.items():
        ages = {result["id"]: step - result["version"] for result in batch["results"] if result["purpose"] == "fresh"}
        x1 = {key for key, origin, _ in batch["trained"] if origin == "x1"}
        if wrong := [key for key in ages if key in x1 and not 0 <= ages[key] <= most]:
            yield f"step {step} trains fresh groups of {[ages[key] for key in wrong]} steps before, at most {most}"


def leases_return(found: Evidence) -> Iterator[str]:
    """Every lease has a holder and ends within `buffer.lease_s`, so that no request is held by the dead."""
    stored = found.stored
    if set(stored.holders) != set(stored.leased):
        yield f"leases without a holder or holders without a lease: {_some(set(stored.holders) ^ set(stored.leased))}"
    latest_ms = (stored.read_at_s + found.config.buffer.lease_s + LEASE_SLACK_S) * 1000
    if late := [key for key, deadline in stored.leased.items() if deadline > latest_ms]:
        yield f"{len(late)} leases end later than any lease may: {_some(late)}"


def nothing_leaks(found: Evidence) -> Iterator[str]:
    """Every stored group has a frame, a record and a reference, and is needed by a table, a batch or an evaluation."""
    stored = found.stored
    if odd := (stored.records ^ set(stored.frames)) | (stored.records ^ set(stored.refs)):
        yield f"{len(odd)} groups have a frame, a record or a reference, but not all three: {_some(odd)}"
    needs = Counter([*stored.fresh, *(key for key, _ in stored.high)])
    for batch in stored.batches.values():
        needs.update([*batch["groups"], *batch["untrained"]])
    needs.update(stored.stale & stored.refs.keys())  # held for their texts until a batch reports them
    needs.update({key for _, key in stored.evaluated} & stored.refs.keys())
    settled = Counter(label for label, _ in stored.evaluated)
    if wrong := {
        label for label in settled.keys() | stored.evaluations if settled[label] != stored.evaluations.get(label, 0)
    }:
        yield f"{len(wrong)} evaluations count more or less than they hold: {_some(wrong)}"
    counted = stored.refs
    # What a killed evaluator has left goes with the next measurement, or the one after it if it was still open.
    asked = sorted({_version(key) for line in found.of("asking") for key in line["ids"]} - {0})
    if old := {key for key in stored.refs if 0 < _version(key) < max(asked[-2:-1], default=0)}:
        yield f"{len(old)} groups of evaluations are left that are over: {_some(old)}"
    if wrong := {key for key in counted.keys() | needs.keys() if counted.get(key, 0) != needs[key]}:
        yield f"{len(wrong)} groups are referred to more or less often than they are needed: {_some(wrong)}"


CHECKS: Sequence[Callable[[Evidence], Iterator[str]]] = (
    no_acknowledged_group_is_lost,
    nothing_comes_from_nowhere,
    a_batch_never_changes,
    every_group_is_consumed_once,
    steps_follow_each_other,
    tables_equal_algorithm_1,
    every_request_is_somewhere,
    nothing_is_given_up,
    staleness_is_bounded,
    leases_return,
    nothing_leaks,
)


def _inputs(batch: Line, purpose: str) -> list[Seen]:
    """What an assembly looked at, in the order of the requests."""
    results = [f for f in batch["results"] if f["purpose"] == purpose and f["reason"] not in ("stale", "reused")]
    return [Seen(f["id"], f["prompt"], round(sum(f["rewards"]))) for f in sorted(results, key=_request_order)]


def _request_order(result: Line) -> str:
    """Ids are numbered in the order of the requests, with as many digits; a repeated one sorts behind its first."""
    return str(result["id"])


def _version(request_id: str) -> int:
    """Policy version that an evaluation request measures; 0 for another request."""
    return int(request_id.split("-")[1]) if request_id.startswith("evaluate-") else 0


def _ids(results: Sequence[Line]) -> list[str]:
    return [result["id"] for result in results]


def _some(ids: Iterable[str]) -> str:
    shown = sorted(ids)
    return ", ".join(shown[:SHOWN]) + (", ..." if len(shown) > SHOWN else "")
