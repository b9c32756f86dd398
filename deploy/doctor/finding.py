"""What `pilotfish doctor` has found about one thing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. It is a problem if there is a remedy."""

    subject: str
    found: str
    remedy: str | None = None
    """What the user can do; `None` if nothing is wrong."""

    @property
    def is_problem(self) -> bool:
        """Whether something is wrong."""
        return self.remedy is not None

    def __str__(self) -> str:
        return f"{self.subject}: {self.found}" + (f"; {self.remedy}" if self.remedy else "")
