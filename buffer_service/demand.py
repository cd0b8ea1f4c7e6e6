"""What a step asks for that lacks groups which train."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """Further generation rounds that the step which is next has asked for: its batch lacks groups that train."""

    step: int
    rounds: int
    """Rounds of B fresh groups that it needs now, from 2."""
    most: int
    """Rounds after which it takes what there is."""
    found: int
    """Groups that train, among those of the rounds before."""
    wanted: int
    """Groups that train, when the batch is full."""
    num_fresh: int
    """Fresh groups that the step needs: those of all its rounds."""

    @property
    def sentence(self) -> str:
        """For people."""
        return f"round {self.rounds} of {self.most}: {self.found}/{self.wanted} informative groups"
