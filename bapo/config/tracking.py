"""`[tracking]`: experiment trackers of a run."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from bapo.algorithms.settings import Frozen

TrackerName = Literal["mlflow", "tensorboard", "trackio", "wandb"]


class TrackingConfig(Frozen):
    """Experiment trackers (docs/tracking.md). API keys and server URLs are environment variables, not settings."""

    to: tuple[TrackerName, ...] = ()
    """Trackers to start, each in its own process; training continues if one fails."""
    project: str = Field("bapo", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """Project of W&B and Trackio, experiment of MLflow."""
    entity: str | None = None
    """User or team of W&B; null: your default."""
    group: str | None = None
    """Group of W&B and Trackio, tag `group` of MLflow, for related runs."""
    tags: tuple[str, ...] = ()
    """Tags of W&B and MLflow."""
    responses_every: int = Field(0, ge=0)
    """Steps between tables of prompts, responses and rewards in W&B, Trackio and MLflow, where texts are recorded
    (`diagnostics.texts`); 0: no text is sent."""
    offline: bool = False
    """No network: W&B and MLflow write to the run directory, Trackio to its local database."""

    @field_validator("to", "tags", mode="before")
    @classmethod
    def one_name_is_a_list(cls, value: Any) -> Any:
        """`--tracking.to wandb` is `["wandb"]`."""
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def trackers_differ(self) -> Self:
        if len(set(self.to)) < len(self.to):
            raise ValueError(f"tracking.to = {list(self.to)} lists a tracker twice")
        return self
