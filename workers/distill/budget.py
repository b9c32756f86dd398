"""Divides the minutes of a whole `pilotfish distill` among its stages. The command prints the plan first."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Clock = Callable[[], float]

_ANSWERS, _STATES, _END = 0.5, 0.2, 0.08
"""Shares of the time for answers and for the target's hidden states, if they are missing, and for measuring and writing
at the end. Training has the rest."""
MEASURED = 0.1
"""Most of the training's time in which a drafting module is measured as it is served, as a share."""
_RECENT_STEPS = 20


class StepTimes:
    """Measures the steps of a stage, so that a step begins only where it is expected to end in time."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Measure the step inside."""
        begun = self._clock()
        yield
        self.note(self._clock() - begun)

    def note(self, seconds: float) -> None:
        """Add a step that took so long."""
        self._recent.append(seconds)

    @property
    def longest(self) -> float:
        """The longest of the last 20 steps, in seconds; 0 before the first."""
        return max(self._recent, default=0.0)

    def one_fits(self, ends: float | None) -> bool:
        """Whether a step as long as the longest of the last ones ends by `ends`, on the clock. `None` is no limit."""
        now = self._clock()
        return ends is None or (now < ends and now + self.longest <= ends)


@dataclass(frozen=True, slots=True)
class Budget:
    """The time of a command. A stage that ends early leaves its time to those after it."""

    minutes: float | None
    """`None`: the command takes as long as its other limits allow."""
    needs_answers: bool
    needs_states: bool
    clock: Clock = time.monotonic
    started: float = field(default=0.0)

    @classmethod
    def begin(
        cls, minutes: float | None, *, needs_answers: bool, needs_states: bool, clock: Clock = time.monotonic
    ) -> Budget:
        """A budget that begins now."""
        return cls(minutes, needs_answers, needs_states, clock, clock())

    @property
    def seconds(self) -> float:
        """The time of the whole command."""
        return math.inf if self.minutes is None else self.minutes * 60

    @property
    def answer_seconds(self) -> float:
        """The time until answers end; 0 where none are generated."""
        return self.seconds * _ANSWERS if self.needs_answers else 0.0

    @property
    def state_seconds(self) -> float:
        """The time for hidden states."""
        return self.seconds * _STATES if self.needs_states else 0.0

    @property
    def answers_end(self) -> float:
        """When the last answer must be finished, on the clock."""
        return self.started + self.answer_seconds if self.minutes is not None else math.inf

    @property
    def states_end(self) -> float:
        """When the last hidden state must be computed, on the clock."""
        return self.started + self.answer_seconds + self.state_seconds if self.minutes is not None else math.inf

    def left_for_answers(self) -> float:
        """Seconds until answers end."""
        return max(0.0, self.answers_end - self.clock())

    def left_for_training(self) -> float:
        """Seconds until training must end."""
        return max(0.0, self.started + self.seconds * (1 - _END) - self.clock())

    def left(self) -> float:
        """Seconds until the command must end."""
        return max(0.0, self.started + self.seconds - self.clock())

    def plan(self) -> str:
        """The plan in words."""
        if self.minutes is None:
            return "plan: no limit of time"
        stages = [(self.answer_seconds, "answers"), (self.state_seconds, "hidden states")]
        rest = self.seconds * (1 - _END) - self.answer_seconds - self.state_seconds
        stages += [(rest, "training"), (self.seconds * _END, "measuring")]
        parts = [f"{name} {seconds / 60:.1f} min" for seconds, name in stages if seconds > 0]
        if self.needs_states:
            parts[-2] += f" (up to {rest * MEASURED / 60:.1f} min of them for tokens per step)"
        return f"plan for {self.minutes:g} min: {', '.join(parts)} at most"
