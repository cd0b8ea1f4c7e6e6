"""A generation budget: an engine whose responses get so many tokens per policy version (Kimi k1.5).

    submit --engine, at most `budget` tokens--> all rows done ------------------------------------> group
                                           '--> some are not: PAUSED, kept on the shelf
    PAUSED --new weights, or nothing else to sample--> each open row is resumed for another budget --> and again

So a few long responses hold up neither their batch nor the engine: while a group is paused, others are sampled. A group
comes out when its last row is done; every token keeps the log-prob and the version that it was sampled with. Fresh
groups alone have a budget: evaluations and re-evaluations ask for the weights of one version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bapo.columns import Float32s, Int32s
from bapo.types import Purpose, RolloutRequest
from rollout_server.drafts import Draft, Shelf, part_id, rows_of
from rollout_server.engines.base import Continuation, Engine, Occupancy, SampledGroup

IDLE_S = 0.5
"""An engine without work for so long has nothing else to sample: as long as a worker's claim may take."""
NAP_S = 0.005


class Budgeted:
    """An `Engine` over another one. Like it, it belongs to one thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        budget: int,
        limit: int,
        shelf: Shelf,
        on_pause: Callable[[str, bool], None] = lambda request_id, paused: None,
        now: Callable[[], float] = time.monotonic,
        idle_s: float | None = None,
    ) -> None:
        """
        Args:
            limit: tokens at which a response is truncated for good.
            on_pause: hears of a group that waits for its next budget, or no longer does.
        """
        self._engine, self._shelf = engine, shelf
        self._budget, self._limit = budget, limit
        self._on_pause, self._now = on_pause, now
        self._idle_s = IDLE_S if idle_s is None else idle_s
        self._requests: dict[str, RolloutRequest] = {}
        self._drafts: dict[str, Draft] = {}
        self._paused: dict[str, int] = {}
        self._complete: list[SampledGroup] = []
        self._busy_at = now()

    @property
    def policy_version(self) -> int:
        """Of the engine."""
        return self._engine.policy_version

    @property
    def num_sampling(self) -> int:
        """Also counts what is paused, so that `step` is called and can resume it."""
        return self._engine.num_sampling + len(self._paused) + len(self._complete)

    @property
    def occupancy(self) -> Occupancy:
        """Of the engine: what is paused takes no room in it."""
        return self._engine.occupancy

    def check_prompts(self, texts: Sequence[str]) -> None:
        """As the engine does."""
        self._engine.check_prompts(texts)

    def encode_response(self, text: str) -> Int32s:
        """As the engine does."""
        return self._engine.encode_response(text)

    def submit(self, request: RolloutRequest, most: int | None = None) -> None:
        """Begin a group, or go on with what another worker has left of it."""
        if request.purpose is not Purpose.FRESH:
            self._engine.submit(request, most)
            return
        draft = self._shelf.load(request, self.policy_version)
        if draft is None:
            self._engine.submit(request, most=min(self._budget, self._limit))
            self._requests[request.request_id] = request
        else:
            self._drafts[request.request_id] = draft
            self._go_on(draft)

    def resume(self, part: Continuation) -> None:
        """As the engine does."""
        self._engine.resume(part)

    def abort(self, request_id: str) -> None:
        """Forget a group; what is kept of it stays, because somebody else may sample it now."""
        draft = self._drafts.pop(request_id, None)
        for row in () if draft is None else draft.unfinished:
            self._engine.abort(part_id(request_id, row))
        self._requests.pop(request_id, None)
        self._paused.pop(request_id, None)
        self._engine.abort(request_id)

    def step(self) -> list[SampledGroup]:
        """One step of the engine; returns groups all of whose rows are done."""
        finished, self._complete = self._complete, []
        if self._engine.num_sampling:
            self._busy_at = self._now()
            for group in self._engine.step():
                finished += self._taken(group)
        elif not finished:
            time.sleep(NAP_S)
        self._resume_due()
        return finished

    def load_weights(self, path: str, version: int) -> None:
        """As the engine does; what is paused goes on with them."""
        self._engine.load_weights(path, version)

    def logprobs(self, token_ids: Sequence[int]) -> Float32s | None:
        """As the engine does."""
        return self._engine.logprobs(token_ids)

    def close(self) -> None:
        """Free the engine; what is paused is on the shelf."""
        self._engine.close()

    def _taken(self, group: SampledGroup) -> list[SampledGroup]:
        """What the engine has finished: a first segment, a further one, or something without a budget."""
        request = self._requests.pop(group.request_id, None)
        if request is not None:
            rows = rows_of(group, self._limit)
            if all(row.done for row in rows):
                return [group]
            draft = Draft(request=request, prompt_token_ids=group.prompt_token_ids, rows=rows)
            self._drafts[request.request_id] = draft
            self._pause(draft)
            return []
        request_id, _, row = group.request_id.rpartition("#")
        found = self._drafts.get(request_id)
        if found is None:
            return [group]
        found.extend(int(row), group, self._limit)
        found.open -= 1
        if found.open:
            return []
        if found.unfinished:
            self._pause(found)
            return []
        self._shelf.save(found)
        del self._drafts[request_id]
        return [found.group()]

    def _pause(self, draft: Draft) -> None:
        self._shelf.save(draft)
        self._paused[draft.request.request_id] = self.policy_version
        self._on_pause(draft.request.request_id, True)

    def _resume_due(self) -> None:
        idle = not self._engine.num_sampling and self._now() - self._busy_at >= self._idle_s
        due = [name for name, version in self._paused.items() if idle or version < self.policy_version]
        for request_id in due:
            del self._paused[request_id]
            self._on_pause(request_id, False)
            self._go_on(self._drafts[request_id])

    def _go_on(self, draft: Draft) -> None:
        rows = draft.unfinished
        if not rows:  # its worker died between the last token and the buffer's acknowledgement
            del self._drafts[draft.request.request_id]
            self._complete.append(draft.group())
            return
        draft.open = len(rows)
        for row in rows:
            self._engine.resume(draft.continuation(row, self._budget, self._limit))
