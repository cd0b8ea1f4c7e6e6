"""The mutation gate itself: it makes the bugs that it says, kills the ones that tests see, and shows the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutation.gate import PATHS, REPOSITORY, Workplace, digest_of, equivalents, load, mutants_of, sampled, save
from tests.mutation.lua_mutants import lua_mutants
from tests.mutation.mutant import Mutant
from tests.mutation.python_mutants import python_mutants

PYTHON = '''
def f(x: int = 1) -> int:
    """Text with == and 5."""
    log.info("%d", x - 1)
    if x < 2 and y:
        x += 3
    return min(x, [i for i in x if i])
'''
LUA = """\
-- a comment with == and 1
if call('ZREM', K.fresh, id) == 1 then
  call('HDEL', K.live, id)
end
"""


def changes(mutants: list[Mutant]) -> list[tuple[str, list[str]]]:
    return [(mutant.operator, mutant.changes) for mutant in mutants]


def test_mutants_of_python_touch_what_runs_and_nothing_else() -> None:
    condition, line = "- if x < 2 and y:", "- return min(x, [i for i in x if i])"
    assert sorted(changes(python_mutants("f.py", PYTHON))) == sorted(
        [
            ("off_by_one", ["- def f(x: int=1) -> int:", "+ def f(x: int=2) -> int:"]),
            ("condition", [condition, "+ if not (x < 2 and y):"]),
            ("logic", [condition, "+ if x < 2 or y:"]),
            ("comparison", [condition, "+ if x <= 2 and y:"]),
            ("off_by_one", [condition, "+ if x < 3 and y:"]),
            ("removed", ["- x += 3", "+ pass"]),
            ("arithmetic", ["- x += 3", "+ x -= 3"]),
            ("off_by_one", ["- x += 3", "+ x += 4"]),
            ("constant", [line, "+ return max(x, [i for i in x if i])"]),
            ("condition", [line, "+ return min(x, [i for i in x if not i])"]),
        ]
    )


def test_mutants_of_lua_touch_what_runs_and_nothing_else() -> None:
    condition, call = "- if call('ZREM', K.fresh, id) == 1 then", "- call('HDEL', K.live, id)"
    assert sorted(changes(lua_mutants("f.lua", LUA))) == sorted(
        [
            ("constant", [condition, "+ if call('ZREM', K.reevaluated, id) == 1 then"]),
            ("comparison", [condition, "+ if call('ZREM', K.fresh, id) ~= 1 then"]),
            ("off_by_one", [condition, "+ if call('ZREM', K.fresh, id) == 2 then"]),
            ("condition", [condition, "+ if not (call('ZREM', K.fresh, id) == 1) then"]),
            ("constant", [call, "+ call('HDEL', K.queue_fresh, id)"]),
            ("removed", [call, "+ -- removed"]),
        ]
    )


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    mutants = [mutant for path in PATHS if path.endswith(".lua") for mutant in mutants_of(path)]
    assert len({mutant.path for mutant in mutants}) > 12
    assert sampled(mutants, 20, seed=3) == sampled(mutants, 20, seed=3) != sampled(mutants, 20, seed=4)
    assert len({digest_of(mutant) for mutant in mutants}) > 0.99 * len(mutants)


def test_every_excuse_is_of_a_mutant_that_exists() -> None:
    excused = equivalents()
    assert all(reason.strip() for reason in excused.values())
    paths = {key.partition("\n")[0] for key in excused}
    assert excused.keys() <= {mutant.key for path in paths for mutant in mutants_of(path)}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    folder = tmp_path_factory.mktemp("mutation") / "copy"
    made = Workplace(folder, ["tests/contract/test_store_groups.py"])
    yield made
    made.close()


def found(path: str, operator: str, change: str) -> Mutant:
    mutants = mutants_of(f"buffer_service/{path}")
    return next(mutant for mutant in mutants if mutant.operator == operator and change in mutant.changes)


def test_a_bug_that_a_test_sees_is_killed_and_taken_out_again(workplace: Workplace) -> None:
    mutant = found("lua/push.lua", "removed", "- bulk('HDEL', K.live, stored_ids)")
    verdict = workplace.try_out(mutant)
    assert (verdict.status, verdict.by.partition(" ")[0]) == ("killed", "FAILED")
    assert (workplace.folder / mutant.path).read_text() == (REPOSITORY / mutant.path).read_text()


def test_a_bug_that_no_test_sees_survives_with_its_diff(workplace: Workplace) -> None:
    mutant = found("redis_store.py", "off_by_one", "- INCOMING_MS = 600000")
    verdict = workplace.try_out(mutant)
    assert verdict.status == "survived"
    assert "+INCOMING_MS = 600001" in verdict.line()["diff"]


def test_tests_that_do_not_end_count_as_killed(workplace: Workplace) -> None:
    mutant = found("redis_store.py", "off_by_one", "- INCOMING_MS = 600000")
    endless = replace(mutant, after="while True: pass\n")
    assert workplace.try_out(endless, limit_s=2.0).status == "timeout"


def test_the_share_counts_neither_equivalents_nor_what_was_not_tried(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    verdicts = {str(i): {"status": word} for i, word in enumerate(["killed", "timeout", "survived", "equivalent"])}
    summary = save(path, 7, verdicts, 9)
    assert (summary["killed_share"], summary["sampled"], summary["tried"]) == (pytest.approx(0.6667), 9, 4)
    assert load(path) == verdicts
