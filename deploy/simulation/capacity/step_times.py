"""How long steps and proposals take in a capacity simulation, and a file with measured ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.core.errors import ConfigurationError
from cluster.core.verification import StepSample
from cluster.speculation.latency import LatencyModel
from deploy.simulation.simulated_drafter import DrafterSpeed
from deploy.simulation.simulated_target import StepRow, StepTime

PROFILED = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 10), (1, 16), (1, 32), (8, 8), (8, 16), (8, 32), (32, 32), (32, 64))
"""(rows, tokens) of the steps that a target measures at warm-up, as in `workers.verify.step_profile`."""

Time = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]


class MeasuredTimes(BaseModel):
    """A file of measured times, in seconds. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: Annotated[tuple[tuple[int, int, Annotated[float, Field(gt=0, le=3600)]], ...], Field(min_length=1)]
    """(rows, tokens, seconds) of steps of the target."""
    held_token_seconds: Time = 0.0
    """Time that one stored token adds to a step, because its keys and values are read."""
    round_seconds: Time = 0.0
    """Time of a round outside of its step and of the wait for drafts: coordinator, codecs, transport."""
    draft_call_seconds: Time = 0.0005
    """Time of a proposal without its rows, depth and new tokens."""
    draft_row_seconds: Time = 0.0
    draft_depth_seconds: Time = 0.0
    """Time of one level of the deepest tree."""
    draft_token_seconds: Time = 0.0
    """Time of one committed token that the drafter has not seen."""


@dataclass(frozen=True, slots=True)
class Times:
    """All times of a simulated cluster."""

    step: StepTime
    drafter: DrafterSpeed
    round_seconds: float = 0.0
    """Time of a round outside of its step and of the wait for drafts: coordinator, codecs, transport."""

    def profile(self) -> tuple[StepSample, ...]:
        """What a target measures at warm-up: sequences of one stored token."""
        return tuple(
            StepSample(rows, tokens, self.step([StepRow(1, tokens // rows)] * rows)) for rows, tokens in PROFILED
        )


def measured_times(path: Path) -> Times:
    """The times of a file. Raises `ConfigurationError`."""
    try:
        values = MeasuredTimes.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise ConfigurationError(f"--step-times {path}: needed measured times, found: {error}") from None
    return of_measured(values)


def of_measured(values: MeasuredTimes) -> Times:
    """The times that measurements give: interpolated between the sizes, extended by a line beyond them."""
    model = LatencyModel.of_profile([StepSample(*step) for step in values.steps])

    def step(rows: Sequence[StepRow]) -> float:
        held = sum(row.stored for row in rows)
        return model.seconds(len(rows), sum(row.width for row in rows)) + values.held_token_seconds * held

    speed = DrafterSpeed(
        values.draft_call_seconds, values.draft_row_seconds, values.draft_depth_seconds, values.draft_token_seconds
    )
    return Times(step, speed, values.round_seconds)
