"""Several instances of the service on one store: whatever one of them takes meanwhile, the other one finds out."""

from __future__ import annotations

from bapo.algorithms.composer import AssemblyView, Decision, Rng
from buffer_service.assembly import Assembler
from tests.support.assembly import KeepsAll, Setup, assemble
from tests.support.factories import make_request


def test_nothing_is_assembled_before_its_turn_or_without_all_its_groups(redis_url: str) -> None:
    setup = Setup(redis_url)
    assembler = Assembler(setup.store, setup.composer, setup.config)
    setup.fill("a")
    assert assemble(assembler, 1) is None
    setup.fill("b")
    assert assemble(assembler, 2) is None
    assert assemble(assembler, 0) is None
    assert assemble(assembler, 1) is not None


def test_an_assembly_that_another_instance_overtakes_is_none(redis_url: str) -> None:
    setup = Setup(redis_url)
    setup.fill("a", "b")

    class Overtaken(KeepsAll):
        def compose(self, view: AssemblyView, rng: Rng) -> Decision:
            assert assemble(Assembler(setup.store, KeepsAll(), setup.config), view.step) is not None
            return super().compose(view, rng)

    assert assemble(Assembler(setup.store, Overtaken(), setup.config), 1) is None
    assert setup.store.readiness(1).assembled == 1


def test_a_stale_prompt_is_asked_again_under_an_id_that_is_free(redis_url: str) -> None:
    setup = Setup(redis_url)
    for step in (1, 2, 3):
        setup.fill(f"a{step}", f"b{step}", step=step, version=step)
        setup.service.batch(step)
    setup.service.enqueue(
        [make_request(prompt_id="other", request_id=f"g-old~{n}", step=9, min_version=9) for n in (1, 2)], None
    )
    setup.fill("old", step=4, rewards="11100000", version=1)
    setup.fill("new", step=4, version=4)
    assert setup.service.batch(4) is None
    assert setup.service.store.counters()["dropped_groups:stale:3/8"] == 1
    (again,) = setup.service.claim("w", 9, 4)
    assert (again.request_id, again.prompt.prompt_id) == ("g-old~3", "old")
