"""What prompt selectors learn from, and what they have learnt: kept in the store, read and written by the scheduler."""

from __future__ import annotations

import logging

from bapo.errors import ContractError
from bapo.outcomes import outcomes_of, pack_outcomes
from buffer_service.store import Store
from buffer_service.values import SelectorState

log = logging.getLogger(__name__)


class Learnt:
    """Of one run."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def outcomes(self, after: int, limit: int) -> list[bytes]:
        """Of the steps behind `after`, in order."""
        return self._store.outcomes(after, limit)

    def evaluation_outcomes(self, label: str) -> bytes:
        """Of the groups of one evaluation that are done; those that failed for good are missing."""
        records = self._store.records(self._store.evaluated(label))
        return pack_outcomes(outcomes_of(0, (record.outcome for record in records if record is not None)))

    def state(self) -> SelectorState:
        """The newest that the scheduler has kept here."""
        return self._store.selector_state()

    def keep(self, state: SelectorState) -> bool:
        """Whether it was newer than the one before. Raises: ContractError for a state of steps that did not happen."""
        assembled = self._store.readiness(state.through).assembled
        if state.through > assembled:
            raise ContractError(
                f"the state of a selector stands for outcomes up to step {state.through}, but the newest batch is "
                f"{assembled}"
            )
        is_kept = self._store.keep_selector_state(state)
        log.debug("selector state round=%d through=%d kept=%s", state.round, state.through, is_kept)
        return is_kept
